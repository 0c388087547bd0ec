// The device's time.
//
// [Note: modelled time] An operation that is made slow has a modelled length. Its stream's clock says when it would
// have ended had each operation taken exactly its length: it moves on by lengths, by waiting for events (which carry
// their stream's clock), and by the host launching late. The thread sleeps until that moment. A thread that wakes
// late does not make the next operation late, so errors of the host's scheduler do not add up, and the time between
// two events is the sum of the lengths between them. Where the work itself takes longer than its length the thread
// falls behind its clock; by more than kForgiven, the clock is put right and the difference is counted as late.
#pragma once

#include "runtime.h"

#include <algorithm>
#include <thread>

namespace emulated {

inline Clock::duration as_duration(double seconds) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}
inline double as_seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// What serves one demand at a time: the compute units, or one direction of the link.
class Engine {
 public:
  // Serves `seconds` of work that can begin at `ready`; the answer is when it ends.
  Clock::time_point take(Clock::time_point ready, double seconds) {
    std::lock_guard lock(mutex_);
    free_at_ = std::max(free_at_, ready) + as_duration(seconds);
    busy_seconds_ += seconds;
    return free_at_;
  }
  // Work of no modelled length, which took that long.
  void add_busy(double seconds) {
    std::lock_guard lock(mutex_);
    busy_seconds_ += seconds;
  }
  double busy_seconds() {
    std::lock_guard lock(mutex_);
    return busy_seconds_;
  }
  void reset() {
    std::lock_guard lock(mutex_);
    busy_seconds_ = 0;
    free_at_ = {};
  }

 private:
  std::mutex mutex_;
  Clock::time_point free_at_{};
  double busy_seconds_ = 0;
};

inline Engine& engine(Lane lane) {
  static auto* engines = new std::array<Engine, 3>;
  return (*engines)[static_cast<int>(lane)];
}

// The clock of one stream; only its thread touches it.
class StreamClock {
 public:
  static constexpr std::chrono::milliseconds kForgiven{5};

  Clock::time_point now() const { return now_; }
  void come_to(Clock::time_point at) { now_ = std::max(now_, at); }
  void pass(double seconds) {
    if (seconds <= 0) return;
    now_ += as_duration(seconds);
    std::this_thread::sleep_until(now_);
  }
  void work(Engine& engine, double seconds) {
    now_ = engine.take(now_, seconds);
    std::this_thread::sleep_until(now_);
  }
  // After an operation: with no modelled length it ended when it did.
  void settle(bool modelled) {
    const auto actual = Clock::now();
    if (!modelled) {
      now_ = actual;
    } else if (actual > now_ + kForgiven) {
      counters.late_nanoseconds += std::chrono::duration_cast<std::chrono::nanoseconds>(actual - now_).count();
      now_ = actual;
    }
  }

 private:
  Clock::time_point now_{};
};

}  // namespace emulated
