// Python bindings of the kernels that are no optimizer: squared norms, accumulation, joining and splitting of
// masters, and the memory-stream kernel that the benchmark takes as its limit.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <limits>
#include <optional>

#include "arrays.h"
#include "dispatch.h"
#include "pool.h"

namespace overspill {
namespace {

// Part of the definition of a norm (docs/theory/arithmetic.md): changing it changes bits.
constexpr std::size_t kNormChunk = 65536;
// As in bind_optim.cpp: measured, 16 Ki to 64 Ki are alike, and the stream kernel must be cut as Adam is.
constexpr std::size_t kGrain = 32768;

template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> numpy_of(std::vector<T>&& values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner);
}

template <class F>
void for_grains(std::size_t length, ThreadPool& pool, const F& f) {
  const nb::gil_scoped_release released;
  pool.run((length + kGrain - 1) / kGrain,
           [&](std::size_t i) { f(i * kGrain, std::min((i + 1) * kGrain, length)); });
}

nb::tuple squared_norms(ConstArray grads, SegmentTable segments, ThreadPool& pool, const std::string& level) {
  const Dtype dtype = float_dtype(grads.dtype(), "grads");
  Extents(grads.shape(0)).add(grads.data(), grads.shape(0), grads.itemsize(), "grads");
  const auto ranges = read_segments(segments, grads.shape(0));
  const Kernels& kernels = kernels_for(level);
  std::vector<double> sums(ranges.size(), 0.0);
  std::vector<std::int64_t> nonfinite(ranges.size(), 0);
  {
    const nb::gil_scoped_release released;
    struct Piece {
      std::size_t segment, begin, end;
      double sum;
      std::int64_t nonfinite;
    };
    std::vector<Piece> pieces;
    for (std::size_t k = 0; k < ranges.size(); ++k) {
      if (ranges[k].skip) continue;
      for (std::size_t at = ranges[k].begin; at < ranges[k].end; at += kNormChunk) {
        pieces.push_back({k, at, std::min(at + kNormChunk, ranges[k].end), 0.0, 0});
      }
    }
    pool.run(pieces.size(), [&](std::size_t i) {
      Piece& piece = pieces[i];
      piece.sum = kernels.squared_sum(grads.data(), dtype, piece.begin, piece.end);
      // Squares of finite fp32 numbers cannot overflow fp64, so a finite sum says that there is nothing to count.
      if (!std::isfinite(piece.sum)) {
        piece.nonfinite = kernels.count_nonfinite(grads.data(), dtype, piece.begin, piece.end);
      }
    });
    for (const Piece& piece : pieces) {
      sums[piece.segment] += piece.sum;
      nonfinite[piece.segment] += piece.nonfinite;
    }
    for (double& sum : sums) {
      if (std::isnan(sum)) sum = std::numeric_limits<double>::quiet_NaN();
    }
  }
  return nb::make_tuple(numpy_of(std::move(sums)), numpy_of(std::move(nonfinite)));
}

void accumulate(Array target, ConstArray source, ThreadPool& pool, const std::string& level) {
  require_f32(target.dtype(), "target");
  const Dtype dtype = float_dtype(source.dtype(), "source");
  Extents extents(target.shape(0));
  add_extent(extents, target, "target");
  add_extent(extents, source, "source");
  const Kernels& kernels = kernels_for(level);
  auto* out = static_cast<float*>(target.data());
  for_grains(target.shape(0), pool, [&](std::size_t begin, std::size_t end) {
    kernels.accumulate(out, source.data(), dtype, begin, end);
  });
}

void join(Array master, ConstArray weights, std::optional<ConstArray> residual, ThreadPool& pool,
          const std::string& level) {
  require_f32(master.dtype(), "master");
  require_bf16(weights.dtype(), "weights");
  Extents extents(master.shape(0));
  add_extent(extents, master, "master");
  add_extent(extents, weights, "weights");
  const std::int16_t* low = nullptr;
  if (residual) {
    require_i16(residual->dtype(), "residual");
    add_extent(extents, *residual, "residual");
    low = static_cast<const std::int16_t*>(residual->data());
  }
  const Kernels& kernels = kernels_for(level);
  auto* out = static_cast<float*>(master.data());
  const auto* in = static_cast<const bf16*>(weights.data());
  for_grains(master.shape(0), pool,
             [&](std::size_t begin, std::size_t end) { kernels.join(out, in, low, begin, end); });
}

void split(Array weights, std::optional<Array> residual, ConstArray master, ThreadPool& pool,
           const std::string& level) {
  require_f32(master.dtype(), "master");
  require_bf16(weights.dtype(), "weights");
  Extents extents(master.shape(0));
  add_extent(extents, master, "master");
  add_extent(extents, weights, "weights");
  std::int16_t* low = nullptr;
  if (residual) {
    require_i16(residual->dtype(), "residual");
    add_extent(extents, *residual, "residual");
    low = static_cast<std::int16_t*>(residual->data());
  }
  const Kernels& kernels = kernels_for(level);
  auto* out = static_cast<bf16*>(weights.data());
  const auto* in = static_cast<const float*>(master.data());
  for_grains(master.shape(0), pool,
             [&](std::size_t begin, std::size_t end) { kernels.split(out, low, in, begin, end); });
}

void stream(Array a, Array b, Array c, ConstArray d, ThreadPool& pool, const std::string& level) {
  Extents extents(a.shape(0));
  add_extent(extents, a, "a");
  add_extent(extents, b, "b");
  add_extent(extents, c, "c");
  add_extent(extents, d, "d");
  require_f32(a.dtype(), "a");
  require_f32(b.dtype(), "b");
  require_f32(c.dtype(), "c");
  require_f32(d.dtype(), "d");
  const Kernels& kernels = kernels_for(level);
  auto *pa = static_cast<float*>(a.data()), *pb = static_cast<float*>(b.data()), *pc = static_cast<float*>(c.data());
  const auto* pd = static_cast<const float*>(d.data());
  for_grains(a.shape(0), pool,
             [&](std::size_t begin, std::size_t end) { kernels.stream(pa, pb, pc, pd, begin, end); });
}

}  // namespace

void bind_arrays(nb::module_& m) {
  using nb::arg;
  m.attr("NORM_CHUNK") = kNormChunk;
  m.def("squared_norms", &squared_norms, arg("grads").noconvert(), arg("segments").noconvert(), arg("pool"),
        arg("level") = "auto");
  m.def("accumulate_", &accumulate, arg("target").noconvert(), arg("source").noconvert(), arg("pool"),
        arg("level") = "auto");
  m.def("join_", &join, arg("master").noconvert(), arg("weights").noconvert(), arg("residual").noconvert().none(),
        arg("pool"), arg("level") = "auto");
  m.def("split_", &split, arg("weights").noconvert(), arg("residual").noconvert().none(), arg("master").noconvert(),
        arg("pool"), arg("level") = "auto");
  m.def("stream_", &stream, arg("a").noconvert(), arg("b").noconvert(), arg("c").noconvert(), arg("d").noconvert(),
        arg("pool"), arg("level") = "auto");
}

}  // namespace overspill
