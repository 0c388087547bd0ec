// The link between host and device: one lane in each direction, each with a rate that all copies in that direction
// share. Its delays and failures are in faults.h.
#pragma once

#include "timing.h"

#include <cstring>

namespace emulated {

class Link {
 public:
  explicit Link(Lane lane) : engine_(engine(lane)) {}

  void set_bytes_per_s(double rate) { bytes_per_s_ = rate; }
  bool is_throttled() const { return bytes_per_s_ > 0; }

  // Moves plain bytes in slices of about a millisecond, so that concurrent copies get equal shares and a reader
  // that did not wait sees a half-done copy.
  void carry(StreamClock& clock, void* to, const void* from, size_t nbytes) {
    in_slices(clock, nbytes, [&](size_t done, size_t part) {
      std::memcpy(static_cast<char*>(to) + done, static_cast<const char*>(from) + done, part);
    });
  }

  // The same time, for a copy that is not plain bytes (strided, or changing dtype) and is then done in one go.
  void occupy(StreamClock& clock, size_t nbytes) {
    in_slices(clock, nbytes, [](size_t, size_t) {});
  }

 private:
  template <class Move>
  void in_slices(StreamClock& clock, size_t nbytes, Move move) {
    for (size_t done = 0; done < nbytes;) {
      const double rate = bytes_per_s_;
      const size_t part = std::min(nbytes - done, slice(rate));
      if (rate > 0) clock.work(engine_, part / rate);
      move(done, part);
      done += part;
    }
  }
  static size_t slice(double rate) {
    constexpr size_t kLargest = size_t{4} << 20;
    if (rate <= 0) return kLargest;
    return std::clamp(static_cast<size_t>(rate * 1e-3), size_t{4096}, kLargest);
  }

  Engine& engine_;
  std::atomic<double> bytes_per_s_{0};
};

inline Link& link(Lane lane) {
  static auto* h2d = new Link(Lane::h2d);
  static auto* d2h = new Link(Lane::d2h);
  return lane == Lane::h2d ? *h2d : *d2h;
}

}  // namespace emulated
