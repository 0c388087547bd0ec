"""Small transformers models whose layers and steps are run for real on the CPU, watched by testing/malloc.py.

Sizes are chosen so that a tensor of any width is far above the 512 bytes that each one is rounded to.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from overspill.model import LayerKind, ModelShape
from testing.malloc import Watched

__all__ = ["MODELS", "TOKENS", "Built", "LoraLinear", "build", "layer_call", "real_layer", "with_adapters"]

SEQUENCES, SEQ_LEN = 2, 64
TOKENS = SEQUENCES * SEQ_LEN
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LINE = _IDS | {
    "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 4, "vocab_size": 1024,
}  # fmt: skip
_GPT2 = {
    "n_embd": 128, "n_head": 4, "n_layer": 4, "vocab_size": 1024, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip
_EXPERTS = _LINE | {"num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _LINE),
    "llama with biases": ("llama", _LINE | {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "mistral": ("mistral", _LINE),
    "qwen2": ("qwen2", _LINE),
    "qwen3": ("qwen3", _LINE | {"head_dim": 40}),
    "gemma2": ("gemma2", _LINE | {"head_dim": 40}),
    "phi": ("phi", _LINE),
    "phi3": ("phi3", _LINE),
    "olmo2": ("olmo2", _LINE),
    "gpt2": ("gpt2", _GPT2),
    "mixtral": ("mixtral", _EXPERTS | {"num_local_experts": 4}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 40}),
}


class LoraLinear(nn.Module):
    """A frozen linear and a pair beside it, operation by operation as peft's lora.Linear runs them."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a = nn.Linear(inputs, rank, bias=False, dtype=dtype)
        self.lora_b = nn.Linear(rank, outputs, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(x)
        kind = result.dtype
        x = x.to(self.lora_a.weight.dtype)
        result = result + self.lora_b(self.lora_a(x)) * 2.0
        return result.to(kind)  # type: ignore[no-any-return]


def with_adapters(model: nn.Module, rank: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Every linear inside a layer gets a pair; the rest is frozen."""
    from transformers.pytorch_utils import Conv1D

    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        if not any(part.isdigit() for part in name.split(".")):
            continue
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
        elif isinstance(module, nn.Linear):
            inputs, outputs = module.in_features, module.out_features
        else:
            continue
        setattr(model.get_submodule(parent), leaf, LoraLinear(module, inputs, outputs, rank, dtype))
    return model


@dataclass
class Built:
    """A model, its shape, and its first layer's kind."""

    model: Any
    shape: ModelShape
    kind: LayerKind
    layer: Any


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Built:
    from transformers import AutoConfig, AutoModelForCausalLM

    family, sizes = MODELS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **copy.deepcopy(sizes))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.train()
    shape = ModelShape.from_config(sizes | {"model_type": family})
    assert shape.facts is not None
    stack = shape.facts.text
    return Built(model, shape, stack.sequence[0], model.get_submodule(stack.prefix)[0])


def layer_call(built: Built) -> Callable[[torch.Tensor], torch.Tensor]:
    """The first layer as a function of its input; the rest that the model gives it is made once."""
    seen: dict[str, Any] = {}

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen["args"], seen["kwargs"] = args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"}

    hook = built.layer.register_forward_pre_hook(note, with_kwargs=True)
    with torch.no_grad():
        built.model(input_ids=torch.randint(3, 500, (SEQUENCES, SEQ_LEN)), use_cache=False)
    hook.remove()

    def call(x: torch.Tensor) -> torch.Tensor:
        out = built.layer(x, *seen["args"], **seen["kwargs"])
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return call


class _Source(torch.autograd.Function):
    """A tensor that has a history, as what the layer before made; its gradient goes into a list."""

    @staticmethod
    def forward(ctx: Any, seed: torch.Tensor, make: Any, arrived: list[torch.Tensor]) -> Any:
        ctx.arrived = arrived
        return make()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.arrived.append(grad)
        return None, None, None


class _Sink(torch.autograd.Function):
    """Lets a tensor go and makes its gradient when backward begins."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> Any:
        ctx.like = (out.shape, out.dtype)
        return torch.zeros((), dtype=out.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        shape, dtype = ctx.like
        return torch.ones(shape, dtype=dtype)


def real_layer(built: Built, call: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> dict[str, int]:
    """What `LayerFigures` says of a layer, measured: bytes by the same names."""
    seed = torch.zeros((), requires_grad=True)
    arrived: list[torch.Tensor] = []

    def new_input() -> Any:
        return _Source.apply(
            seed, lambda: torch.randn(SEQUENCES, SEQ_LEN, built.kind.hidden, dtype=dtype), arrived
        )  # fmt: skip

    with Watched() as seen:
        seen.phase("boundary")
        x = new_input()
        seen.phase("forward")
        with torch.no_grad():
            out: Any = call(x)
        seen.phase("between")
        del out
        seen.phase("recorded")
        out = call(x)
        seen.phase("recomputed")
        loss = _Sink.apply(out)
        loss.backward()
        seen.phase("clean")
        del x, out, loss
        arrived.clear()
        built.model.zero_grad(set_to_none=True)
        seen.phase("again")
        loss = _Sink.apply(call(new_input()))
        seen.phase("backward")
        loss.backward()
        seen.phase("after")
        del loss
        arrived.clear()
    return {
        "boundary": seen.ends["boundary"],
        "output": seen.ends["forward"] - seen.ends["boundary"],
        "kept": seen.ends["again"],
        "forward": seen.peaks["forward"],
        "recorded": seen.peaks["recorded"],
        "backward": seen.peaks["backward"],
        "recomputed": seen.peaks["recomputed"],
        "gradients": seen.ends["after"],
    }
