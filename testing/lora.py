"""LoRA as peft writes it, in a few lines, so that tests need no peft: for tests of memory and training."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["LoraLinear", "add_lora"]


class LoraLinear(nn.Module):
    """A frozen linear layer and two trained factors beside it: base(x) + B(A(dropout(x))) * scaling.

    The adapter's weights may be of another dtype; x is cast to it, as peft's `LoraLayer` does.
    """

    def __init__(
        self, base: nn.Module, rank: int, dropout: float, dtype: torch.dtype, features: tuple[int, int]
    ) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        inputs, outputs = features
        device = next(base.parameters()).device
        self.lora_A = nn.Linear(inputs, rank, bias=False, dtype=dtype, device=device)
        self.lora_B = nn.Linear(rank, outputs, bias=False, dtype=dtype, device=device)
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        kind = result.dtype
        inner = self.lora_dropout(x.to(self.lora_A.weight.dtype))
        return (result + self.lora_B(self.lora_A(inner)) * self.scaling).to(kind)


def add_lora(
    model: nn.Module,
    *,
    rank: int = 8,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    inputs_need_grad: bool = False,
    targets: tuple[str, ...] = (),
) -> nn.Module:
    """Freezes the model and puts an adapter on projections inside its layers: all, or those named in ``targets``.

    inputs_need_grad: as `enable_input_require_grads`, which reentrant checkpointing of a frozen model needs.
    """
    from transformers.pytorch_utils import Conv1D

    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        parent, _, leaf = name.rpartition(".")
        inside = any(part.isdigit() for part in name.split("."))
        if not inside or (targets and leaf not in targets):
            continue
        if isinstance(module, Conv1D):
            features = (module.weight.shape[0], module.weight.shape[1])
        elif hasattr(module, "in_features") and hasattr(module, "out_features"):  # linear, quantised or not
            features = (module.in_features, module.out_features)
        else:
            continue
        setattr(model.get_submodule(parent), leaf, LoraLinear(module, rank, dropout, dtype, features))
    if inputs_need_grad:
        model.enable_input_require_grads()
    return model
