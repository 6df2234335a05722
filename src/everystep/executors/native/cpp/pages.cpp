#include "pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <iterator>
#include <new>

namespace everystep {
namespace {

// Many small pages come together, but no slab is larger than this unless a page is.
constexpr int64_t kSlabPages = 64, kSlabBytes = int64_t(64) << 20;

// Slabs that were given back, the last of each size first to go out again.
class Kept {
  public:
    Kept() { held_.reserve(kSlabs); }

    // One of so many bytes, or null.
    void* take(size_t bytes) {
        const Alone alone(taken_);
        if (!alone) return nullptr;
        for (auto it = held_.rbegin(); it != held_.rend(); ++it) {
            if (it->first != bytes) continue;
            void* found = it->second;
            held_.erase(std::next(it).base());
            bytes_ -= bytes;
            return found;
        }
        return nullptr;
    }
    // Whether there is room for it.
    bool give(size_t bytes, void* memory) noexcept {
        const Alone alone(taken_);
        if (!alone || bytes_ + bytes > kMost || held_.size() == held_.capacity()) return false;
        held_.emplace_back(bytes, memory);
        bytes_ += bytes;
        return true;
    }

  private:
    // Holds the flag, unless another thread does: nobody waits, for a process that was forked may find
    // it held for ever.
    class Alone {
      public:
        explicit Alone(std::atomic_flag& flag)
            : flag_(flag), held_(!flag.test_and_set(std::memory_order_acquire)) {}
        ~Alone() {
            if (held_) flag_.clear(std::memory_order_release);
        }
        explicit operator bool() const { return held_; }

      private:
        std::atomic_flag& flag_;
        const bool held_;
    };

    static constexpr size_t kMost = size_t(128) << 20, kSlabs = 16;
    std::atomic_flag taken_ = ATOMIC_FLAG_INIT;
    std::vector<std::pair<size_t, void*>> held_;
    size_t bytes_ = 0;
};

// It is there for as long as the process, whose runners may end late.
Kept& kept() {
    static Kept* const all = new Kept;
    return *all;
}

// Asks the system for large pages, of which fewer are to be looked up: a row's keys and values of one
// layer lie in a few kilobytes here and there.
void prefer_large_pages(void* memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    const uintptr_t size = uintptr_t(sysconf(_SC_PAGESIZE)), from = reinterpret_cast<uintptr_t>(memory);
    const uintptr_t begin = (from + size - 1) / size * size, end = (from + bytes) / size * size;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

// From here on memory comes from the system: the allocator would take what it has, and have to write
// zeros into all of it.
constexpr size_t kMapped = size_t(1) << 20;

// Zeros, which take room only when they are written.
void* fresh(size_t bytes) {
    void* memory = nullptr;
    if (bytes < kMapped) {
        memory = std::calloc(bytes, 1);
    } else {
        memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) memory = nullptr;
    }
    if (!memory) throw std::bad_alloc();
    return memory;
}

void release(void* memory, size_t bytes) {
    if (bytes < kMapped) {
        std::free(memory);
    } else {
        munmap(memory, bytes);
    }
}

}  // namespace

Slab::Slab(size_t bytes) : bytes_(bytes), memory_(kept().take(bytes)) {
    if (memory_) return;
    memory_ = fresh(bytes);
    prefer_large_pages(memory_, bytes);
}

Slab::~Slab() {
    if (memory_ && !kept().give(bytes_, memory_)) release(memory_, bytes_);
}

void Pages::reserve(int64_t count) {
    const int64_t together = std::clamp<int64_t>(kSlabBytes / std::max<int64_t>(bytes_, 1), 1, kSlabPages);
    while (this->count() < count) {
        Slab slab(together * bytes_ + 64);
        if (pages_.capacity() < pages_.size() + together) pages_.reserve(2 * pages_.size() + together);
        const auto address = reinterpret_cast<uintptr_t>(slab.memory());
        slabs_.push_back(std::move(slab));
        uint8_t* first = reinterpret_cast<uint8_t*>((address + 63) / 64 * 64);
        for (int64_t i = 0; i < together; ++i) pages_.push_back(first + i * bytes_);
    }
}

}  // namespace everystep
