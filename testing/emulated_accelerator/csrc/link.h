// The link between host and device: one lane in each direction, each with a rate that all copies in that
// direction share, and the faults that tests plant (a delay, a failure).
#pragma once

#include "runtime.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace emulated {

class Link {
 public:
  void set_bytes_per_s(double rate) { bytes_per_s_ = rate; }
  void set_delay(double seconds) { delay_seconds_ = seconds; }

  // The copy after `copies` more good ones fails with `message`, once.
  void fail_after(int64_t copies, std::string message) {
    std::lock_guard lock(mutex_);
    good_copies_left_ = copies;
    failure_ = std::move(message);
  }
  void forget_faults() {
    std::lock_guard lock(mutex_);
    good_copies_left_ = -1;
    delay_seconds_ = 0;
  }

  // Called once for each copy, before its first byte moves.
  void begin_copy() {
    if (const double seconds = delay_seconds_; seconds > 0) {
      std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    }
    std::lock_guard lock(mutex_);
    if (good_copies_left_ < 0) return;
    TORCH_CHECK(good_copies_left_-- > 0, failure_);
  }

  // Moves plain bytes in slices of about a millisecond, so that concurrent copies get equal shares and a reader
  // that did not wait sees a half-done copy.
  void carry(void* to, const void* from, size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
      const double rate = bytes_per_s_;
      const size_t part = std::min(nbytes - done, slice(rate));
      wait_turn(part, rate);
      std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, part);
      done += part;
    }
  }

  // The same time, for a copy that is not plain bytes (strided, or changing dtype) and is then done in one go.
  void occupy(size_t nbytes) {
    for (size_t done = 0; done < nbytes;) {
      const double rate = bytes_per_s_;
      const size_t part = std::min(nbytes - done, slice(rate));
      wait_turn(part, rate);
      done += part;
    }
  }

 private:
  static size_t slice(double rate) {
    constexpr size_t kLargest = size_t{4} << 20;
    if (rate <= 0) return kLargest;
    return std::clamp(static_cast<size_t>(rate * 1e-3), size_t{4096}, kLargest);
  }
  void wait_turn(size_t nbytes, double rate) {
    if (rate <= 0) return;
    Clock::time_point until;
    {
      std::lock_guard lock(mutex_);
      free_at_ = std::max(free_at_, Clock::now()) +
          std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(nbytes / rate));
      until = free_at_;
    }
    std::this_thread::sleep_until(until);
  }

  std::mutex mutex_;
  std::atomic<double> bytes_per_s_{0};
  std::atomic<double> delay_seconds_{0};
  int64_t good_copies_left_ = -1;  // -1: no failure is planted
  std::string failure_;
  Clock::time_point free_at_{};
};

inline Link& link(Lane lane) {
  static auto* links = new std::array<Link, 3>;
  return (*links)[static_cast<int>(lane)];
}

}  // namespace emulated
