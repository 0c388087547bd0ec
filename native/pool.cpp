// The thread pool of pool.h. State: idle (job null) → running (job set; workers join in) → draining (job null
// again, so that a worker which wakes late does not join; active counts those inside) → idle.
#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace overspill {
namespace {

// [Note: Floating-point environment] torch.set_flush_denormal and other libraries change a thread's mode, and
// a new thread inherits it. Results may not depend on that.
class DefaultFloats {
 public:
#if defined(__x86_64__)
  DefaultFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(std::uint64_t{0}));
  }
  ~DefaultFloats() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  std::uint64_t saved_;
#endif
};

}  // namespace

struct ThreadPool::State {
  pid_t owner = getpid();
  std::mutex turn;  // held by the caller whose job runs
  std::mutex mutex;  // guards all below but next
  std::condition_variable wake, idle;
  const std::function<void(std::size_t)>* job = nullptr;
  std::size_t count = 0;
  std::uint64_t generation = 0;
  int active = 0;
  bool stop = false;
  std::atomic<std::size_t> next{0};
  std::vector<std::thread> workers;

  void take_items(const std::function<void(std::size_t)>& item, std::size_t end) {
    const DefaultFloats floats;
    for (std::size_t i = next.fetch_add(1); i < end; i = next.fetch_add(1)) item(i);
  }

  void work() {
    std::unique_lock lock(mutex);
    std::uint64_t seen = 0;
    for (;;) {
      wake.wait(lock, [&] { return stop || (job != nullptr && generation != seen); });
      if (stop) return;
      seen = generation;
      const auto* item = job;
      const std::size_t end = count;
      ++active;
      lock.unlock();
      take_items(*item, end);
      lock.lock();
      if (--active == 0) idle.notify_one();
    }
  }

  void shut_down() {
    {
      const std::lock_guard lock(mutex);
      stop = true;
    }
    wake.notify_all();
    for (auto& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  if (threads < 1 || threads > 1024) {
    throw std::invalid_argument("threads must be 1 to 1024, got " + std::to_string(threads));
  }
  state_ = std::make_unique<State>();
  try {
    for (int i = 1; i < threads; ++i) state_->workers.emplace_back([state = state_.get()] { state->work(); });
  } catch (...) {
    state_->shut_down();
    throw;
  }
}

ThreadPool::~ThreadPool() {
  if (state_->owner != getpid()) {
    // In a forked child the threads do not exist and a lock may be held for ever: leave it all alone.
    static_cast<void>(state_.release());
    return;
  }
  state_->shut_down();
}

void ThreadPool::check_process() const {
  if (state_->owner != getpid()) {
    throw std::runtime_error("this ThreadPool belongs to process " + std::to_string(state_->owner) +
                             " and cannot be used in a forked child; make a new one here");
  }
}

void ThreadPool::run(std::size_t count, const std::function<void(std::size_t)>& item) {
  check_process();
  if (count == 0) return;
  State& s = *state_;
  const std::lock_guard turn(s.turn);
  if (s.workers.empty() || count == 1) {
    s.next = 0;
    s.take_items(item, count);
    return;
  }
  {
    const std::lock_guard lock(s.mutex);
    s.next = 0;
    s.count = count;
    s.job = &item;
    ++s.generation;
  }
  s.wake.notify_all();
  s.take_items(item, count);
  std::unique_lock lock(s.mutex);
  s.job = nullptr;
  s.idle.wait(lock, [&] { return s.active == 0; });
}

}  // namespace overspill
