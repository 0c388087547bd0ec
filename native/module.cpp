// The Python module overspill._native. Its typed face is src/overspill/_native.pyi.
#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "The native core of Overspill: fused optimizer kernels, norms, checksums.";
  overspill::bind_system(m);
  overspill::bind_arrays(m);
  overspill::bind_optim(m);
}
