// What keeps a library compiled on a new system loadable on older ones, down to glibc 2.28 and the
// libstdc++ of GCC 8, as wheels promise.
#pragma once

#include <pthread.h>

#include <mutex>

namespace everystep {

// Since glibc 2.29 these two have a second version that differs in `errno` alone.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
#endif

// std::condition_variable, whose `wait` got a symbol of its own in GCC 12.
class Condition {
  public:
    Condition() = default;
    ~Condition() { pthread_cond_destroy(&held_); }
    Condition(const Condition&) = delete;
    Condition& operator=(const Condition&) = delete;

    template <class Until>
    void wait(std::unique_lock<std::mutex>& lock, Until until) {
        while (!until()) pthread_cond_wait(&held_, lock.mutex()->native_handle());
    }
    void notify_all() { pthread_cond_broadcast(&held_); }

  private:
    pthread_cond_t held_ = PTHREAD_COND_INITIALIZER;
};

}  // namespace everystep
