// Everything that computes: one boxed kernel for all operators. It asks the operator's meta kernel what the result
// will look like, allocates it, and queues the CPU kernel over the device's bytes on the current stream; the host
// goes on. The arithmetic is the CPU's, so results equal a CPU run's bit for bit.
//
// The host waits in two cases: operators that draw random numbers (their order must not depend on threads), and
// those whose output's shape depends on data (nonzero, equal, …), which go through PyTorch's own CPU fallback.
#include "generator.h"
#include "memory.h"
#include "views.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

namespace emulated {
namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_on_device(const at::Tensor& tensor) { return tensor.device().type() == kDevice; }

// The argument with every defined tensor in it replaced.
template <class Replace>
IValue with_tensors(const IValue& value, Replace replace) {
  if (value.isTensor()) {
    return value.toTensor().defined() ? IValue(replace(value.toTensor())) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

bool is_generator(const c10::Argument& argument) {
  auto type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// A scalar from the host keeps its value: some meta kernels are Python, which gets it as a number.
at::Tensor as_meta(const at::Tensor& tensor) {
  if (tensor.is_cpu() && tensor.dim() == 0) return tensor;
  const c10::InferenceMode off(false);
  auto meta = at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

// A CPU tensor among the operands: a scalar is taken at its value now, as on CUDA; indices too; else it is a mistake.
at::Tensor host_operand(const at::Tensor& tensor, const std::string& operation) {
  const bool takes_host_indices = operation.find("index") != std::string::npos;
  TORCH_CHECK(
      tensor.is_cpu() && (tensor.dim() == 0 || takes_host_indices), "Expected all tensors to be on the same device, "
      "but ", operation, " was given one on ", tensor.device(), " and one on the emulated accelerator.");
  const c10::InferenceMode off(false);
  at::Tensor copy = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  copy.copy_(tensor);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// One call of an operator, from its arguments to its results on the stack.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name()), stack_(stack) {
    const auto arguments = torch::jit::last(*stack, schema_.arguments().size());
    arguments_.assign(arguments.begin(), arguments.end());
  }

  void run() {
    check_not_forked();
    const auto full_name = c10::toString(op_.operator_name());
    if (!results_are_given() && (host_synchronous_operators().has(full_name) || !infer())) {
      struct Inside {
        Inside() { inside_cpu_fallback = true; }
        ~Inside() { inside_cpu_fallback = false; }
      } inside;
      at::native::cpu_fallback(op_, stack_);
      host_synchronous_operators().add(full_name);
      return;
    }
    std::vector<IValue> results;
    for (size_t i = 0; i < schema_.returns().size(); ++i) results.push_back(result(i));
    if (!is_view_) queue(results);
    torch::jit::drop(*stack_, arguments_.size());
    for (auto& value : results) stack_->push_back(std::move(value));
  }

 private:
  // Whether all results are `out=` tensors that have their shape already, as for most operators that PyTorch splits
  // into shape and computation before they come here. (It then saves the meta kernel, often Python. Losses with a
  // `reduction` use their `out=` as scratch and give it another shape.)
  bool results_are_given() const {
    bool any = false;
    for (const auto& returned : schema_.returns()) {
      if (!returned.alias_info() || !returned.alias_info()->isWrite()) return false;
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& argument = schema_.arguments()[i];
      if (argument.name() == "reduction") return false;
      if (!argument.alias_info() || !argument.alias_info()->isWrite()) continue;
      if (!argument.is_out() || !arguments_[i].isTensor() || arguments_[i].toTensor().numel() == 0) return false;
      any = true;
    }
    return any;
  }

  // What the results will look like. False: it cannot be known before the data are.
  bool infer() {
    for (const auto& value : arguments_) {
      meta_arguments_.push_back(with_tensors(value, as_meta));
      if (value.isDevice()) meta_arguments_.back() = c10::Device(at::kMeta);
      if (value.isGenerator()) meta_arguments_.back() = IValue();
    }
    meta_results_ = meta_arguments_;
    try {
      const at::AutoDispatchBelowADInplaceOrView no_autograd;
      op_.callBoxed(&meta_results_);
    } catch (const std::exception&) {
      return false;  // no meta kernel, or the caller's mistake: the CPU kernel says it better
    }
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      if (alias && alias->isWrite() && arguments_[i].isTensor()) {
        follow_resize(arguments_[i].toTensor(), meta_arguments_[i].toTensor());
      }
    }
    return true;
  }

  // An `out=` tensor takes the shape of the result.
  static void follow_resize(const at::Tensor& tensor, const at::Tensor& meta) {
    if (!tensor.defined() || !is_on_device(tensor) || tensor.sizes() == meta.sizes()) return;
    const size_t needed = at::detail::computeStorageNbytes(
        meta.sizes(), meta.strides(), tensor.itemsize(), tensor.storage_offset());
    if (needed > tensor.storage().nbytes()) resize_storage(tensor.storage(), needed);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
  }

  IValue result(size_t index) {
    const auto* alias = schema_.returns()[index].alias_info();
    if (!alias) {
      return with_tensors(meta_results_[index], [](const at::Tensor& meta) {
        return at::detail::empty_strided_generic(
            meta.sizes(), meta.strides(), &device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
            meta.scalar_type());
      });
    }
    const IValue& source = aliased_argument(*alias);
    if (alias->isWrite()) return source;
    is_view_ = true;
    return with_tensors(meta_results_[index], [&](const at::Tensor& meta) {
      const auto& base = source.toTensor();
      return base.as_strided(meta.sizes(), meta.strides(), base.storage_offset() + meta.storage_offset());
    });
  }

  const IValue& aliased_argument(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* candidate = schema_.arguments()[i].alias_info();
      if (candidate && candidate->beforeSets() == alias.beforeSets()) return arguments_[i];
    }
    TORCH_CHECK(false, name_, " returns an alias of none of its arguments.");
  }

  // A tensor that the CPU kernel writes to, and where its bytes must be afterwards. A kernel may use an `out=` tensor
  // as scratch of another shape (mse_loss does), which then has moved.
  struct Output {
    at::Tensor written;
    at::Tensor target;

    void settle(const std::string& operation) const {
      TORCH_CHECK(
          written.sizes() == target.sizes() && written.scalar_type() == target.scalar_type(), operation,
          ": the result is ", written.sizes(), " of ", written.scalar_type(), ", but its tensor is ", target.sizes(),
          " of ", target.scalar_type(), ". (An out= tensor that is not empty is not resized here.)");
      if (written.const_data_ptr() != target.const_data_ptr()) target.copy_(written);
    }
  };

  void queue(const std::vector<IValue>& results) {
    std::vector<BlockPtr> blocks;
    std::vector<Output> outputs;
    uint64_t nbytes = 0;
    bool draws = false;
    Stack operands;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      operands.push_back(with_tensors(arguments_[i], [&](const at::Tensor& tensor) {
        nbytes += tensor.nbytes();
        if (!is_on_device(tensor)) return host_operand(tensor, name_);
        auto operand = device_view(tensor, blocks, alias && alias->isWrite());
        if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) operand.unsafeGetTensorImpl()->set_wrapped_number(true);
        if (alias && alias->isWrite()) outputs.push_back({operand, device_view(tensor, blocks)});
        return operand;
      }));
      if (arguments_[i].isDevice()) operands.back() = c10::Device(at::kCPU);
      if (is_generator(schema_.arguments()[i])) {
        draws = true;
        operands.back() = generator(arguments_[i]);
      }
    }
    // A fresh result of the CPU kernel is copied to where the caller was told that it will be.
    std::vector<at::Tensor> fresh;
    for (size_t i = 0; i < results.size(); ++i) {
      if (schema_.returns()[i].alias_info()) continue;
      with_tensors(results[i], [&](const at::Tensor& tensor) {
        nbytes += tensor.nbytes();
        fresh.push_back(device_view(tensor, blocks));
        return tensor;
      });
    }
    auto task = [op = op_, operands = std::move(operands), outputs = std::move(outputs), fresh = std::move(fresh),
                 threads = at::get_num_threads()](StreamClock&) {
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
      const auto& returns = op.schema().returns();
      Stack stack = operands;
      op.callBoxed(&stack);
      for (const auto& output : outputs) output.settle(op.schema().name());
      auto target = fresh.begin();
      for (size_t i = 0; i < returns.size(); ++i) {
        if (returns[i].alias_info()) continue;
        with_tensors(stack[i], [&](const at::Tensor& tensor) {
          TORCH_CHECK(target != fresh.end(), op.schema().name(), " returned more tensors than its meta kernel.");
          Output{tensor, *target++}.settle(op.schema().name());
          return tensor;
        });
      }
    };
    launch(name_, Lane::compute, nbytes, std::move(blocks), std::move(task));
    if (draws) wait_for_current_stream();
  }

  static at::Generator generator(const IValue& argument) {
    const at::Generator& given = argument.isNone() ? default_generator() : argument.toGenerator();
    TORCH_CHECK(
        given.device().type() == kDevice, "Expected a generator of the emulated accelerator, got one of ",
        given.device(), ".");
    return given.get<DeviceGenerator>()->source;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  Stack* const stack_;
  Stack arguments_;
  Stack meta_arguments_;
  Stack meta_results_;
  bool is_view_ = false;
};

void run_on_device(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
}

}  // namespace

// An operator may have a kernel for the CPU and a recipe of other operators for every other device (silu_backward has).
// The recipe would come before the fallback, and round differently: take the CPU's kernel for these, too.
void prefer_cpu_kernels() {
  static auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || name.getNamespace() != std::optional<std::string_view>("aten")) continue;
    const bool has_recipe = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
    if (!has_recipe || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
      continue;
    }
    library->impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_device>());
  }
}

}  // namespace emulated
