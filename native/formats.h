// Number formats: bf16, the split master, and the one rounding rule that all of them publish by.
// Not here: loops or dispatch. This file is included by each SIMD clone inside its own namespace, so every
// function is internal to the clone and forced inline: one clone's machine code never leaks into another.
//
// docs/theory/arithmetic.md has the proof that the split master (bf16 weight + 16-bit residual = fp32) is lossless:
// it reconstructs every fp32 number, overflow included.
//
// No include guard: it is meant to be included once per clone.

#define OVERSPILL_INLINE static inline __attribute__((always_inline))
// The bindings refuse overlapping arrays; said here because a restrict pointer inside a struct does not tell.
#ifdef __clang__
#define OVERSPILL_NO_ALIAS _Pragma("clang loop vectorize(assume_safety)")
#else
#define OVERSPILL_NO_ALIAS _Pragma("GCC ivdep")
#endif

OVERSPILL_INLINE std::uint32_t bits_of(float x) {
  std::uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}

OVERSPILL_INLINE float float_of(std::uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// [Note: One NaN] Which payload and sign an operation on NaNs returns depends on the order in which the
// compiler puts the operands, and so on the clone. Whatever is stored is therefore the one NaN 0x7fc00000.
OVERSPILL_INLINE std::uint32_t canonical_bits(float x) {
  const std::uint32_t u = bits_of(x);
  // All ones for a NaN, by the sign of a difference: a select here keeps gcc from vectorising the 16-bit stores.
  const std::uint32_t nan = std::uint32_t(std::int32_t(0x7f800000u - (u & 0x7fffffffu)) >> 31);
  return (u & ~nan) | (0x7fc00000u & nan);
}

// Half up in magnitude. Half-to-even would be ambiguous at ties for the split: the residual 0x8000 would
// have to mean both +32768 and -32768.
OVERSPILL_INLINE std::uint32_t published_bits(std::uint32_t canonical) { return (canonical + 0x8000u) >> 16; }

OVERSPILL_INLINE float load(const float* p, std::size_t i) { return p[i]; }
OVERSPILL_INLINE float load(const bf16* p, std::size_t i) { return float_of(std::uint32_t(p[i].bits) << 16); }
OVERSPILL_INLINE void store(float* p, std::size_t i, float x) { p[i] = float_of(canonical_bits(x)); }
OVERSPILL_INLINE void store(bf16* p, std::size_t i, float x) {
  p[i].bits = std::uint16_t(published_bits(canonical_bits(x)));
}

// The three ways in which weights and their fp32 master lie in memory. Each is a pair of load and store of
// the master; store also publishes the weights.

struct OwnMaster {  // fp32 weights are their own master
  float* __restrict weights;
  OVERSPILL_INLINE_MEMBER float load(std::size_t i) const { return weights[i]; }
  OVERSPILL_INLINE_MEMBER void store(std::size_t i, float x) const { weights[i] = float_of(canonical_bits(x)); }
  OVERSPILL_INLINE_MEMBER void resync(std::size_t) const {}
};

struct FloatMaster {  // bf16 weights, fp32 master
  bf16* __restrict weights;
  float* __restrict master;
  // A weight that is not what its master publishes was edited by the user, and is the truth. (With the split master
  // it always is: its bits are the master's upper half.) By masks, since a select would keep gcc from vectorising.
  OVERSPILL_INLINE_MEMBER float load(std::size_t i) const {
    const std::uint32_t u = canonical_bits(master[i]);
    const std::uint32_t w = weights[i].bits;
    const std::uint32_t differs = (published_bits(u) & 0xffffu) ^ w;
    const std::uint32_t edited = std::uint32_t(std::int32_t(differs | (0u - differs)) >> 31);
    return float_of((u & ~edited) | ((w << 16) & edited));
  }
  OVERSPILL_INLINE_MEMBER void store(std::size_t i, float x) const {
    const std::uint32_t u = canonical_bits(x);
    master[i] = float_of(u);
    weights[i].bits = std::uint16_t(published_bits(u));
  }
  OVERSPILL_INLINE_MEMBER void resync(std::size_t i) const {
    master[i] = float_of(std::uint32_t(weights[i].bits) << 16);
  }
};

struct SplitMaster {  // bf16 weights, 16-bit residual: master bits = (weight bits << 16) + residual
  bf16* __restrict weights;
  std::int16_t* __restrict residual;
  OVERSPILL_INLINE_MEMBER float load(std::size_t i) const {
    return float_of((std::uint32_t(weights[i].bits) << 16) + std::uint32_t(std::int32_t(residual[i])));
  }
  OVERSPILL_INLINE_MEMBER void store(std::size_t i, float x) const {
    const std::uint32_t u = canonical_bits(x);
    const std::uint32_t r = published_bits(u);
    weights[i].bits = std::uint16_t(r);
    residual[i] = std::int16_t(std::uint16_t(u - (r << 16)));  // low 16 bits: the difference fits int16
  }
  OVERSPILL_INLINE_MEMBER void resync(std::size_t i) const { residual[i] = 0; }
};
