// Attention as one kernel, with the footprint that fused kernels of real accelerators have: beside its operands it
// keeps the output and a logsumexp, and its backward makes the three gradients. Key and value heads may be fewer than
// the query's; they are repeated inside, in the host's memory, where the device's accounting does not see it. The
// arithmetic is that of the CPU's flash kernel. `set_fused_attention(True)` in ../__init__.py chooses it.
#include "views.h"

#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace emulated {
namespace {

using at::Tensor;

// Key or value with the query's number of heads (dimension 1).
Tensor with_heads_of(const Tensor& query, const Tensor& tensor) {
  const auto groups = query.size(1) / tensor.size(1);
  return groups == 1 ? tensor : tensor.repeat_interleave(groups, 1);
}

// The gradient of a repeated key or value, summed over the group that shares it.
Tensor summed_over_group(const Tensor& gradient, const Tensor& like) {
  const auto groups = gradient.size(1) / like.size(1);
  if (groups == 1) return gradient;
  return gradient.unflatten(1, {like.size(1), groups}).sum(2);
}

std::tuple<Tensor, Tensor> forward(
    const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal, std::optional<double> scale) {
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, with_heads_of(query, key), with_heads_of(query, value), 0.0, is_causal, std::nullopt, scale);
  return {output, logsumexp.contiguous()};
}

std::tuple<Tensor, Tensor> forward_meta(
    const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal, std::optional<double> scale) {
  // Heads lie beside each other for each token, so that the result can be viewed as (batch, token, width).
  auto output = at::empty_like(query.transpose(1, 2)).transpose(1, 2);
  return {output, query.new_empty({query.size(0), query.size(1), query.size(2)}, at::kFloat)};
}

std::tuple<Tensor, Tensor, Tensor> backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& logsumexp, bool is_causal, std::optional<double> scale) {
  auto [d_query, d_key, d_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      gradient, query, with_heads_of(query, key), with_heads_of(query, value), output, logsumexp, 0.0, is_causal,
      std::nullopt, scale);
  return {d_query, summed_over_group(d_key, key), summed_over_group(d_value, value)};
}

std::tuple<Tensor, Tensor, Tensor> backward_meta(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& logsumexp, bool is_causal, std::optional<double> scale) {
  return {at::empty_like(query), at::empty_like(key), at::empty_like(value)};
}

TORCH_LIBRARY(emulated_accelerator, library) {
  library.def("fused_attention(Tensor query, Tensor key, Tensor value, bool is_causal, float? scale) -> (Tensor, Tensor)");
  library.def(
      "fused_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor output, "
      "Tensor logsumexp, bool is_causal, float? scale) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(emulated_accelerator, CPU, library) {
  library.impl("fused_attention", forward);
  library.impl("fused_attention_backward", backward);
}
TORCH_LIBRARY_IMPL(emulated_accelerator, Meta, library) {
  library.impl("fused_attention", forward_meta);
  library.impl("fused_attention_backward", backward_meta);
}

class FusedAttention : public torch::autograd::Function<FusedAttention> {
 public:
  static Tensor forward(
      torch::autograd::AutogradContext* context, const Tensor& query, const Tensor& key, const Tensor& value,
      bool is_causal, std::optional<double> scale) {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("emulated_accelerator::fused_attention", "")
                         .typed<std::tuple<Tensor, Tensor>(
                             const Tensor&, const Tensor&, const Tensor&, bool, std::optional<double>)>();
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [output, logsumexp] = op.call(query, key, value, is_causal, scale);
    context->save_for_backward({query, key, value, output, logsumexp});
    context->saved_data["is_causal"] = is_causal;
    context->saved_data["scale"] = scale;
    return output;
  }
  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    static auto op =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("emulated_accelerator::fused_attention_backward", "")
            .typed<std::tuple<Tensor, Tensor, Tensor>(
                const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, bool,
                std::optional<double>)>();
    const auto saved = context->get_saved_variables();
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [d_query, d_key, d_value] = op.call(
        gradients[0], saved[0], saved[1], saved[2], saved[3], saved[4], context->saved_data["is_causal"].toBool(),
        context->saved_data["scale"].toOptional<double>());
    return {d_query, d_key, d_value, Tensor(), Tensor()};
  }
};

}  // namespace

Tensor fused_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, bool is_causal, std::optional<double> scale) {
  return FusedAttention::apply(query, key, value, is_causal, scale);
}

}  // namespace emulated
