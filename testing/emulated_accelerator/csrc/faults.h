// What tests plant: delays, and failures with the errors that a real device gives.
//
// Both are counted in the order in which the host asks (launches, records, allocates), not in the order in which the
// threads run, so that a schedule means the same thing in each run of a program that launches from one thread.
#pragma once

#include "runtime.h"

#include <optional>

namespace emulated {

// What can be delayed (the first four) or made to fail (all but events). The first three are the lanes.
enum class Kind : int { compute = 0, h2d = 1, d2h = 2, event = 3, allocation = 4, pinning = 5 };
constexpr std::array<const char*, 6> kKindNames{"compute", "h2d", "d2h", "event", "allocation", "pinning"};

// The runtime's error numbers and texts are CUDA's (cudaError_t in driver_types.h).
struct Failure {
  std::string message;
  bool fatal;  // the device is lost: every later call fails, too

  [[noreturn]] void raise(Kind kind) const {
    const int code = kind == Kind::compute ? 719 : kind == Kind::pinning ? 2 : 214;
    const char* text = kind == Kind::compute ? "unspecified launch failure"
        : kind == Kind::pinning              ? "out of memory"
                                             : "uncorrectable ECC error encountered";
    auto error = std::make_exception_ptr(c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code,
        "Emulated accelerator error: " + (message.empty() ? std::string(text) : message) +
            "\nErrors of kernels and copies are reported where the host next synchronises. With "
            "set_launch_blocking(True) they are reported at the call that they belong to."));
    if (fatal) pending_error().lose_device(error);
    std::rethrow_exception(error);
  }
};

// What is planted for one operation.
struct Fate {
  double delay_seconds = 0;
  std::optional<Failure> failure;
};

class Faults {
 public:
  // The delays of the operations to come, gone through again and again; none: no delay.
  void set_delays(Kind kind, std::vector<double> seconds) {
    std::lock_guard lock(mutex_);
    auto& planted = planted_[static_cast<int>(kind)];
    planted.delays = std::move(seconds);
    planted.next_delay = 0;
  }
  // After `good` more good ones, `times` fail.
  void fail(Kind kind, uint64_t good, uint64_t times, Failure failure) {
    std::lock_guard lock(mutex_);
    auto& planted = planted_[static_cast<int>(kind)];
    planted.good = good;
    planted.bad = times;
    planted.failure = std::move(failure);
  }
  Fate next(Kind kind) {
    std::lock_guard lock(mutex_);
    auto& planted = planted_[static_cast<int>(kind)];
    Fate fate;
    if (!planted.delays.empty()) fate.delay_seconds = planted.delays[planted.next_delay++ % planted.delays.size()];
    if (planted.bad == 0) return fate;
    if (planted.good > 0) {
      --planted.good;
    } else {
      --planted.bad;
      fate.failure = planted.failure;
    }
    return fate;
  }
  // How many planted failures have not happened yet.
  uint64_t failures_left() {
    std::lock_guard lock(mutex_);
    uint64_t left = 0;
    for (const auto& planted : planted_) left += planted.bad;
    return left;
  }
  void forget() {
    std::lock_guard lock(mutex_);
    planted_ = {};
  }

 private:
  struct Planted {
    std::vector<double> delays;
    size_t next_delay = 0;
    uint64_t good = 0;
    uint64_t bad = 0;
    Failure failure{};
  };
  std::mutex mutex_;
  std::array<Planted, 6> planted_{};
};

inline Faults& faults() {
  static auto* all = new Faults;
  return *all;
}

}  // namespace emulated
