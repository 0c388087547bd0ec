// Events: each record puts a fresh mark into a stream's queue; waiting is for the mark that was newest when the
// wait was asked for. Marks are shared, so an event may be destroyed while streams still wait for it. A mark carries
// the clock of its stream, which a stream that waits for it takes over; see [Note: modelled time].
#pragma once

#include "faults.h"
#include "streams.h"

namespace emulated {

class Mark {
 public:
  void reach(Clock::time_point at) {
    std::lock_guard lock(mutex_);
    reached_ = true;
    at_ = at;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  bool reached() {
    std::lock_guard lock(mutex_);
    return reached_;
  }
  Clock::time_point at() {
    wait();
    return at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  Clock::time_point at_{};
};

class Event {
 public:
  Event() { ++counters.events_alive; }
  ~Event() { --counters.events_alive; }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(StreamQueue& stream) {
    auto mark = std::make_shared<Mark>();
    {
      std::lock_guard lock(mutex_);
      newest_ = mark;
    }
    const double delay_seconds = faults().next(Kind::event).delay_seconds;
    stream.enqueue([mark, delay_seconds, &clock = stream.clock(), asked = Clock::now()] {
      clock.come_to(asked);
      clock.pass(delay_seconds);
      mark->reach(clock.now());
    });
  }
  void make_stream_wait(StreamQueue& stream) {
    auto mark = newest();
    if (!mark) return;
    stream.enqueue([mark, &clock = stream.clock(), asked = Clock::now()] {
      clock.come_to(asked);
      clock.come_to(mark->at());
    });
  }
  std::shared_ptr<Mark> newest() {
    std::lock_guard lock(mutex_);
    return newest_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Mark> newest_;
};

}  // namespace emulated
