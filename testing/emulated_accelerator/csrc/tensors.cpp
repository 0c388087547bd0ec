// The operators that make, view, resize and copy tensors of the device. All that compute are in compute.cpp.
//
// A copy between host and device is asynchronous only if it was asked to be and the host side is pinned; else the
// host waits, as on CUDA.
#include "link.h"
#include "memory.h"
#include "views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

namespace emulated {

void wait_for_current_stream() {
  stream_queue(current_stream).wait();
  pending_error().raise();
}

namespace {
struct SilentWarnings final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};
}  // namespace

// Runs an operation in its modelled time; see [Note: modelled time]. Its work is done at the end of that time, so
// that a reader that did not wait finds nothing yet.
void run_in_time(Lane lane, uint64_t nbytes, StreamClock& clock, const Task& task) {
  const auto begin = Clock::now();
  if (lane != Lane::compute) {
    task(clock);
    const bool throttled = link(lane).is_throttled();
    clock.settle(throttled);
    if (!throttled) engine(lane).add_busy(as_seconds(Clock::now() - begin));
    return;
  }
  const double rate = settings.compute_bytes_per_s;
  const double fixed = settings.seconds_per_op + (rate > 0 ? nbytes / rate : 0.0);
  const double times = settings.compute_times;
  if (fixed > 0) clock.work(engine(lane), fixed);
  const auto worked_from = Clock::now();
  task(clock);
  const double own_seconds = as_seconds(Clock::now() - worked_from);
  if (times > 1) clock.work(engine(lane), own_seconds * times);
  const bool modelled = fixed > 0 || times > 1;
  clock.settle(modelled);
  if (!modelled) engine(lane).add_busy(own_seconds);
}

void launch(
    std::string name, Lane lane, uint64_t nbytes, std::vector<BlockPtr> blocks, Task task,
    std::function<void()> begin) {
  pending_error().raise_if_lost();
  const auto kind = static_cast<Kind>(lane);
  auto& stream = stream_queue(current_stream);
  auto run = [name = std::move(name), lane, kind, nbytes, id = current_stream, &clock = stream.clock(),
              asked = Clock::now(), fate = faults().next(kind), blocks = std::move(blocks), task = std::move(task),
              begin = std::move(begin)] {
    if (pending_error().device_is_lost()) return;
    const auto in_use = [&] {
      std::deque<BlockUse> uses;
      for (const auto& block : blocks) uses.emplace_back(block, name);
      return uses;
    };
    if (begin) {
      const auto uses = in_use();
      begin();
    }
    Running running(name, lane, id, nbytes);
    clock.come_to(asked);
    if (gate(lane).pass(lane)) clock.come_to(Clock::now());
    clock.pass(fate.delay_seconds);
    const auto began = clock.now();
    if (fate.failure) fate.failure->raise(kind);
    const auto uses = in_use();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    SilentWarnings silent;  // the meta kernel has warned already, where Python hears it
    const c10::WarningUtils::WarningHandlerGuard silence(&silent);
    run_in_time(lane, nbytes, clock, task);
    running.set_times(began, clock.now());
  };
  stream.enqueue(std::move(run));
  if (settings.launch_blocking) wait_for_current_stream();
}

at::Tensor device_view(const at::Tensor& tensor, std::vector<BlockPtr>& blocks, bool resizable) {
  const c10::InferenceMode off(false);
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  auto block = DeviceMemory::block_of(tensor.storage());
  auto view = [&](char* bytes) {
    auto&& maker = at::for_blob(bytes, tensor.sizes());
    maker.strides(tensor.strides()).options(options);
    if (resizable) maker.resizeable_storage().allocator(c10::GetAllocator(at::kCPU));
    return maker.make_tensor();
  };
  if (!block) return view(nullptr);
  const size_t offset = tensor.storage_offset() * tensor.itemsize();
  const size_t extent = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  TORCH_CHECK(
      offset + extent <= block->nbytes, "A tensor reaches beyond its device memory: ", offset + extent, " bytes of ",
      block->nbytes, ".");
  char* bytes = block->bytes + offset;
  blocks.push_back(std::move(block));
  return view(bytes);
}

void resize_storage(const c10::Storage& storage, size_t nbytes) {
  auto fresh = device_memory().allocate(nbytes);
  const auto old = DeviceMemory::block_of(storage);
  const size_t kept = std::min(nbytes, storage.nbytes());
  if (old && kept > 0) {
    const auto to = *static_cast<BlockPtr*>(fresh.get_context());
    if (old->stream != current_stream) {
      device_memory().recordStream(
          storage.data_ptr(), c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), current_stream));
    }
    launch("resize", Lane::compute, kept, {old, to}, [from = old->bytes, into = to->bytes, kept](StreamClock&) {
      std::memcpy(into, from, kept);
    });
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(nbytes);
}

namespace {

at::Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      sizes, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// What a copy is going to write is worth nothing from its start on, and shows it until the bytes arrive.
void poison(const at::Tensor& target) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  if (target.is_contiguous()) {
    std::memset(target.data_ptr(), kPoison, target.nbytes());
  } else if (target.is_floating_point() || target.is_complex()) {
    target.fill_(std::numeric_limits<double>::quiet_NaN());
  } else {
    target.fill_(target.scalar_type() == at::kBool ? 1 : -1);
  }
}

// Work that moves `to.nbytes()` bytes over one direction of the link.
auto transfer(at::Tensor from, at::Tensor to, Lane lane) {
  return [from = std::move(from), to = std::move(to), lane](StreamClock& clock) {
    const bool plain = from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() && from.is_contiguous() &&
        to.is_contiguous();
    if (plain) {
      link(lane).carry(clock, to.data_ptr(), from.const_data_ptr(), to.nbytes());
    } else {
      link(lane).occupy(clock, to.nbytes());
      to.copy_(from);
    }
  };
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  std::vector<BlockPtr> blocks;
  if (!from.is_cpu() && !to.is_cpu()) {
    auto source = device_view(from, blocks);
    auto target = device_view(to, blocks);
    launch("copy", Lane::compute, to.nbytes(), std::move(blocks), [source, target](StreamClock&) {
      target.copy_(source);
    });
    return to;
  }
  const bool to_device = from.is_cpu();
  const Lane lane = to_device ? Lane::h2d : Lane::d2h;
  const auto host = to_device ? from.resolve_conj().resolve_neg() : to;
  const auto pinned = pinned_memory().find(host.const_data_ptr());
  // The host side is seen through a view of its own, too: a queued task must never be the last owner of a tensor
  // that Python knows, since giving that up takes Python's lock.
  const auto options = at::TensorOptions().dtype(host.dtype()).device(at::kCPU);
  at::Tensor host_view;
  {
    const c10::InferenceMode off(false);
    host_view = at::from_blob(const_cast<void*>(host.const_data_ptr()), host.sizes(), host.strides(), options);
  }
  auto on_device = device_view(to_device ? to : from, blocks);
  if (inside_cpu_fallback) {
    const auto& target = to_device ? on_device : host_view;
    const auto& source = to_device ? host_view : on_device;
    launch("fallback", Lane::compute, to.nbytes(), std::move(blocks), [source, target](StreamClock&) {
      target.copy_(source);
    });
    wait_for_current_stream();
    return to;
  }
  auto move = to_device ? transfer(host_view, on_device, lane) : transfer(on_device, host_view, lane);
  launch(
      kLaneNames[static_cast<int>(lane)], lane, to.nbytes(), std::move(blocks),
      [pinned, move](StreamClock& clock) { move(clock); },
      [target = to_device ? on_device : host_view] {
        if (settings.poison_in_flight) poison(target);
      });
  if (!non_blocking || !pinned) {
    ++counters.synchronous_copies;
    wait_for_current_stream();
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  const at::Tensor host = at::detail::empty_cpu({}, tensor.scalar_type(), false, std::nullopt);
  copy_from(tensor.reshape({}), host, false);
  return host.item();
}

at::Tensor as_strided(
    const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}
at::Tensor view(const at::Tensor& tensor, at::IntArrayRef sizes) { return at::native::view(tensor, sizes); }
at::Tensor reshape_alias(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::_reshape_alias(tensor, sizes, strides);
}
at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage source, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(tensor, std::move(source), offset, sizes, strides);
}
const at::Tensor& resize(const at::Tensor& tensor, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(
      !format || *format == at::MemoryFormat::Contiguous, "The emulated accelerator resizes contiguous tensors only.");
  const size_t needed = at::detail::computeStorageNbytesContiguous(sizes, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}
void record_stream(at::Tensor& tensor, at::Stream stream) {
  device_memory().recordStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("resize_", resize);
  library.impl("record_stream", record_stream);
}

}  // namespace
}  // namespace emulated
