#include "crew.h"

#include <pthread.h>

#include <chrono>

namespace everystep {
namespace {

void rest_a_moment() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

constexpr auto kOthersHadTheCore = std::chrono::milliseconds(1);
constexpr auto kNap = std::chrono::microseconds(20);
constexpr int kNaps = 50;

// Calls `done` until it is true: for some microseconds without a pause for others, then letting them
// go first, for whoever is waited for may need this very core.
//
// A kernel may count time that was given away as time that was used. Where other programs want every
// core, a member that goes on giving it away is then left out for far longer than its share, and the
// others wait for it in turn: steps took four times as long where twice was fair. So who has just
// lost a core for long takes naps instead, which cost no share.
template <class Done>
void wait_for(Done done) {
    static thread_local int naps = 0;
    for (int i = 0; i < 400; ++i) {
        if (done()) return;
        rest_a_moment();
    }
    while (!done()) {
        if (naps > 0) {
            --naps;
            std::this_thread::sleep_for(kNap);
            continue;
        }
        const auto before = std::chrono::steady_clock::now();
        std::this_thread::yield();
        if (std::chrono::steady_clock::now() - before > kOthersHadTheCore) naps = kNaps;
    }
}

constexpr auto kAwakeBetweenJobs = std::chrono::microseconds(200);

// How often the process was forked on the way from the one that loaded the library.
std::atomic<uint32_t> forks{0};

}  // namespace

Crew::Crew(int size) : size_(size), forks_(forks.load()), next_(kCounters * size) {
    threads_.reserve(size_);
    try {
        for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { serve(i); });
    } catch (...) {
        close();
        throw;
    }
}

Crew::~Crew() { close(); }

bool Crew::lost() const { return forks_ != forks.load(std::memory_order_relaxed); }

void Crew::close() {
    {
        std::lock_guard<std::mutex> lock(sleeping_);
        closing_ = true;
        started_jobs_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void Crew::run(const std::function<void(Member&)>& job) {
    Member first{0, finished_phases_.load(std::memory_order_relaxed)};
    begin(job, size_);
    job(first);
    wait_for_others();
}

void Crew::start(std::function<void(Member&)> job) {
    started_ = std::move(job);
    begin(started_, size_ - 1);
}

void Crew::begin(const std::function<void(Member&)>& job, int present) {
    present_ = present;
    leaving_ = false;
    admitted_.store(false, std::memory_order_relaxed);
    wish_.store(Wish::kNone, std::memory_order_relaxed);
    if (size_ == 1) return;
    {
        // The lock makes sure that nobody falls asleep between looking and being woken.
        std::lock_guard<std::mutex> lock(sleeping_);
        job_ = &job;
        busy_.store(size_ - 1, std::memory_order_relaxed);
        started_jobs_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
}

void Crew::wait_for_others() {
    wait_for([this] { return busy_.load(std::memory_order_acquire) == 0; });
}

void Crew::give_up() {
    wish_.store(Wish::kGiveUp, std::memory_order_relaxed);
    wait_for_others();
}

bool Crew::admitted() {
    wait_for([this] {
        return admitted_.load(std::memory_order_acquire) || busy_.load(std::memory_order_acquire) == 0;
    });
    return admitted_.load(std::memory_order_acquire);
}

bool Crew::pass(Member& member, int64_t door) {
    if (present_ == size_) return true;
    if (is_last()) {
        const Wish wish = wish_.load(std::memory_order_acquire);
        leaving_ = wish == Wish::kGiveUp;
        if (wish == Wish::kEnter) present_ = size_;
        door_ = door;
        release(member);
        // Only now, for who comes in must not meet anybody in this phase.
        if (wish == Wish::kEnter) admitted_.store(true, std::memory_order_release);
    } else {
        wait(member);
    }
    return !leaving_;
}

void Crew::serve(int index) {
    uint64_t seen = 0;
    for (;;) {
        const auto started = [&] { return started_jobs_.load(std::memory_order_acquire) != seen; };
        const auto until = std::chrono::steady_clock::now() + kAwakeBetweenJobs;
        while (!started() && std::chrono::steady_clock::now() < until) rest_a_moment();
        if (!started()) {
            std::unique_lock<std::mutex> lock(sleeping_);
            wake_.wait(lock, started);
        }
        ++seen;
        if (closing_) return;
        // All members start a job from the same phase, because the last job has ended for all.
        Member member{index, finished_phases_.load(std::memory_order_relaxed)};
        (*job_)(member);
        busy_.fetch_sub(1, std::memory_order_release);
    }
}

void Crew::release(Member& member) {
    const uint32_t phase = member.phase++;
    arrived_.store(0, std::memory_order_relaxed);
    // Everybody has left the phase before this one, whose counters are next but two.
    for (int whose = 0; whose < size_; ++whose)
        counter(phase + 2, whose).store(0, std::memory_order_relaxed);
    finished_phases_.store(phase + 1, std::memory_order_release);
}

void Crew::wait(Member& member) {
    const uint32_t phase = member.phase++;
    wait_for([&] { return finished_phases_.load(std::memory_order_acquire) != phase; });
}

// Never destroyed: threads may wait for it while the process ends. A child begins with a new one,
// because threads that are not there may hold cores and the lock of the old one.
Cores& Cores::all() {
    static std::atomic<Cores*> held{[] {
        pthread_atfork(nullptr, nullptr, [] {
            forks.fetch_add(1);
            held.store(new Cores);
        });
        return new Cores;
    }()};
    return *held.load(std::memory_order_acquire);
}

Cores::Turn::Turn(int members) : cores_(all()), taken_(std::min(members, cores_.count_)) {
    std::unique_lock<std::mutex> lock(cores_.lock_);
    const uint64_t place = cores_.came_++;
    cores_.change_.wait(
        lock, [&] { return place == cores_.admitted_ && cores_.free_ >= taken_; });
    ++cores_.admitted_;
    cores_.free_ -= taken_;
    cores_.change_.notify_all();
}

Cores::Turn::~Turn() {
    std::lock_guard<std::mutex> lock(cores_.lock_);
    cores_.free_ += taken_;
    cores_.change_.notify_all();
}

bool Cores::Turn::is_crowded() const {
    std::lock_guard<std::mutex> lock(cores_.lock_);
    return cores_.came_ != cores_.admitted_ || cores_.free_ + taken_ != cores_.count_;
}

}  // namespace everystep
