// The clone that runs everywhere: SSE2 on x86-64, NEON on aarch64, whatever the compiler has elsewhere.
#include "kernels.h"

namespace overspill {
namespace baseline {
#include "formats.h"
#include "kernels_impl.h"
}  // namespace baseline

#if defined(__aarch64__)
extern const Kernels kernels_baseline = baseline::table("neon");
#else
extern const Kernels kernels_baseline = baseline::table("baseline");
#endif
}  // namespace overspill
