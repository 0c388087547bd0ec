// The Python module: switches, faults, counters. What they mean is said in ../__init__.py.
#include "faults.h"
#include "generator.h"
#include "link.h"
#include "memory.h"
#include "views.h"

#include <ATen/EmptyTensor.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace emulated;

namespace {

Lane lane_named(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kLaneNames[i]) return static_cast<Lane>(i);
  }
  throw py::value_error("the lanes are compute, h2d and d2h, not " + name);
}

Kind kind_named(const std::string& name) {
  for (size_t i = 0; i < kKindNames.size(); ++i) {
    if (name == kKindNames[i]) return static_cast<Kind>(i);
  }
  throw py::value_error("nothing that happens on the device is called " + name);
}

py::bytes random_state() {
  const auto state = default_generator().get_state();
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

void set_random_state(const std::string& bytes) {
  const auto size = static_cast<int64_t>(bytes.size());
  at::Tensor state = at::detail::empty_cpu({size}, at::kByte, false, std::nullopt);
  std::memcpy(state.data_ptr(), bytes.data(), bytes.size());
  at::Generator generator = default_generator();
  generator.set_state(state);
}

py::dict stats() {
  py::dict out;
  for (int i = 0; i < 3; ++i) {
    const std::string lane = kLaneNames[i];
    out[py::str(lane + "_operations")] = counters.operations[i].load();
    out[py::str(lane + "_nbytes")] = counters.nbytes[i].load();
    out[py::str(lane + "_running")] = counters.running[i].load();
    out[py::str(lane + "_most_at_once")] = counters.most_at_once[i].load();
    out[py::str(lane + "_seconds")] = engine(static_cast<Lane>(i)).busy_seconds();
  }
  out["copies_while_computing"] = counters.copies_while_computing.load();
  out["synchronous_copies"] = counters.synchronous_copies.load();
  out["late_seconds"] = counters.late_nanoseconds.load() * 1e-9;
  out["planted_failures_left"] = faults().failures_left();
  out["events_alive"] = counters.events_alive.load();
  out["error_pending"] = pending_error().exists();
  out["host_synchronous_operators"] = host_synchronous_operators().names();
  return out;
}

void reset_stats() {
  for (int i = 0; i < 3; ++i) counters.operations[i] = counters.nbytes[i] = counters.most_at_once[i] = 0;
  counters.copies_while_computing = counters.synchronous_copies = counters.late_nanoseconds = 0;
  for (int i = 0; i < 3; ++i) engine(static_cast<Lane>(i)).reset();
}

py::list take_operations() {
  py::list out;
  for (const auto& op : operation_log().take()) {
    out.append(py::make_tuple(
        op.name, kLaneNames[static_cast<int>(op.lane)], op.stream, op.nbytes, op.started, op.ended,
        as_seconds(op.began.time_since_epoch()), as_seconds(op.finished.time_since_epoch())));
  }
  return out;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pthread_atfork(nullptr, nullptr, [] { in_forked_child = true; });
  install();
  prefer_cpu_kernels();

  m.def("in_forked_child", [] { return in_forked_child.load(); });
  m.def("set_link", [](const std::string& lane, double rate) { link(lane_named(lane)).set_bytes_per_s(rate); });
  m.def("set_delays", [](const std::string& kind, std::vector<double> seconds) {
    faults().set_delays(kind_named(kind), std::move(seconds));
  });
  m.def("fail", [](const std::string& kind, uint64_t after, uint64_t times, const std::string& message, bool fatal) {
    faults().fail(kind_named(kind), after, times, {message, fatal});
  });
  m.def("forget_faults", [] { faults().forget(); });
  m.def("close_gate", [](const std::string& lane) { gate(lane_named(lane)).close(); });
  m.def("open_gate", [](const std::string& lane) { gate(lane_named(lane)).open(); });
  m.def("set_capacity", [](size_t nbytes) { device_memory().set_capacity(nbytes); });
  m.def("set_compute_delay", [](double seconds_per_op, double bytes_per_s, double times) {
    settings.seconds_per_op = seconds_per_op;
    settings.compute_bytes_per_s = bytes_per_s;
    settings.compute_times = times;
  });
  m.def("set_launch_blocking", [](bool on) { settings.launch_blocking = on; });
  m.def("poison_freed", [](bool on) { settings.poison_freed = on; });
  m.def("poison_fresh", [](bool on) { settings.poison_fresh = on; });
  m.def("poison_in_flight", [](bool on) { settings.poison_in_flight = on; });
  m.def("register_host_memory", [](uintptr_t address, size_t nbytes) {
    pinned_memory().add(reinterpret_cast<void*>(address), nbytes);
  });
  m.def("unregister_host_memory", [](uintptr_t address) {
    const py::gil_scoped_release release;
    pinned_memory().remove(reinterpret_cast<void*>(address));
  });
  m.def("wait_for_all_streams", [] {
    const py::gil_scoped_release release;
    wait_for_all_streams();
  });
  m.def("forget_error", [] { pending_error().forget(); });
  m.def("manual_seed", [](uint64_t seed) { at::Generator(default_generator()).set_current_seed(seed); });
  m.def("initial_seed", [] { return default_generator().current_seed(); });
  m.def("random_state", &random_state);
  m.def("set_random_state", &set_random_state);
  m.def("stats", &stats);
  m.def("reset_stats", &reset_stats);
  m.def("record_operations", [](bool on) { operation_log().enabled = on; });
  m.def("take_operations", &take_operations);
}
