// The loops of every kernel, written once as plain elementwise C++ and compiled once per SIMD clone.
// Not here: threads, segments, checks. Every operation rounds once and in the order written
// (-ffp-contract=off), so all clones give the same bits; docs/theory/arithmetic.md has the formulas.
// The order of operations follows torch's _single_tensor_adam and _single_tensor_sgd.
//
// No include guard: included once by each kernels_*.cpp, inside that clone's namespace.

// Adam and AdamW in one pass: p, m, v and the published weights.
template <class MasterT, class GradT, class StateT, bool L2, bool LerpFromGrad>
static void adam_loop(MasterT p, const GradT* __restrict g_, StateT* __restrict m_, StateT* __restrict v_,
                      const AdamScalars& in, std::size_t begin, std::size_t end) {
  const AdamScalars s = in;
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) {
    float x = p.load(i);
    float g = load(g_, i) * s.scale;
    if (L2) {
      g = g + s.weight_decay * x;
    } else {
      x = x * s.decay;
    }
    const float m0 = load(m_, i);
    // torch.lerp: from the nearer end, so that weight 1 gives the gradient exactly.
    const float m = (LerpFromGrad ? g : m0) + s.beta1_lerp * (g - m0);
    const float v = load(v_, i) * s.beta2 + (s.one_minus_beta2 * g) * g;
    // Times the inverse, where torch divides: a division costs as much as the square root, and the loop is bound by both.
    const float denom = __builtin_sqrtf(v) * s.inverse_correction2_sqrt + s.eps;
    store(m_, i, m);
    store(v_, i, v);
    p.store(i, x + (s.negative_step * m) / denom);
  }
}

template <class MasterT, class GradT, class StateT, bool L2, bool First>
static void sgd_momentum_loop(MasterT p, const GradT* __restrict g_, StateT* __restrict buf_, const SgdScalars& in,
                              std::size_t begin, std::size_t end) {
  const SgdScalars s = in;
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) {
    const float x = p.load(i);
    float g = load(g_, i) * s.scale;
    if (L2) g = g + s.weight_decay * x;
    // The first step takes the gradient whole, without dampening, as torch does.
    const float buf = First ? g : load(buf_, i) * s.momentum + s.one_minus_dampening * g;
    store(buf_, i, buf);
    const float d = s.nesterov ? g + s.momentum * buf : buf;
    p.store(i, x + s.negative_lr * d);
  }
}

template <class MasterT, class GradT, bool L2>
static void sgd_plain_loop(MasterT p, const GradT* __restrict g_, const SgdScalars& in, std::size_t begin,
                           std::size_t end) {
  const SgdScalars s = in;
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) {
    const float x = p.load(i);
    float g = load(g_, i) * s.scale;
    if (L2) g = g + s.weight_decay * x;
    p.store(i, x + s.negative_lr * g);
  }
}

template <class MasterT, class GradT, class StateT>
static void lion_loop(MasterT p, const GradT* __restrict g_, StateT* __restrict m_, const LionScalars& in,
                      std::size_t begin, std::size_t end) {
  const LionScalars s = in;
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) {
    const float x = p.load(i) * s.decay;
    const float g = load(g_, i) * s.scale;
    const float m = load(m_, i);
    const float c = m * s.beta1 + s.one_minus_beta1 * g;
    store(m_, i, m * s.beta2 + s.one_minus_beta2 * g);
    // sign(c) with sign(0) = 0 and sign(NaN) = NaN: a NaN is not hidden.
    const float up = c > 0.0f ? 1.0f : 0.0f;
    const float down = c < 0.0f ? 1.0f : 0.0f;
    const float sign = c != c ? c : up - down;
    p.store(i, x - s.lr * sign);
  }
}

// Calls f with the typed master, gradient and state pointers.
template <class F>
static void with_master(const Arrays& a, F f) {
  switch (a.master_kind) {
    case Master::own: return f(OwnMaster{static_cast<float*>(a.weights)});
    case Master::f32: return f(FloatMaster{static_cast<bf16*>(a.weights), static_cast<float*>(a.master)});
    case Master::split: return f(SplitMaster{static_cast<bf16*>(a.weights), static_cast<std::int16_t*>(a.master)});
  }
}

template <class F>
static void with_types(const Arrays& a, F f) {
  with_master(a, [&](auto p) {
    const auto with_grads = [&](auto* g) {
      if (a.state_dtype == Dtype::f32) return f(p, g, static_cast<float*>(a.state1), static_cast<float*>(a.state2));
      return f(p, g, static_cast<bf16*>(a.state1), static_cast<bf16*>(a.state2));
    };
    if (a.grad_dtype == Dtype::f32) return with_grads(static_cast<const float*>(a.grads));
    return with_grads(static_cast<const bf16*>(a.grads));
  });
}

static void adam(const Arrays& a, const AdamScalars& s, std::size_t begin, std::size_t end) {
  with_types(a, [&]<class P, class G, class S>(P p, const G* g, S* m, S* v) {
    if (s.l2 && s.lerp_from_grad) return adam_loop<P, G, S, true, true>(p, g, m, v, s, begin, end);
    if (s.l2) return adam_loop<P, G, S, true, false>(p, g, m, v, s, begin, end);
    if (s.lerp_from_grad) return adam_loop<P, G, S, false, true>(p, g, m, v, s, begin, end);
    return adam_loop<P, G, S, false, false>(p, g, m, v, s, begin, end);
  });
}

static void sgd(const Arrays& a, const SgdScalars& s, bool has_buffer, std::size_t begin, std::size_t end) {
  with_types(a, [&]<class P, class G, class S>(P p, const G* g, S* buf, S*) {
    if (!has_buffer) {
      if (s.l2) return sgd_plain_loop<P, G, true>(p, g, s, begin, end);
      return sgd_plain_loop<P, G, false>(p, g, s, begin, end);
    }
    if (s.l2 && s.first) return sgd_momentum_loop<P, G, S, true, true>(p, g, buf, s, begin, end);
    if (s.l2) return sgd_momentum_loop<P, G, S, true, false>(p, g, buf, s, begin, end);
    if (s.first) return sgd_momentum_loop<P, G, S, false, true>(p, g, buf, s, begin, end);
    return sgd_momentum_loop<P, G, S, false, false>(p, g, buf, s, begin, end);
  });
}

static void lion(const Arrays& a, const LionScalars& s, std::size_t begin, std::size_t end) {
  with_types(a, [&]<class P, class G, class S>(P p, const G* g, S* m, S*) { lion_loop<P, G, S>(p, g, m, s, begin, end); });
}

static void resync(const Arrays& a, std::size_t begin, std::size_t end) {
  with_master(a, [&](auto p) {
    OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) p.resync(i);
  });
}

// [Note: Order of a sum] Element i of a chunk goes to lane i mod 16, each lane adds in rising order, and the
// lanes are added by halves. All in fp64: the square of an fp32 number is exact there. 16 lanes fill two
// AVX-512 registers and do not overflow the 16 registers of SSE2.
constexpr std::size_t kLanes = 16;

template <class T>
static double squared_sum_of(const T* __restrict g, std::size_t n) {
  double lane[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::size_t j = 0; j < kLanes; ++j) {
      const double x = double(load(g, i + j));
      lane[j] += x * x;
    }
  }
  for (std::size_t j = 0; i + j < n; ++j) {
    const double x = double(load(g, i + j));
    lane[j] += x * x;
  }
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t j = 0; j < half; ++j) lane[j] += lane[j + half];
  }
  return lane[0];
}

static double squared_sum(const void* grads, Dtype dtype, std::size_t begin, std::size_t end) {
  if (dtype == Dtype::f32) return squared_sum_of(static_cast<const float*>(grads) + begin, end - begin);
  return squared_sum_of(static_cast<const bf16*>(grads) + begin, end - begin);
}

static std::int64_t count_nonfinite(const void* grads, Dtype dtype, std::size_t begin, std::size_t end) {
  std::int64_t count = 0;
  const auto count_in = [&](const auto* g) {
    OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) count += (bits_of(load(g, i)) & 0x7f800000u) == 0x7f800000u;
  };
  if (dtype == Dtype::f32) {
    count_in(static_cast<const float*>(grads));
  } else {
    count_in(static_cast<const bf16*>(grads));
  }
  return count;
}

template <class T>
static void accumulate_loop(float* __restrict target, const T* __restrict source, std::size_t begin, std::size_t end) {
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) store(target, i, target[i] + load(source, i));
}

static void accumulate(float* target, const void* source, Dtype dtype, std::size_t begin, std::size_t end) {
  if (dtype == Dtype::f32) return accumulate_loop(target, static_cast<const float*>(source), begin, end);
  return accumulate_loop(target, static_cast<const bf16*>(source), begin, end);
}

static void join(float* __restrict master, const bf16* __restrict weights, const std::int16_t* __restrict residual,
                 std::size_t begin, std::size_t end) {
  if (residual == nullptr) {
    OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) master[i] = load(weights, i);
    return;
  }
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) {
    master[i] = float_of((std::uint32_t(weights[i].bits) << 16) + std::uint32_t(std::int32_t(residual[i])));
  }
}

static void split(bf16* __restrict weights, std::int16_t* __restrict residual, const float* __restrict master,
                  std::size_t begin, std::size_t end) {
  if (residual == nullptr) {
    OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) store(weights, i, master[i]);
    return;
  }
  const SplitMaster p{weights, residual};
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) p.store(i, master[i]);
}

// The seven streams of fp32 Adam with trivial arithmetic: what the memory allows (benchmarks only).
static void stream(float* __restrict a, float* __restrict b, float* __restrict c, const float* __restrict d,
                   std::size_t begin, std::size_t end) {
  OVERSPILL_NO_ALIAS
  for (std::size_t i = begin; i < end; ++i) {
    const float x = d[i];
    a[i] += x;
    b[i] += x;
    c[i] += x;
  }
}

static constexpr Kernels table(const char* level) {
  return Kernels{level, adam, sgd, lion, resync, squared_sum, count_nonfinite, accumulate, join, split, stream};
}
