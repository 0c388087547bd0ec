// From Python arrays to checked plain pointers. Arrays come in by DLPack with noconvert, so a strided, foreign
// or read-only array is a TypeError and never a silent copy whose update would be lost.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace overspill {
namespace nb = nanobind;

using Array = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstArray = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using SegmentTable = nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using ScalarTable = nb::ndarray<const double, nb::shape<-1, 8>, nb::c_contig, nb::device::cpu>;

constexpr std::int64_t kResync = 1;
constexpr std::int64_t kSkip = 2;

struct Segment {
  std::size_t begin, end;
  bool resync, skip;
};

// bf16 is a bfloat16 array or, for numpy, uint16 bits. Throws TypeError that names the argument.
Dtype float_dtype(nb::dlpack::dtype dtype, const char* name);
void require_f32(nb::dlpack::dtype dtype, const char* name);
void require_bf16(nb::dlpack::dtype dtype, const char* name);
void require_i16(nb::dlpack::dtype dtype, const char* name);

// Collects the arrays of one call: equal lengths, aligned to their element, no two overlapping.
class Extents {
 public:
  explicit Extents(std::size_t length) : length_(length) {}
  void add(const void* data, std::size_t length, std::size_t itemsize, const char* name);

 private:
  struct Extent {
    std::uintptr_t begin, end;
    const char* name;
  };
  std::size_t length_;
  std::vector<Extent> extents_;
};

template <class ArrayT>
void add_extent(Extents& extents, const ArrayT& array, const char* name) {
  extents.add(array.data(), array.shape(0), array.itemsize(), name);
}

// Ascending, disjoint, within [0, length), only known flags: or ValueError.
std::vector<Segment> read_segments(const SegmentTable& table, std::size_t length);

}  // namespace overspill
