// Python bindings of the optimizer kernels: adamw_, sgd_, lion_. Each call updates one chunk, given one table
// row per parameter in it. Here: checks, scalars in double, and the division of work. The loops are in
// kernels_impl.h.
#include "bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <optional>

#include "arrays.h"
#include "dispatch.h"
#include "pool.h"

namespace overspill {
namespace {

// Elements per work item: small enough to share a 1 Mi chunk evenly, large enough that the hardware
// prefetchers run. Elementwise kernels give the same bits for any value.
constexpr std::size_t kGrain = 32768;

struct Piece {
  std::size_t segment, begin, end;
};

std::vector<Piece> pieces_of(const std::vector<Segment>& segments) {
  std::vector<Piece> pieces;
  for (std::size_t k = 0; k < segments.size(); ++k) {
    if (segments[k].skip) continue;
    for (std::size_t at = segments[k].begin; at < segments[k].end; at += kGrain) {
      pieces.push_back({k, at, std::min(at + kGrain, segments[k].end)});
    }
  }
  return pieces;
}

Arrays read_arrays(Extents& extents, const Array& weights, const ConstArray& grads, const std::optional<Array>& master) {
  Arrays a;
  a.weights = weights.data();
  a.grads = grads.data();
  a.grad_dtype = float_dtype(grads.dtype(), "grads");
  const Dtype weight_dtype = float_dtype(weights.dtype(), "weights");
  add_extent(extents, weights, "weights");
  add_extent(extents, grads, "grads");
  if (!master) {
    if (weight_dtype != Dtype::f32) {
      throw nb::type_error("bfloat16 weights need a master: float32, or int16 for the split residual");
    }
    return a;
  }
  if (weight_dtype != Dtype::bf16) throw nb::type_error("float32 weights are their own master: pass master=None");
  add_extent(extents, *master, "master");
  a.master = master->data();
  if (master->itemsize() == 2) {
    require_i16(master->dtype(), "master");
    a.master_kind = Master::split;
  } else {
    require_f32(master->dtype(), "master");
    a.master_kind = Master::f32;
  }
  return a;
}

const double* scalar_rows(const ScalarTable& scalars, const SegmentTable& segments) {
  if (scalars.shape(0) != segments.shape(0)) throw nb::value_error("scalars must have one row per segment");
  return scalars.data();
}

// Runs update(segment index, begin, end) over all segments, resyncing first where a segment asks for it.
template <class Update>
void run_chunk(const Arrays& arrays, const std::vector<Segment>& segments, const Kernels& kernels, ThreadPool& pool,
               const Update& update) {
  const nb::gil_scoped_release released;
  const std::vector<Piece> pieces = pieces_of(segments);
  pool.run(pieces.size(), [&](std::size_t i) {
    const Piece& piece = pieces[i];
    if (segments[piece.segment].resync) kernels.resync(arrays, piece.begin, piece.end);
    update(piece.segment, piece.begin, piece.end);
  });
}

void adamw(Array weights, ConstArray grads, std::optional<Array> master, Array exp_avg, Array exp_avg_sq,
           SegmentTable segments, ScalarTable scalars, ThreadPool& pool, bool decoupled, const std::string& level) {
  Extents extents(weights.shape(0));
  Arrays a = read_arrays(extents, weights, grads, master);
  a.state_dtype = float_dtype(exp_avg.dtype(), "exp_avg");
  if (float_dtype(exp_avg_sq.dtype(), "exp_avg_sq") != a.state_dtype) {
    throw nb::type_error("exp_avg and exp_avg_sq must have the same dtype");
  }
  add_extent(extents, exp_avg, "exp_avg");
  add_extent(extents, exp_avg_sq, "exp_avg_sq");
  a.state1 = exp_avg.data();
  a.state2 = exp_avg_sq.data();
  const auto ranges = read_segments(segments, weights.shape(0));
  const double* row = scalar_rows(scalars, segments);
  std::vector<AdamScalars> s(ranges.size());
  for (auto& out : s) {
    const double lr = row[0], beta1 = row[1], beta2 = row[2], eps = row[3], weight_decay = row[4];
    const double weight = 1.0 - beta1;
    out.scale = float(row[7]);
    out.decay = decoupled ? float(1.0 - lr * weight_decay) : 1.0f;
    out.weight_decay = float(weight_decay);
    out.l2 = !decoupled && weight_decay != 0.0;
    // torch.lerp chooses its end by the weight as the tensor's dtype sees it.
    out.lerp_from_grad = !(std::fabs(float(weight)) < 0.5f);
    out.beta1_lerp = out.lerp_from_grad ? float(weight) - 1.0f : float(weight);
    out.beta2 = float(beta2);
    out.one_minus_beta2 = float(1.0 - beta2);
    out.inverse_correction2_sqrt = float(1.0 / row[6]);
    out.eps = float(eps);
    out.negative_step = float(-(lr / row[5]));
    row += 8;
  }
  const Kernels& kernels = kernels_for(level);
  run_chunk(a, ranges, kernels, pool,
            [&](std::size_t k, std::size_t begin, std::size_t end) { kernels.adam(a, s[k], begin, end); });
}

void sgd(Array weights, ConstArray grads, std::optional<Array> master, std::optional<Array> momentum_buffer,
         SegmentTable segments, ScalarTable scalars, ThreadPool& pool, const std::string& level) {
  Extents extents(weights.shape(0));
  Arrays a = read_arrays(extents, weights, grads, master);
  if (momentum_buffer) {
    a.state_dtype = float_dtype(momentum_buffer->dtype(), "momentum_buffer");
    add_extent(extents, *momentum_buffer, "momentum_buffer");
    a.state1 = momentum_buffer->data();
  }
  const auto ranges = read_segments(segments, weights.shape(0));
  const double* row = scalar_rows(scalars, segments);
  std::vector<SgdScalars> s(ranges.size());
  for (auto& out : s) {
    const double lr = row[0], momentum = row[1], dampening = row[2], weight_decay = row[3];
    if (!momentum_buffer && momentum != 0.0) throw nb::value_error("momentum needs a momentum_buffer");
    out.scale = float(row[7]);
    out.weight_decay = float(weight_decay);
    out.l2 = weight_decay != 0.0;
    out.momentum = float(momentum);
    out.one_minus_dampening = float(1.0 - dampening);
    out.nesterov = row[4] != 0.0;
    out.first = row[5] != 0.0;
    out.negative_lr = float(-lr);
    row += 8;
  }
  const Kernels& kernels = kernels_for(level);
  const bool has_buffer = momentum_buffer.has_value();
  run_chunk(a, ranges, kernels, pool,
            [&](std::size_t k, std::size_t begin, std::size_t end) { kernels.sgd(a, s[k], has_buffer, begin, end); });
}

void lion(Array weights, ConstArray grads, std::optional<Array> master, Array exp_avg, SegmentTable segments,
          ScalarTable scalars, ThreadPool& pool, const std::string& level) {
  Extents extents(weights.shape(0));
  Arrays a = read_arrays(extents, weights, grads, master);
  a.state_dtype = float_dtype(exp_avg.dtype(), "exp_avg");
  add_extent(extents, exp_avg, "exp_avg");
  a.state1 = exp_avg.data();
  const auto ranges = read_segments(segments, weights.shape(0));
  const double* row = scalar_rows(scalars, segments);
  std::vector<LionScalars> s(ranges.size());
  for (auto& out : s) {
    const double lr = row[0], beta1 = row[1], beta2 = row[2], weight_decay = row[3];
    out.scale = float(row[7]);
    out.decay = float(1.0 - lr * weight_decay);
    out.beta1 = float(beta1);
    out.one_minus_beta1 = float(1.0 - beta1);
    out.beta2 = float(beta2);
    out.one_minus_beta2 = float(1.0 - beta2);
    out.lr = float(lr);
    row += 8;
  }
  const Kernels& kernels = kernels_for(level);
  run_chunk(a, ranges, kernels, pool,
            [&](std::size_t k, std::size_t begin, std::size_t end) { kernels.lion(a, s[k], begin, end); });
}

}  // namespace

void bind_optim(nb::module_& m) {
  using nb::arg;
  m.attr("RESYNC") = kResync;
  m.attr("SKIP") = kSkip;
  m.def("adamw_", &adamw, arg("weights").noconvert(), arg("grads").noconvert(), arg("master").noconvert().none(),
        arg("exp_avg").noconvert(), arg("exp_avg_sq").noconvert(), arg("segments").noconvert(),
        arg("scalars").noconvert(), arg("pool"), arg("decoupled") = true, arg("level") = "auto");
  m.def("sgd_", &sgd, arg("weights").noconvert(), arg("grads").noconvert(), arg("master").noconvert().none(),
        arg("momentum_buffer").noconvert().none(), arg("segments").noconvert(), arg("scalars").noconvert(),
        arg("pool"), arg("level") = "auto");
  m.def("lion_", &lion, arg("weights").noconvert(), arg("grads").noconvert(), arg("master").noconvert().none(),
        arg("exp_avg").noconvert(), arg("segments").noconvert(), arg("scalars").noconvert(), arg("pool"),
        arg("level") = "auto");
}

}  // namespace overspill
