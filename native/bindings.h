// What each bind_*.cpp adds to the module overspill._native.
#pragma once

#include <nanobind/nanobind.h>

namespace overspill {

void bind_optim(nanobind::module_& m);
void bind_arrays(nanobind::module_& m);
void bind_system(nanobind::module_& m);

}  // namespace overspill
