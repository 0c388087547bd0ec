"""Keeps torch's own allocations close to what is alive: on a CPU, activations come from glibc's heap.

[Note: Malloc] in forecast/activations.py says what was seen: a heap of activations grows to 1.2 to 1.4 times what is
alive and keeps it. So large blocks are mapped, which the kernel takes back when they are freed, and the heap is
trimmed where it is emptiest and the peak is still to come: before the head makes the logits. Other libcs are left
as they are. None of this changes a number. What is done when memory runs short is in governor.py.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn
from torch.utils.hooks import RemovableHandle

from overspill import _native
from overspill.forecast.activations import MMAP_THRESHOLD_NBYTES
from overspill.units import KiB

__all__ = ["map_large_blocks", "trim_before_logits"]

TRIM_THRESHOLD_NBYTES: Final = 128 * KiB  # glibc's own default; setting the other one makes it static
ARENAS: Final = 2  # the training thread's, and one that all workers share


def map_large_blocks() -> bool:
    """For this process, from now on. False where the libc takes no such setting."""
    return _native.set_malloc(MMAP_THRESHOLD_NBYTES, TRIM_THRESHOLD_NBYTES, ARENAS)


def trim_before_logits(model: nn.Module) -> RemovableHandle | None:
    """Give the heap's holes back to the system each time the model's head is about to run; None without a head."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, nn.Module):
        return None

    def trim(module: nn.Module, inputs: Any) -> None:
        _native.malloc_trim()

    return head.register_forward_pre_hook(trim)
