// The Python module overspill._native. Its typed face is src/overspill/_native.pyi.
#include "bindings.h"

NB_MODULE(_native, m) {
  // A thread pool may live as long as the interpreter; what is not freed at exit is no leak of ours to report.
  nanobind::set_leak_warnings(false);
  m.doc() = "The native core of Overspill: fused optimizer kernels, norms, checksums.";
  overspill::bind_system(m);
  overspill::bind_arrays(m);
  overspill::bind_optim(m);
}
