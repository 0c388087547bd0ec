// The clone for x86-64-v4 (AVX-512). Only the loops are compiled for it: the standard headers come first,
// outside of the pragma, so that no shared inline function is built for an instruction set the CPU may lack.
#include "kernels.h"

#ifdef OVERSPILL_X86_CLONES
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#endif

namespace overspill {
namespace v4 {
#include "formats.h"
#include "kernels_impl.h"
}  // namespace v4
}  // namespace overspill

#ifdef __clang__
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace overspill {
extern const Kernels kernels_v4 = v4::table("x86-64-v4");
}  // namespace overspill
#endif
