// Device memory and pinned host memory.
//
// [Note: two addresses] A block has an address that tensors see, in a range that is never readable (PROT_NONE), and
// its bytes somewhere else, which only operations of the device look up. So a host read of device memory is a
// SIGSEGV at any time, also while the device works. Addresses are not used again before the whole range has been
// handed out, so a stale pointer stays stale.
//
// [Note: who keeps bytes alive] Every queued operation shares ownership of the blocks that it names. Memory freed
// while another stream still needs it (a forgotten record_stream) is therefore never a crash: it is marked as
// released in the order of its own stream, and an operation that comes later raises.
#pragma once

#include "events.h"
#include "faults.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <map>

namespace emulated {

constexpr int kPoison = 0xFF;  // a NaN in every floating-point type, -1 in signed integers

struct Block {
  Block(size_t nbytes, size_t held_nbytes, c10::StreamId stream);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const size_t nbytes;
  const size_t held_nbytes;    // rounded up, what counts against the capacity
  const c10::StreamId stream;  // on which it was allocated
  char* address = nullptr;     // what tensors see
  char* bytes = nullptr;       // what the device sees
  std::mutex mutex;
  std::vector<c10::StreamId> also_used_on;  // by record_stream
  bool released = false;
  int users = 0;  // operations that run on it now
};
using BlockPtr = std::shared_ptr<Block>;

// Held by a running operation for each block that it touches.
class BlockUse {
 public:
  BlockUse(BlockPtr block, const std::string& operation);
  ~BlockUse();
  BlockUse(const BlockUse&) = delete;
  BlockUse& operator=(const BlockUse&) = delete;

 private:
  BlockPtr block_;
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override;
  void copy_data(void* to, const void* from, std::size_t nbytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override;
  void resetAccumulatedStats(c10::DeviceIndex) override;
  void resetPeakStats(c10::DeviceIndex) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override;

  void set_capacity(size_t nbytes);
  static BlockPtr block_of(const c10::Storage& storage);  // null for a storage of no bytes

 private:
  static void free(void* context);
  void return_capacity(const Block& block);

  std::mutex mutex_;
  size_t capacity_ = size_t{1} << 30;
  std::atomic<bool> frees_wait_{false};  // some freed memory still waits for a stream named by record_stream
  c10::CachingDeviceAllocator::DeviceStats stats_;
};
DeviceMemory& device_memory();

// Pinned host memory: from the pinned allocator, or registered by its owner (like cudaHostRegister).
struct PinnedRange {
  char* begin;
  size_t nbytes;
  bool owned;  // ours to free
  ~PinnedRange();
};
using PinnedPtr = std::shared_ptr<PinnedRange>;

class PinnedMemory final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t nbytes) override;
  void copy_data(void* to, const void* from, std::size_t nbytes) const override;
  // Copies share ownership of the range that they touch, so there is nothing to note here.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override;

  PinnedPtr find(const void* address);  // null: pageable
  void add(void* address, size_t nbytes);
  void remove(void* address);

 private:
  static void free(void* address);

  std::mutex mutex_;
  std::map<const char*, PinnedPtr> ranges_;
  c10::CachingAllocator::Stat nbytes_;
  c10::CachingAllocator::Stat count_;
};
PinnedMemory& pinned_memory();

}  // namespace emulated
