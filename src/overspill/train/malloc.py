"""Gives free heap back to the system before the head makes the logits, where a step's peak is still to come.

[Note: Malloc] in forecast/activations.py says why the forecast counts on it. The governor does the same when memory
runs short, at any place; this is the one place where it is always worth its millisecond. It changes no number.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from overspill import _native

__all__ = ["trim_before_logits"]


def trim_before_logits(model: nn.Module) -> RemovableHandle | None:
    """Give the heap's holes back to the system each time the model's head is about to run; None without a head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module):
        return None

    def trim(module: nn.Module, inputs: Any) -> None:
        _native.malloc_trim()

    return head.register_forward_pre_hook(trim)
