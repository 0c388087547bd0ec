// Composite operators for which PyTorch takes another way on a PrivateUse1 device than is wanted here. Attention (the
// CPU's flash kernel, where the CPU would choose it) and dropout (the CPU's mask, drawn from the device's generator)
// go the CPU's way, so that numbers agree bit for bit. `param.data = …` over devices goes CUDA's way.
#include "views.h"

#include <ATen/TensorOperators.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_fused_sdp_choice_native.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

namespace emulated {
namespace {

at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros_like(input));
  auto noise = at::empty_like(input);
  noise.bernoulli_(1 - p);
  noise.div_(1 - p);
  return input * noise;
}

at::Tensor attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
    double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (query.key_set().has(c10::DispatchKey::Python)) {  // a fake tensor, or another subclass without memory of its own
    return at::native::scaled_dot_product_attention(
        query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  }
  // The CPU's own choice, by what it sees of the operands (never their data).
  std::vector<BlockPtr> unread;
  const auto seen = [&](const at::Tensor& tensor) {
    return device_view(tensor, unread).requires_grad_(tensor.requires_grad());
  };
  std::optional<at::Tensor> seen_mask;
  std::optional<at::Tensor> bias = mask;
  if (mask && mask->defined()) {
    TORCH_CHECK(mask->device().type() == kDevice, "Expected the attention mask on the emulated accelerator.");
    if (mask->scalar_type() == at::kBool) {
      const auto zero = at::scalar_tensor(0.0, query.options());
      bias = at::where(*mask, zero, -std::numeric_limits<double>::infinity()).to(query.scalar_type());
    }
    seen_mask = seen(*bias);
  }
  const auto choice = at::native::_fused_sdp_choice_cpp(
      seen(query), seen(key), seen(value), seen_mask, dropout_p, is_causal, scale, enable_gqa);
  if (static_cast<sdp::SDPBackend>(choice) == sdp::SDPBackend::flash_attention) {
    return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, bias, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, bias, dropout_p, is_causal, std::nullopt, scale, enable_gqa));
}

// Whether `parameter.data = tensor` may change what is behind a parameter. PyTorch allows it between the CPU and the
// accelerators that it knows by name; without it, module.to("emulated") makes new parameters and unties shared ones.
bool has_compatible_type(const at::Tensor& self, const at::Tensor& from) {
  const auto is_plain = [](const at::Tensor& tensor) {
    const auto type = tensor.device().type();
    return tensor.layout() == at::kStrided && (type == kDevice || type == at::kCPU);
  };
  return is_plain(self) && is_plain(from);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  library.impl("dropout", dropout);
  library.impl("scaled_dot_product_attention", attention);
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {  // under inference_mode
  library.impl("_has_compatible_shallow_copy_type", has_compatible_type);
  library.impl("dropout", dropout);
  library.impl("scaled_dot_product_attention", attention);
}

}  // namespace
}  // namespace emulated
