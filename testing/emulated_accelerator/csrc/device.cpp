// How PyTorch reaches the device: its guard (current device and stream, events, synchronisation) and its hooks
// (pinned memory, generators, resizing). One device, index 0.
#include "events.h"
#include "generator.h"
#include "memory.h"
#include "views.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace emulated {
namespace {

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index <= 0, "The emulated accelerator has one device, 0; device ", static_cast<int>(index), " was asked for.");
}

c10::Stream as_stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, 0), id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Device getDevice() const override { return {kDevice, 0}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check_index(device.index());
    return {kDevice, 0};
  }
  void setDevice(c10::Device device) const override { check_index(device.index()); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return getNewStream({kDevice, 0}, 0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    check_not_forked();
    return as_stream(next_pooled_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    stream_queue(stream.id());  // refuses an unknown one
    return as_stream(std::exchange(current_stream, stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override {
    pending_error().raise_if_lost();
    return stream_queue(stream.id()).idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    stream_queue(stream.id()).wait();
    pending_error().raise();
  }
  void synchronizeDevice(c10::DeviceIndex) const override {
    wait_for_all_streams();
    pending_error().raise();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_memory().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    check_not_forked();
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(stream_queue(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) static_cast<Event*>(event)->make_stream_wait(stream_queue(stream.id()));
  }
  bool queryEvent(void* event) const override {
    pending_error().raise_if_lost();
    return !event || static_cast<Event*>(event)->newest()->reached();
  }
  void synchronizeEvent(void* event) const override {
    check_not_forked();
    if (event) static_cast<Event*>(event)->newest()->wait();
    pending_error().raise();
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const auto begin = static_cast<Event*>(first)->newest()->at();
    const auto end = static_cast<Event*>(second)->newest()->at();
    return std::chrono::duration<double, std::milli>(end - begin).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (!in_forked_child) delete static_cast<Event*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override { check_not_forked(); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex index) const override { check_index(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check_index(index);
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }

  bool isPinnedPtr(const void* address) const override { return pinned_memory().find(address) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::Generator(c10::make_intrusive<DeviceGenerator>());
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(storage, nbytes);
  }
};

}  // namespace

void install() {
  c10::SetAllocator(kDevice, &device_memory());
  at::setHostAllocator(kDevice, &pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
}

}  // namespace emulated
