// What every part of the emulated accelerator shares: its device type, the guard against fork, the error
// that a stream met and the host has not heard of yet, the switches that tests turn, and the counters.
//
// Not here: time (timing.h), faults (faults.h), streams (streams.h), memory (memory.h), the host-device link (link.h),
// operations (tensors.cpp, compute.cpp).
#pragma once

#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emulated {

constexpr c10::DeviceType kDevice = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;

// The three lanes on which time passes. Copies inside the device are compute.
enum class Lane : int { compute = 0, h2d = 1, d2h = 2 };
constexpr std::array<const char*, 3> kLaneNames{"compute", "h2d", "d2h"};

// Set in a forked child by pthread_atfork (module.cpp). The threads behind the streams do not exist there, so
// every entry refuses, and every release is left undone (locks may have been held by a thread that is gone).
inline std::atomic<bool> in_forked_child{false};

inline void check_not_forked() {
  TORCH_CHECK(
      !in_forked_child,
      "The emulated accelerator cannot be used in a forked process: its streams are threads of the parent. "
      "Start workers with the 'spawn' method, or use the device in the parent only.");
}

// An error met by a stream is remembered and raised at the next point where the host synchronises, as on CUDA.
// Unlike on CUDA it is then forgotten, so that one process can test many failures; a lost device stays lost, as there.
class PendingError {
 public:
  void remember(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    if (!first_) first_ = std::move(error);
  }
  void lose_device(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    if (lost_) return;
    lost_ = std::move(error);
    is_lost_ = true;
  }
  bool device_is_lost() const { return is_lost_; }
  void raise_if_lost() {
    if (!is_lost_) return;
    std::unique_lock lock(mutex_);
    const auto error = lost_;
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }
  void raise() {
    raise_if_lost();
    std::exception_ptr error;
    {
      std::lock_guard lock(mutex_);
      std::swap(error, first_);
    }
    if (error) std::rethrow_exception(error);
  }
  bool exists() {
    std::lock_guard lock(mutex_);
    return first_ || lost_;
  }
  void forget() {
    std::lock_guard lock(mutex_);
    first_ = lost_ = nullptr;
    is_lost_ = false;
  }

 private:
  std::mutex mutex_;
  std::exception_ptr first_;
  std::exception_ptr lost_;
  std::atomic<bool> is_lost_{false};
};
inline PendingError& pending_error() {
  static auto* error = new PendingError;  // never destroyed: streams outlive static destructors
  return *error;
}

// A gate that a test closes to stop a lane, so that order can be asserted without a clock. Operations stop at it after
// they have started, so that several lanes can be seen under way at once.
class Gate {
 public:
  static constexpr std::chrono::seconds kPatience{60};

  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  void open() {
    std::lock_guard lock(mutex_);
    closed_ = false;
    changed_.notify_all();
  }
  // Whether it was closed, so that time has gone by.
  bool pass(Lane lane) {
    std::unique_lock lock(mutex_);
    if (!closed_) return false;
    const bool opened = changed_.wait_for(lock, kPatience, [&] { return !closed_; });
    if (!opened) {  // open from now on, or everything queued here would take as long again
      closed_ = false;
      changed_.notify_all();
    }
    TORCH_CHECK(
        opened, "The lane '", kLaneNames[static_cast<int>(lane)], "' was held for ", kPatience.count(),
        " s: does the test wait for work that it holds itself?");
    return true;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closed_ = false;
};
inline Gate& gate(Lane lane) {
  static auto* gates = new std::array<Gate, 3>;
  return (*gates)[static_cast<int>(lane)];
}

// What tests switch. Zero means "costs nothing".
struct Settings {
  std::atomic<double> seconds_per_op{0};
  std::atomic<double> compute_bytes_per_s{0};
  std::atomic<double> compute_times{1};  // how many times as long as the CPU's kernel takes
  std::atomic<bool> launch_blocking{false};
  std::atomic<bool> poison_freed{false};
  std::atomic<bool> poison_fresh{false};
  std::atomic<bool> poison_in_flight{false};
};
inline Settings settings;

// One finished operation. `started` and `ended` are ticks of one counter for the whole device: two operations
// overlapped if and only if each started before the other ended. No clock is involved. `began` and `finished` are its
// stream's clock (timing.h).
struct Operation {
  std::string name;
  Lane lane;
  int64_t stream;
  uint64_t nbytes;
  uint64_t started = 0;
  uint64_t ended = 0;
  Clock::time_point began{};
  Clock::time_point finished{};
};

struct Counters {
  std::array<std::atomic<uint64_t>, 3> operations{};  // by lane
  std::array<std::atomic<uint64_t>, 3> nbytes{};      // by lane
  std::array<std::atomic<uint64_t>, 3> running{};     // by lane, now
  std::array<std::atomic<uint64_t>, 3> most_at_once{};
  std::atomic<uint64_t> copies_while_computing{0};  // started, or met by a computation, while in flight
  std::atomic<uint64_t> synchronous_copies{0};      // the host waited: pageable memory or blocking
  std::atomic<int64_t> events_alive{0};
  std::atomic<uint64_t> tick{0};
  std::atomic<uint64_t> late_nanoseconds{0};
};
inline Counters counters;

class OperationLog {
 public:
  std::atomic<bool> enabled{false};
  void add(Operation operation) {
    std::lock_guard lock(mutex_);
    operations_.push_back(std::move(operation));
  }
  std::vector<Operation> take() {
    std::lock_guard lock(mutex_);
    return std::exchange(operations_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Operation> operations_;
};
inline OperationLog& operation_log() {
  static auto* log = new OperationLog;
  return *log;
}

// Wraps the time in which one operation runs on a lane.
class Running {
 public:
  Running(std::string name, Lane lane, int64_t stream, uint64_t nbytes)
      : record_{std::move(name), lane, stream, nbytes} {
    const int at = static_cast<int>(lane);
    const uint64_t now_running = ++counters.running[at];
    uint64_t most = counters.most_at_once[at];
    while (most < now_running && !counters.most_at_once[at].compare_exchange_weak(most, now_running)) {
    }
    const bool copying = counters.running[1] + counters.running[2] > 0;
    if (copying && counters.running[0] > 0) ++counters.copies_while_computing;
    record_.started = ++counters.tick;
  }
  ~Running() {
    const int at = static_cast<int>(record_.lane);
    --counters.running[at];
    ++counters.operations[at];
    counters.nbytes[at] += record_.nbytes;
    record_.ended = ++counters.tick;
    if (operation_log().enabled) operation_log().add(std::move(record_));
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  void set_times(Clock::time_point began, Clock::time_point finished) {
    record_.began = began;
    record_.finished = finished;
  }

 private:
  Operation record_;
};

// Operators that had to run with the host waiting, because their output's shape cannot be known beforehand.
class HostSynchronousOperators {
 public:
  bool has(const std::string& name) {
    std::lock_guard lock(mutex_);
    return names_.count(name) > 0;
  }
  void add(const std::string& name) {
    std::lock_guard lock(mutex_);
    names_.insert(name);
  }
  std::vector<std::string> names() {
    std::lock_guard lock(mutex_);
    return {names_.begin(), names_.end()};
  }

 private:
  std::mutex mutex_;
  std::set<std::string> names_;
};
inline HostSynchronousOperators& host_synchronous_operators() {
  static auto* operators = new HostSynchronousOperators;
  return *operators;
}

}  // namespace emulated
