"""One description per optimizer: its state arrays, its scalars, and the call that updates a chunk.

The train layer knows only OptimizerKernel, so that nothing there is shaped to Adam. Adding an optimizer is a
kernel in native/, its meaning in reference.py, and one entry in KERNELS. Not here: param groups as objects,
schedulers, step counters (train/), or where the arrays live (tiers/).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from overspill import _native
from overspill.errors import OverspillError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Array: TypeAlias = torch.Tensor | npt.NDArray[np.generic]
    Segments: TypeAlias = torch.Tensor | npt.NDArray[np.int64]
    Scalars: TypeAlias = torch.Tensor | npt.NDArray[np.float64]

__all__ = ["GRAD_SCALE_COLUMN", "KERNELS", "RESYNC", "SCALARS_PER_ROW", "SKIP", "OptimizerKernel", "kernel_name_of"]

Group: TypeAlias = Mapping[str, Any]

RESYNC: Final = _native.RESYNC
SKIP: Final = _native.SKIP
SCALARS_PER_ROW: Final = 8
GRAD_SCALE_COLUMN: Final = 7
"""In every optimizer's row: what gradients are multiplied by (unscale × clip factor), so it can be filled in late."""


@dataclass(frozen=True)
class OptimizerKernel:
    """What the train layer needs to know of one optimizer.

    Attributes:
        name: as in OptimizerConfig.name.
        defaults: the keys of a param group that the kernel reads, with torch.optim's defaults.
        refused: keys of a param group which have no exact kernel when they are true.
    """

    name: str
    defaults: Mapping[str, Any]
    refused: tuple[str, ...]
    _state_names: Callable[[Sequence[Group]], tuple[str, ...]]
    _row: Callable[[Group, int], tuple[float, ...]]
    _apply: Callable[..., None]

    def state_names(self, groups: Sequence[Group]) -> tuple[str, ...]:
        """The state arrays that these param groups need, by torch's names; each as long as the weights."""
        return self._state_names(groups)

    def check_group(self, group: Group, field: str = "optimizer") -> None:
        """Raises OverspillError OVS207 for an option that has no exact kernel."""
        for key in self.refused:
            if group.get(key):
                raise OverspillError(
                    "OVS207",
                    f"{self.name} with {key} has no exact kernel.",
                    field=f"{field}.{key}",
                    value=group[key],
                    next_step=f"Leave {key} off.",
                )

    def scalars_row(self, group: Group, step: int, grad_scale: float = 1.0) -> tuple[float, ...]:
        """The row of scalars for one parameter.

        Args:
            group: the parameter's param group; keys as in torch.optim, ``maximize`` included.
            step: updates of this parameter so far, this one included (1 for the first).
            grad_scale: what the gradient is multiplied by: unscale × clip factor.
        """
        assert step >= 1, "step counts this update"
        row = self._row(group, step)
        row += (0.0,) * (GRAD_SCALE_COLUMN - len(row))
        return (*row, -grad_scale if group.get("maximize") else grad_scale)

    def apply(
        self,
        *,
        weights: Array,
        grads: Array,
        master: Array | None,
        states: Mapping[str, Array],
        segments: Segments,
        scalars: Scalars,
        pool: _native.ThreadPool,
    ) -> None:
        """Update one chunk in place: 1-D slices of equal length of each class, one table row per parameter.

        The GIL is released meanwhile. See _native.pyi for dtypes, flags and errors.
        """
        self._apply(weights, grads, master, states, segments, scalars, pool)


def _adam_row(group: Group, step: int) -> tuple[float, ...]:
    beta1, beta2 = (float(beta) for beta in group["betas"])
    # In double, and with ** as torch has it, so that the constants are torch's to the bit.
    correction1 = 1 - beta1**step
    correction2 = 1 - beta2**step
    return (
        float(group["lr"]),
        beta1,
        beta2,
        float(group["eps"]),
        float(group["weight_decay"]),
        correction1,
        correction2**0.5,
    )


def _adam_apply(decoupled: bool) -> Callable[..., None]:
    def apply(
        weights: Array,
        grads: Array,
        master: Array | None,
        states: Mapping[str, Array],
        segments: Segments,
        scalars: Scalars,
        pool: _native.ThreadPool,
    ) -> None:
        m, v = states["exp_avg"], states["exp_avg_sq"]
        _native.adamw_(weights, grads, master, m, v, segments, scalars, pool, decoupled)

    return apply


def _sgd_row(group: Group, step: int) -> tuple[float, ...]:
    return (
        float(group["lr"]),
        float(group["momentum"]),
        float(group["dampening"]),
        float(group["weight_decay"]),
        float(bool(group["nesterov"])),
        float(step == 1),
    )


def _sgd_states(groups: Sequence[Group]) -> tuple[str, ...]:
    return ("momentum_buffer",) if any(group["momentum"] != 0 for group in groups) else ()


def _sgd_apply(
    weights: Array,
    grads: Array,
    master: Array | None,
    states: Mapping[str, Array],
    segments: Segments,
    scalars: Scalars,
    pool: _native.ThreadPool,
) -> None:
    _native.sgd_(weights, grads, master, states.get("momentum_buffer"), segments, scalars, pool)


def _lion_row(group: Group, step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    return float(group["lr"]), float(beta1), float(beta2), float(group["weight_decay"])


def _lion_apply(
    weights: Array,
    grads: Array,
    master: Array | None,
    states: Mapping[str, Array],
    segments: Segments,
    scalars: Scalars,
    pool: _native.ThreadPool,
) -> None:
    _native.lion_(weights, grads, master, states["exp_avg"], segments, scalars, pool)


def _adam(name: str, decoupled: bool, weight_decay: float) -> OptimizerKernel:
    return OptimizerKernel(
        name=name,
        defaults={"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": weight_decay, "maximize": False},
        refused=("amsgrad", "differentiable"),
        _state_names=lambda groups: ("exp_avg", "exp_avg_sq"),
        _row=_adam_row,
        _apply=_adam_apply(decoupled),
    )


KERNELS: Final[Mapping[str, OptimizerKernel]] = {
    "adamw": _adam("adamw", decoupled=True, weight_decay=1e-2),
    "adam": _adam("adam", decoupled=False, weight_decay=0.0),
    "sgd": OptimizerKernel(
        name="sgd",
        defaults={
            "lr": 1e-3,
            "momentum": 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
        },
        refused=("differentiable",),
        _state_names=_sgd_states,
        _row=_sgd_row,
        _apply=_sgd_apply,
    ),
    "lion": OptimizerKernel(
        name="lion",
        defaults={"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False},
        refused=("differentiable",),
        _state_names=lambda groups: ("exp_avg",),
        _row=_lion_row,
        _apply=_lion_apply,
    ),
}
"""By OptimizerConfig.name."""


def kernel_name_of(optimizer: torch.optim.Optimizer) -> str:
    """The kernel that computes what this torch.optim optimizer computes. Raises OverspillError OVS207 if there is none.

    By exact class: a subclass may compute something else. Adam with ``decoupled_weight_decay`` is AdamW.
    """
    import torch

    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = {bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}
        if len(decoupled) == 1:
            return "adamw" if decoupled.pop() else "adam"
        message = "Adam with decoupled_weight_decay in some param groups only has no kernel."
        raise OverspillError("OVS207", message, field="optimizer")
    if kind is torch.optim.SGD:
        return "sgd"
    raise OverspillError("OVS207", f"{kind.__name__} has no exact kernel here.", field="optimizer", value=kind.__name__)
