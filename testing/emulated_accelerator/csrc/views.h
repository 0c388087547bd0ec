// A device tensor as its operations see it: a CPU tensor over the same bytes. Only a worker thread may read or
// write through it, while it holds a BlockUse for each block.
#pragma once

#include "memory.h"

#include <ATen/core/Tensor.h>

namespace emulated {

// Queues `task` on the current stream. While it runs, `blocks` are in use and the operation is on record. `begin` is
// done before the operation is seen to run, is delayed or is held.
using Task = std::function<void(StreamClock&)>;
void launch(
    std::string name, Lane lane, uint64_t nbytes, std::vector<BlockPtr> blocks, Task task,
    std::function<void()> begin = nullptr);

// Waits for the current stream and raises what went wrong.
void wait_for_current_stream();

// The CPU view; adds the tensor's block, if it has one, to `blocks`. A resizable one moves to the CPU's memory when
// a kernel makes it larger.
at::Tensor device_view(const at::Tensor& tensor, std::vector<BlockPtr>& blocks, bool resizable = false);

// New bytes for a storage, holding as many of the old ones as fit, copied in the order of the current stream.
void resize_storage(const c10::Storage& storage, size_t nbytes);

// Set while PyTorch's CPU fallback runs: what it copies is part of a computation and takes no time on the link.
inline thread_local bool inside_cpu_fallback = false;

void install();             // allocators and hooks (device.cpp)
void prefer_cpu_kernels();  // (compute.cpp)

}  // namespace emulated
