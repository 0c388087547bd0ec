// The choice of dispatch.h, made once per process.
#include "dispatch.h"

#include <stdexcept>

namespace overspill {
namespace {

const std::vector<const Kernels*>& available() {
  static const std::vector<const Kernels*> found = [] {
    std::vector<const Kernels*> list;
#ifdef OVERSPILL_X86_CLONES
    __builtin_cpu_init();
    // Named features instead of the level's name, which not every compiler knows here. avx2 and avx512* are
    // reported only if the kernel saves those registers.
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                    __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("lzcnt") &&
                    __builtin_cpu_supports("movbe") && __builtin_cpu_supports("popcnt");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    if (v4) list.push_back(&kernels_v4);
    if (v3) list.push_back(&kernels_v3);
#endif
    list.push_back(&kernels_baseline);
    return list;
  }();
  return found;
}

}  // namespace

std::vector<std::string> simd_levels() {
  std::vector<std::string> names;
  for (const Kernels* kernels : available()) names.emplace_back(kernels->level);
  return names;
}

const Kernels& kernels_for(const std::string& level) {
  if (level == "auto") return *available().front();
  for (const Kernels* kernels : available()) {
    if (level == kernels->level) return *kernels;
  }
  std::string names = "auto";
  for (const Kernels* kernels : available()) names += std::string(", ") + kernels->level;
  throw std::invalid_argument("no SIMD level \"" + level + "\" on this machine; there are: " + names);
}

}  // namespace overspill
