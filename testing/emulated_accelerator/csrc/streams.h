// Streams: one worker thread each, which runs what was queued on it in order. A stream waits for another only
// through an event (events.h). As on CUDA there is a default stream (id 0) and a pool of 32, handed out in turn.
//
// The threads never take Python's lock, so the host may wait for them while it holds it.
#pragma once

#include "timing.h"

#include <c10/core/Stream.h>
#include <sys/prctl.h>

#include <deque>
#include <functional>
#include <memory>
#include <thread>

namespace emulated {

class StreamQueue {
 public:
  void enqueue(std::function<void()> task) {
    check_not_forked();
    std::lock_guard lock(mutex_);
    if (!started_) {
      std::thread([this] { work(); }).detach();
      started_ = true;
    }
    tasks_.push_back(std::move(task));
    ++queued_;
    changed_.notify_all();
  }

  bool idle() {
    std::lock_guard lock(mutex_);
    return finished_ == queued_;
  }

  // For tasks of this stream only.
  StreamClock& clock() { return clock_; }

  // Waits for what is queued now, not for what is queued while waiting.
  void wait() {
    check_not_forked();
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this, until = queued_] { return finished_ >= until; });
  }

 private:
  void work() {
    prctl(PR_SET_TIMERSLACK, 1000UL);  // ns; a sleep otherwise ends up to 50 us late
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      try {
        task();
      } catch (...) {
        pending_error().remember(std::current_exception());
      }
      task = nullptr;  // gives up the memory that it kept alive before anybody hears that it is done
      std::lock_guard lock(mutex_);
      ++finished_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  StreamClock clock_;
  uint64_t queued_ = 0;
  uint64_t finished_ = 0;
  bool started_ = false;
};

constexpr int64_t kPooledStreams = 32;

inline std::array<StreamQueue, kPooledStreams + 1>& all_streams() {
  static auto* streams = new std::array<StreamQueue, kPooledStreams + 1>;
  return *streams;
}
inline StreamQueue& stream_queue(c10::StreamId id) {
  TORCH_CHECK(id >= 0 && id <= kPooledStreams, "The emulated accelerator has no stream ", id, ".");
  return all_streams()[id];
}
inline c10::StreamId next_pooled_stream() {
  static std::atomic<uint64_t> handed_out{0};
  return static_cast<c10::StreamId>(handed_out++ % kPooledStreams) + 1;
}
inline thread_local c10::StreamId current_stream = 0;

inline void wait_for_all_streams() {
  for (auto& stream : all_streams()) stream.wait();
}

}  // namespace emulated
