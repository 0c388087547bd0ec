// Which SIMD clone runs: names of levels, what this CPU can do, and the choice.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace overspill {

// The levels that this build and this CPU have, best first.
std::vector<std::string> simd_levels();

// "auto" is the best. Throws std::invalid_argument for a level that is unknown or that this CPU lacks.
const Kernels& kernels_for(const std::string& level);

}  // namespace overspill
