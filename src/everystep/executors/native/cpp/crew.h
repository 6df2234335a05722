// A team of threads that does the phases of a step together.
//
// The caller is its first member. Within a step members wait for each other by spinning, and after
// a while by giving their time away or by naps, so that a neighbour on the machine costs little more
// than its share; between steps they spin briefly and then sleep. Every member has a run of a phase's
// items to itself, so that what it fetches ahead is its own; who is done helps the others. Items are
// claimed one at a time, so a member that lost its core holds nobody up for longer than an item.
//
// A job may be started without the caller, who then joins it at one of its doors or gives it up.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "portable.h"

namespace everystep {

class Crew {
  public:
    // One member's place in the sequence of phases, which is the same for all members.
    struct Member {
        int index;
        uint32_t phase = 0;
    };

    // std::system_error where the threads cannot be made; those that were made have ended then.
    explicit Crew(int size);
    ~Crew();
    Crew(const Crew&) = delete;
    Crew& operator=(const Crew&) = delete;

    int size() const { return size_; }

    // Whether this process was forked since: its threads stayed with the parent. Such a crew is of no
    // use and must never be destroyed, because a lock of it may be held by a thread that is not here.
    bool lost() const;

    // Runs `job` once on every member, and returns when all are done.
    void run(const std::function<void(Member&)>& job);

    // Runs `job` on every member but the caller, who goes on meanwhile, until `join` or `give_up`.
    // There is another member.
    void start(std::function<void(Member&)> job);

    // What was started is done when this returns. The caller takes part from the next door on, where
    // `rest(member, door)` does what is left.
    template <class Rest>
    void join(Rest rest) {
        wish_.store(Wish::kEnter, std::memory_order_release);
        if (!admitted()) return;
        Member first{0, finished_phases_.load(std::memory_order_acquire)};
        rest(first, door_);
        wait_for_others();
    }

    // What was started ends as soon as members see it, its results are of no use.
    void give_up();

    // Within a job, between phases: where members let the caller in. False if the job is given up.
    bool pass(Member& member, int64_t door);

    // Within a job: `work(item)` is called for every one of [0, items), by whoever is free; every
    // member returns when all of it is done.
    template <class Job>
    void share(Member& member, int64_t items, Job work) {
        share(member, items, work, [] {});
    }

    // The same; then the last member to arrive calls `then`, before anybody returns. What is too
    // little to be shared costs one meeting less in this way.
    template <class Job, class Then>
    void share(Member& member, int64_t items, Job work, Then then) {
        for (int i = 0; i < size_; ++i) work_through(member, (member.index + i) % size_, items, work);
        if (is_last()) {
            if (!given_up()) then();
            release(member);
        } else {
            wait(member);
        }
    }

  private:
    static constexpr uint32_t kCounters = 4;
    struct alignas(64) Counter {
        std::atomic<int64_t> value{0};
    };

    enum class Wish { kNone, kEnter, kGiveUp };

    // Claims what is left of the items that lie before the given member.
    template <class Job>
    void work_through(const Member& member, int whose, int64_t items, Job& work) {
        std::atomic<int64_t>& next = counter(member.phase, whose);
        const int64_t first = items * whose / size_, count = items * (whose + 1) / size_ - first;
        while (next.load(std::memory_order_relaxed) < count) {
            const int64_t item = next.fetch_add(1, std::memory_order_relaxed);
            if (item >= count || given_up()) return;
            work(first + item);
        }
    }

    std::atomic<int64_t>& counter(uint32_t phase, int whose) {
        return next_[phase % kCounters * size_ + whose].value;
    }

    bool given_up() const { return wish_.load(std::memory_order_relaxed) == Wish::kGiveUp; }
    bool is_last() {
        // Read before arriving: whoever arrives last may change it.
        const int present = present_;
        return arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == present;
    }
    // Whether the caller was let in; false when the job has ended without.
    bool admitted();
    void begin(const std::function<void(Member&)>& job, int present);
    void wait_for_others();
    void release(Member& member);
    void wait(Member& member);
    void serve(int index);
    void close();

    const int size_;
    const uint32_t forks_;
    std::vector<Counter> next_;  // per phase and member
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> finished_phases_{0};
    alignas(64) std::atomic<uint64_t> started_jobs_{0};
    alignas(64) std::atomic<int> busy_{0};
    alignas(64) std::atomic<Wish> wish_{Wish::kNone};
    std::atomic<bool> admitted_{false};
    // These change where all that are present meet: how many those are, whether they leave, and the
    // door at which the caller came in.
    int present_ = 0;
    bool leaving_ = false;
    int64_t door_ = 0;
    const std::function<void(Member&)>* job_ = nullptr;
    std::function<void(Member&)> started_;
    bool closing_ = false;
    std::mutex sleeping_;
    Condition wake_;
    std::vector<std::thread> threads_;
};

// The cores of this machine, shared by all steps of this process: those that together want more cores
// than there are wait for each other, in the order in which they came, so that threads of one do not
// spin where another has work to do.
class Cores {
  public:
    // The cores of one step, until it is over.
    class Turn {
      public:
        // Waits until `members` cores are free, or all where there are fewer.
        explicit Turn(int members);
        ~Turn();
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        // Whether other steps run or wait.
        bool is_crowded() const;

      private:
        Cores& cores_;
        const int taken_;
    };

  private:
    static Cores& all();

    const int count_ = std::max(1, int(std::thread::hardware_concurrency()));
    mutable std::mutex lock_;
    Condition change_;
    int free_ = count_;
    uint64_t came_ = 0, admitted_ = 0;
};

}  // namespace everystep
