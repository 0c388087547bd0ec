// The interface between the bindings and the SIMD clones: plain structs and a table of function pointers.
// Each clone (kernels_*.cpp) compiles the same loops of kernels_impl.h for one instruction set and fills one
// table; dispatch.cpp chooses. An explicit table instead of target_clones, so that tests can call each clone
// and hold them bitwise equal. Nothing here depends on Python.
#pragma once

#include <cstddef>
#include <cstdint>

#define OVERSPILL_INLINE_MEMBER inline __attribute__((always_inline))

namespace overspill {

struct bf16 {
  std::uint16_t bits;
};

enum class Dtype : std::uint8_t { f32, bf16 };
enum class Master : std::uint8_t { own, f32, split };

// One chunk: equal-length arrays by base pointer. Which are used depends on the optimizer.
struct Arrays {
  void* weights = nullptr;
  const void* grads = nullptr;
  void* master = nullptr;
  void* state1 = nullptr;  // exp_avg, or the momentum buffer
  void* state2 = nullptr;  // exp_avg_sq
  Master master_kind = Master::own;
  Dtype grad_dtype = Dtype::f32;
  Dtype state_dtype = Dtype::f32;
};

// Scalars of one segment, derived in double and rounded once to float, as torch does with Python scalars.
struct AdamScalars {
  float scale, decay, weight_decay, beta1_lerp, beta2, one_minus_beta2, inverse_correction2_sqrt, eps, negative_step;
  bool lerp_from_grad, l2;
};
struct SgdScalars {
  float scale, weight_decay, momentum, one_minus_dampening, negative_lr;
  bool l2, first, nesterov;
};
struct LionScalars {
  float scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};

// All ranges are [begin, end) in elements of the chunk.
struct Kernels {
  const char* level;
  void (*adam)(const Arrays&, const AdamScalars&, std::size_t begin, std::size_t end);
  void (*sgd)(const Arrays&, const SgdScalars&, bool has_buffer, std::size_t begin, std::size_t end);
  void (*lion)(const Arrays&, const LionScalars&, std::size_t begin, std::size_t end);
  void (*resync)(const Arrays&, std::size_t begin, std::size_t end);
  double (*squared_sum)(const void* grads, Dtype, std::size_t begin, std::size_t end);
  std::int64_t (*count_nonfinite)(const void* grads, Dtype, std::size_t begin, std::size_t end);
  void (*accumulate)(float* target, const void* source, Dtype, std::size_t begin, std::size_t end);
  void (*join)(float* master, const bf16* weights, const std::int16_t* residual, std::size_t begin, std::size_t end);
  void (*split)(bf16* weights, std::int16_t* residual, const float* master, std::size_t begin, std::size_t end);
  void (*stream)(float* a, float* b, float* c, const float* d, std::size_t begin, std::size_t end);
};

extern const Kernels kernels_baseline;
#if defined(__x86_64__) && defined(__GNUC__)
#define OVERSPILL_X86_CLONES 1
extern const Kernels kernels_v3;
extern const Kernels kernels_v4;
#endif

}  // namespace overspill
