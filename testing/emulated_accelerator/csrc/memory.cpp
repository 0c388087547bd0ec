// Device memory and pinned host memory: see memory.h.
//
// What it takes from CUDA's caching allocator: sizes are rounded up to 512 bytes, freed memory is reusable at once
// by the stream that allocated it, and later for a block named by record_stream. What it does not: segments and
// fragmentation (the forecast models those; see overspill's trace layer).
#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <iomanip>
#include <sstream>

namespace emulated {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kGranule = 512;

size_t round_up(size_t nbytes, size_t to) { return (nbytes + to - 1) / to * to; }

std::string readable(size_t nbytes) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(2);
  if (nbytes >= size_t{1} << 30) {
    out << nbytes / double(size_t{1} << 30) << " GiB";
  } else if (nbytes >= size_t{1} << 20) {
    out << nbytes / double(size_t{1} << 20) << " MiB";
  } else {
    out << nbytes / double(size_t{1} << 10) << " KiB";
  }
  return out.str();
}

// The range of addresses that no one can read; see [Note: two addresses].
class Addresses {
 public:
  char* take(size_t nbytes) {
    const size_t span = round_up(nbytes, kPage) + kPage;  // a gap after each block
    std::lock_guard lock(mutex_);
    if (!begin_) {
      void* range = mmap(nullptr, kSpan, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(range != MAP_FAILED, "The emulated accelerator found no free address range of 1 TiB.");
      begin_ = static_cast<char*>(range);
    }
    for (int rounds = 0; rounds < 2;) {
      if (next_ + span > kSpan) {
        next_ = 0;
        ++rounds;
      }
      auto after = live_.upper_bound(next_);
      if (after != live_.begin() && std::prev(after)->first + std::prev(after)->second > next_) {
        next_ = std::prev(after)->first + std::prev(after)->second;
        continue;
      }
      if (after != live_.end() && after->first < next_ + span) {
        next_ = after->first + after->second;
        continue;
      }
      live_[next_] = span;
      char* address = begin_ + next_;
      next_ += span;
      return address;
    }
    TORCH_CHECK(false, "The emulated accelerator has used up its addresses.");
  }
  void give_back(const char* address) {
    std::lock_guard lock(mutex_);
    live_.erase(address - begin_);
  }

 private:
  static constexpr size_t kSpan = size_t{1} << 40;
  std::mutex mutex_;
  char* begin_ = nullptr;
  size_t next_ = 0;
  std::map<size_t, size_t> live_;  // offset, span
};
Addresses& addresses() {
  static auto* all = new Addresses;
  return *all;
}

// A statistic is kept for all memory and by pool: CUDA's allocator takes requests up to 1 MiB from the small pool
// (kSmallSize in c10/cuda/CUDACachingAllocator.cpp).
template <class Change>
void change_stat(c10::CachingAllocator::StatArray& stat, size_t held_nbytes, Change change) {
  using Type = c10::CachingAllocator::StatType;
  change(stat[static_cast<size_t>(Type::AGGREGATE)]);
  const bool small = held_nbytes <= (size_t{1} << 20);
  change(stat[static_cast<size_t>(small ? Type::SMALL_POOL : Type::LARGE_POOL)]);
}
template <class Change>
void for_each_entry(c10::CachingAllocator::StatArray& stat, Change change) {
  for (auto& entry : stat) change(entry);
}

}  // namespace

Block::Block(size_t nbytes, size_t held_nbytes, c10::StreamId stream)
    : nbytes(nbytes), held_nbytes(held_nbytes), stream(stream) {
  address = addresses().take(held_nbytes);
  bytes = static_cast<char*>(std::aligned_alloc(kGranule, held_nbytes));
  TORCH_CHECK(bytes, "The host has no memory left to emulate ", readable(held_nbytes), " of device memory.");
  if (settings.poison_fresh) std::memset(bytes, kPoison, held_nbytes);
}

Block::~Block() {
  std::free(bytes);
  addresses().give_back(address);
}

BlockUse::BlockUse(BlockPtr block, const std::string& operation) : block_(std::move(block)) {
  std::lock_guard lock(block_->mutex);
  TORCH_CHECK(
      !block_->released, "Illegal memory access on the emulated device: ", operation, " ran after its memory of ",
      readable(block_->nbytes), " had been freed. A tensor that another stream still uses must be kept, or named by "
      "tensor.record_stream(stream), before it is released.");
  ++block_->users;
}

BlockUse::~BlockUse() {
  std::lock_guard lock(block_->mutex);
  --block_->users;
}

// ---- device memory ----

DeviceMemory& device_memory() {
  static auto* memory = new DeviceMemory;
  return *memory;
}

c10::DataPtr DeviceMemory::allocate(size_t nbytes) {
  check_not_forked();
  pending_error().raise_if_lost();
  const c10::Device device(kDevice, 0);
  if (nbytes == 0) return {nullptr, nullptr, &DeviceMemory::free, device};
  const size_t held = round_up(nbytes, kGranule);
  const bool refused = faults().next(Kind::allocation).failure.has_value();
  const auto reserved = [this] { return static_cast<size_t>(stats_.active_bytes[0].current); };
  std::unique_lock lock(mutex_);
  if (reserved() + held > capacity_ && frees_wait_) {  // as CUDA does before it gives up
    lock.unlock();
    wait_for_all_streams();
    lock.lock();
    ++stats_.num_alloc_retries;
    ++stats_.num_sync_all_streams;
  }
  if (refused || reserved() + held > capacity_) {
    ++stats_.num_ooms;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "Emulated accelerator out of memory. Tried to allocate ", readable(nbytes),
        ". Device 0 has a total capacity of ", readable(capacity_), " of which ",
        readable(capacity_ - std::min(capacity_, reserved())), " is free. Of the memory in use ",
        readable(stats_.allocated_bytes[0].current), " is allocated by PyTorch, and ",
        readable(reserved() - stats_.allocated_bytes[0].current), " is freed but still used by a stream.");
  }
  auto block = std::make_shared<Block>(nbytes, held, current_stream);
  for (auto* stat : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.reserved_bytes}) {
    change_stat(*stat, held, [&](auto& entry) { entry.increase(held); });
  }
  change_stat(stats_.requested_bytes, held, [&](auto& entry) { entry.increase(nbytes); });
  change_stat(stats_.allocation, held, [](auto& entry) { entry.increase(1); });
  for (auto* stat : {&stats_.active, &stats_.segment}) {  // each block is a device allocation of its own
    change_stat(*stat, held, [](auto& entry) { entry.increase(1); });
  }
  ++stats_.num_device_alloc;
  char* address = block->address;
  return {address, new BlockPtr(std::move(block)), &DeviceMemory::free, device};
}

void DeviceMemory::return_capacity(const Block& block) {
  std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.active_bytes, &stats_.reserved_bytes}) {
    change_stat(*stat, block.held_nbytes, [&](auto& entry) { entry.decrease(block.held_nbytes); });
  }
  for (auto* stat : {&stats_.active, &stats_.segment}) {
    change_stat(*stat, block.held_nbytes, [](auto& entry) { entry.decrease(1); });
  }
  ++stats_.num_device_free;
}

void DeviceMemory::free(void* context) {
  if (!context || in_forked_child) return;
  std::unique_ptr<BlockPtr> owner(static_cast<BlockPtr*>(context));
  BlockPtr block = *owner;
  auto& memory = device_memory();
  std::vector<c10::StreamId> others;
  {
    std::lock_guard lock(block->mutex);
    others = block->also_used_on;
  }
  {
    std::lock_guard lock(memory.mutex_);
    change_stat(memory.stats_.allocated_bytes, block->held_nbytes, [&](auto& entry) { entry.decrease(block->held_nbytes); });
    change_stat(memory.stats_.requested_bytes, block->held_nbytes, [&](auto& entry) { entry.decrease(block->nbytes); });
    change_stat(memory.stats_.allocation, block->held_nbytes, [](auto& entry) { entry.decrease(1); });
  }
  // The capacity is back when the streams named by record_stream have passed this point (at once if there are
  // none); the bytes are released when the block's own stream has passed it as well.
  struct Countdown {
    std::atomic<size_t> others;
    std::atomic<size_t> all;
  };
  auto left = std::make_shared<Countdown>();
  left->others = others.size();
  left->all = others.size() + 1;
  if (others.empty()) {
    memory.return_capacity(*block);
  } else {
    memory.frees_wait_ = true;
  }
  auto passed = [block, left](bool other) {
    if (other && --left->others == 0) device_memory().return_capacity(*block);
    if (--left->all > 0) return;
    bool in_use = false;
    {
      std::lock_guard lock(block->mutex);
      block->released = true;
      in_use = block->users > 0;
      if (settings.poison_freed) std::memset(block->bytes, kPoison, block->held_nbytes);
    }
    TORCH_CHECK(
        !in_use, "Memory of ", readable(block->nbytes), " was freed while an operation on another stream was using "
        "it. Keep the tensor until then, or name the stream by tensor.record_stream(stream).");
  };
  for (auto id : others) stream_queue(id).enqueue([passed] { passed(true); });
  stream_queue(block->stream).enqueue([passed] { passed(false); });
}

BlockPtr DeviceMemory::block_of(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  if (!data.get()) return nullptr;
  TORCH_CHECK(data.get_deleter() == &DeviceMemory::free, "This memory does not belong to the emulated accelerator.");
  return *static_cast<BlockPtr*>(data.get_context());
}

void DeviceMemory::copy_data(void*, const void*, std::size_t) const {
  TORCH_CHECK(false, "Device memory is copied by operations on streams, not by its allocator.");
}

void DeviceMemory::emptyCache(c10::MempoolId_t) { wait_for_all_streams(); }  // nothing is cached but what is in use

void DeviceMemory::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (!data.get()) return;
  auto& block = *static_cast<BlockPtr*>(data.get_context());
  std::lock_guard lock(block->mutex);
  auto& used_on = block->also_used_on;
  if (stream.id() == block->stream || std::find(used_on.begin(), used_on.end(), stream.id()) != used_on.end()) return;
  used_on.push_back(stream.id());
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::getDeviceStats(c10::DeviceIndex) {
  std::lock_guard lock(mutex_);
  return stats_;
}

void DeviceMemory::resetAccumulatedStats(c10::DeviceIndex) {
  std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.reserved_bytes, &stats_.requested_bytes,
                     &stats_.allocation, &stats_.active, &stats_.segment}) {
    for_each_entry(*stat, [](auto& entry) { entry.reset_accumulated(); });
  }
  stats_.num_ooms = stats_.num_alloc_retries = stats_.num_sync_all_streams = 0;
  stats_.num_device_alloc = stats_.num_device_free = 0;
}

void DeviceMemory::resetPeakStats(c10::DeviceIndex) {
  std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocated_bytes, &stats_.active_bytes, &stats_.reserved_bytes, &stats_.requested_bytes,
                     &stats_.allocation, &stats_.active, &stats_.segment}) {
    for_each_entry(*stat, [](auto& entry) { entry.reset_peak(); });
  }
}

std::pair<size_t, size_t> DeviceMemory::getMemoryInfo(c10::DeviceIndex) {
  std::lock_guard lock(mutex_);
  const auto in_use = static_cast<size_t>(stats_.active_bytes[0].current);
  return {capacity_ - std::min(capacity_, in_use), capacity_};
}

void DeviceMemory::set_capacity(size_t nbytes) {
  std::lock_guard lock(mutex_);
  capacity_ = nbytes;
}

// ---- pinned host memory ----

PinnedRange::~PinnedRange() {
  if (!owned) return;
  if (settings.poison_freed) std::memset(begin, kPoison, nbytes);
  std::free(begin);
}

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

c10::DataPtr PinnedMemory::allocate(size_t nbytes) {
  const c10::Device host(c10::DeviceType::CPU);
  if (nbytes == 0) return {nullptr, nullptr, &PinnedMemory::free, host};
  check_not_forked();
  if (const auto fate = faults().next(Kind::pinning); fate.failure) fate.failure->raise(Kind::pinning);
  auto* begin = static_cast<char*>(std::aligned_alloc(kPage, round_up(nbytes, kPage)));
  TORCH_CHECK(begin, "The host has no memory left for ", readable(nbytes), " of pinned memory.");
  if (settings.poison_fresh) std::memset(begin, kPoison, nbytes);
  auto range = std::make_shared<PinnedRange>(begin, nbytes, true);
  std::lock_guard lock(mutex_);
  ranges_[begin] = std::move(range);
  nbytes_.increase(nbytes);
  count_.increase(1);
  return {begin, begin, &PinnedMemory::free, host};
}

void PinnedMemory::free(void* address) {
  if (!address || in_forked_child) return;
  auto& memory = pinned_memory();
  PinnedPtr range;  // dies after the lock, or with the last copy that uses it
  std::lock_guard lock(memory.mutex_);
  auto found = memory.ranges_.find(static_cast<char*>(address));
  if (found == memory.ranges_.end()) return;
  range = std::move(found->second);
  memory.ranges_.erase(found);
  memory.nbytes_.decrease(range->nbytes);
  memory.count_.decrease(1);
}

void PinnedMemory::copy_data(void* to, const void* from, std::size_t nbytes) const { std::memcpy(to, from, nbytes); }

at::HostStats PinnedMemory::get_stats() {
  std::lock_guard lock(mutex_);
  at::HostStats stats;
  stats.active_bytes = stats.allocated_bytes = nbytes_;
  stats.active_requests = stats.allocations = count_;
  return stats;
}

void PinnedMemory::reset_peak_stats() {
  std::lock_guard lock(mutex_);
  nbytes_.reset_peak();
  count_.reset_peak();
}

PinnedPtr PinnedMemory::find(const void* address) {
  if (!address) return nullptr;
  std::lock_guard lock(mutex_);
  auto after = ranges_.upper_bound(static_cast<const char*>(address));
  if (after == ranges_.begin()) return nullptr;
  const auto& range = std::prev(after)->second;
  return static_cast<const char*>(address) < range->begin + range->nbytes ? range : nullptr;
}

void PinnedMemory::add(void* address, size_t nbytes) {
  check_not_forked();
  if (const auto fate = faults().next(Kind::pinning); fate.failure) fate.failure->raise(Kind::pinning);
  TORCH_CHECK(address && nbytes > 0, "An empty range cannot be registered as pinned.");
  auto range = std::make_shared<PinnedRange>(static_cast<char*>(address), nbytes, false);
  std::lock_guard lock(mutex_);
  TORCH_CHECK(ranges_.emplace(range->begin, range).second, "This host memory is already pinned.");
}

void PinnedMemory::remove(void* address) {
  wait_for_all_streams();  // copies may still use it, and its owner is about to unmap it
  std::lock_guard lock(mutex_);
  auto found = ranges_.find(static_cast<char*>(address));
  TORCH_CHECK(
      found != ranges_.end() && !found->second->owned, "This address was not registered as pinned memory.");
  ranges_.erase(found);
}

}  // namespace emulated
