"""What real torch code on the CPU holds of malloc's memory at each instant: the truth that a forecast is held against.

torch's profiler reports every allocation and every free, those inside operators and those of the autograd engine too,
and changes neither. (A TorchDispatchMode would: while one is active, the engine adds gradients out of place, see
at::isTensorSubclassLike.) Sizes are rounded up to 512 bytes, as an accelerator's allocator counts. What a CPU's
kernel allocates and frees within itself is its own, and left out: repacked bf16 of a matmul, an operand cast to the
other's dtype (an accelerator casts element by element).
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

import torch

__all__ = ["Watched"]

_ROUNDING_NBYTES = 512
_KERNELS = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::add", "aten::add_",
    "aten::mul", "aten::div", "aten::sub",
)  # fmt: skip


class Watched:
    """A context. Inside it `phase` begins a named phase; afterwards, beyond what was there at its beginning:

    peaks: each phase's highest instant; ends: what is alive at its end. Bytes.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self._profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
        )

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def phase(self, name: str) -> None:
        """From here on, events belong to the phase ``name``."""
        with torch.profiler.record_function(f"phase:{name}"):
            pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
        if error is not None:
            return
        profiler: Any = self._profile.profiler
        events = sorted((one.start_ns(), number, one) for number, one in enumerate(profiler.kineto_results.events()))
        now, name, until = 0, "", 0
        for start, _, one in events:
            if one.name().startswith("phase:"):
                name = one.name().removeprefix("phase:")
                self.peaks[name] = self.ends[name] = now
            elif one.name() in _KERNELS:
                until = max(until, start + one.duration_ns())
            elif one.name() == "[memory]" and name:
                if start >= until:  # what a kernel did has been done
                    self.peaks[name] = max(self.peaks[name], now)
                size = one.nbytes()
                rounded = -(-abs(size) // _ROUNDING_NBYTES) * _ROUNDING_NBYTES
                now += rounded if size > 0 else -rounded
                if start >= until:
                    self.peaks[name] = max(self.peaks[name], now)
                self.ends[name] = now
