// The checks of arrays.h.
#include "arrays.h"

#include <string>

namespace overspill {
namespace {

bool is(nb::dlpack::dtype dtype, nb::dlpack::dtype_code code, int bits) {
  return dtype.code == std::uint8_t(code) && dtype.bits == bits && dtype.lanes == 1;
}

bool is_f32(nb::dlpack::dtype d) { return is(d, nb::dlpack::dtype_code::Float, 32); }
bool is_bf16(nb::dlpack::dtype d) {
  return is(d, nb::dlpack::dtype_code::Bfloat, 16) || is(d, nb::dlpack::dtype_code::UInt, 16);
}

[[noreturn]] void wrong_dtype(const char* name, const char* wanted) {
  throw nb::type_error((std::string(name) + " must be " + wanted + "; nothing is converted silently").c_str());
}

}  // namespace

Dtype float_dtype(nb::dlpack::dtype dtype, const char* name) {
  if (is_f32(dtype)) return Dtype::f32;
  if (is_bf16(dtype)) return Dtype::bf16;
  wrong_dtype(name, "float32 or bfloat16 (or uint16 holding bfloat16 bits)");
}

void require_f32(nb::dlpack::dtype dtype, const char* name) {
  if (!is_f32(dtype)) wrong_dtype(name, "float32");
}

void require_bf16(nb::dlpack::dtype dtype, const char* name) {
  if (!is_bf16(dtype)) wrong_dtype(name, "bfloat16 (or uint16 holding bfloat16 bits)");
}

void require_i16(nb::dlpack::dtype dtype, const char* name) {
  if (!is(dtype, nb::dlpack::dtype_code::Int, 16)) wrong_dtype(name, "int16");
}

void Extents::add(const void* data, std::size_t length, std::size_t itemsize, const char* name) {
  if (length != length_) {
    throw nb::value_error((std::string(name) + " has " + std::to_string(length) + " elements, expected " +
                           std::to_string(length_)).c_str());
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  if (begin % itemsize != 0) {
    throw nb::value_error((std::string(name) + " is not aligned to its element").c_str());
  }
  const Extent extent{begin, begin + length * itemsize, name};
  for (const Extent& other : extents_) {
    if (extent.begin < other.end && other.begin < extent.end) {
      throw nb::value_error((std::string(name) + " overlaps " + other.name).c_str());
    }
  }
  extents_.push_back(extent);
}

std::vector<Segment> read_segments(const SegmentTable& table, std::size_t length) {
  std::vector<Segment> segments;
  segments.reserve(table.shape(0));
  std::int64_t last = 0;
  for (std::size_t row = 0; row < table.shape(0); ++row) {
    const std::int64_t* cells = table.data() + 3 * row;
    const std::int64_t begin = cells[0], end = cells[1], flags = cells[2];
    if (begin < last || end < begin || end > std::int64_t(length)) {
      throw nb::value_error(("segment " + std::to_string(row) + " [" + std::to_string(begin) + ", " +
                             std::to_string(end) + ") is out of order, overlaps or leaves the array of " +
                             std::to_string(length)).c_str());
    }
    if ((flags & ~(kResync | kSkip)) != 0) {
      throw nb::value_error(("segment " + std::to_string(row) + " has unknown flags " + std::to_string(flags)).c_str());
    }
    segments.push_back({std::size_t(begin), std::size_t(end), (flags & kResync) != 0, (flags & kSkip) != 0});
    last = end;
  }
  return segments;
}

}  // namespace overspill
