// The device's random numbers: the Mersenne Twister of the CPU behind a generator of the device, so that a seeded
// run on the device draws the same numbers as the same run on the CPU.
#pragma once

#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

namespace emulated {

struct DeviceGenerator final : c10::GeneratorImpl {
  explicit DeviceGenerator(at::Generator source = at::detail::createCPUGenerator())
      : c10::GeneratorImpl(c10::Device(kDevice, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        source(std::move(source)) {}

  void set_current_seed(uint64_t seed) override { source.set_current_seed(seed); }
  uint64_t current_seed() const override { return source.current_seed(); }
  uint64_t seed() override { return source.seed(); }
  void set_offset(uint64_t offset) override { source.set_offset(offset); }
  uint64_t get_offset() const override { return source.get_offset(); }
  void set_state(const c10::TensorImpl& state) override { source.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return source.unsafeGetGeneratorImpl()->get_state();
  }
  static c10::DeviceType device_type() { return kDevice; }

  at::Generator source;

 private:
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(source.clone()); }
};

inline const at::Generator& default_generator() {
  static auto* generator = new at::Generator(c10::make_intrusive<DeviceGenerator>());
  return *generator;
}

}  // namespace emulated
