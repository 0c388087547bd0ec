"""TieredOptimizer: a torch.optim.Optimizer whose state lives where the plan puts it.

It *is* a torch optimizer: param groups with their own lr and weight decay, every LR scheduler, hooks, GradScaler,
``add_param_group`` and ``state_dict`` work as in torch. What a step does is the session's business; this class holds
the groups and hands over. Gradients are where torch leaves them, in ``p.grad``.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from overspill.errors import OverspillError
from overspill.job import OptimizerConfig
from overspill.optim.kernels import KERNELS, kernel_name_of

if TYPE_CHECKING:
    from overspill.train.session import Session

__all__ = ["TieredOptimizer", "groups_from_config", "groups_from_torch"]

Groups = list[dict[str, Any]]


class TieredOptimizer(torch.optim.Optimizer):
    """The optimizer of a session; made by attach(), not by hand.

    ``step()`` returns when all updates are done (``overlap = step``) or when they are under way (``forward``: each
    block is finished before a module that owns one of its parameters runs; ``session.flush()`` finishes all, and
    ``p.grad`` is None afterwards since the gradients are in use).
    """

    def __init__(self, groups: Groups, defaults: dict[str, Any], kind: str, session: Session) -> None:
        self._session = weakref.ref(session)
        self.kind = kind
        self._ready = False
        super().__init__(groups, {**KERNELS[kind].defaults, **defaults})
        self._ready = True

    @property
    def session(self) -> Session:
        session = self._session()
        if session is None:
            raise OverspillError("OVS501", "The session of this optimizer is gone; keep a reference to it.")
        return session

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One optimizer step over all parameters that have a gradient.

        Raises OverspillError: OVS501 after a failure, OVS502 for a gradient that is not finite under
        ``nonfinite = raise``, OVS403 and OVS404 from the disk.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.session.take_step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; parameters that are new to the session get state within the same budget.

        Raises OverspillError: OVS207 (an option without a kernel), OVS301 (budget), OVS504 (not of this model).
        """
        super().add_param_group(param_group)
        try:
            KERNELS[self.kind].check_group(self.param_groups[-1])
            if self._ready:
                self.session.adopt_group(self.param_groups[-1])
        except OverspillError:
            self.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """torch's structure. Tensors are read-only views of committed state, and take no memory of their own."""
        return self.session.optimizer_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load torch's structure. What this session committed itself is checked, not copied."""
        self.session.load_optimizer_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        raise OverspillError(
            "OVS504",
            "A tiered optimizer cannot be pickled or copied: its state is not in it.",
            next_step="Save optimizer.state_dict(), or use session.checkpoint().",
        )


def groups_from_config(
    config: OptimizerConfig, named: Iterable[tuple[str, nn.Parameter]]
) -> tuple[str, Groups, dict[str, Any]]:
    """Kind, groups and defaults: with and without weight decay by config.no_decay, kept even when one is empty."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name in ("adamw", "adam"):
        options |= {"betas": config.betas, "eps": config.eps}
    elif config.name == "lion":
        options |= {"betas": config.betas}
    else:
        options |= {"momentum": config.momentum, "dampening": config.dampening, "nesterov": config.nesterov}
    decay: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named:
        if parameter.requires_grad:
            matches = any(fnmatch.fnmatch(name, pattern) for pattern in config.no_decay)
            (plain if matches else decay).append(parameter)
    return (
        config.name,
        [
            {"params": decay, **options},
            {"params": plain, **options, "weight_decay": 0.0},
        ],
        options,
    )


def groups_from_torch(optimizer: torch.optim.Optimizer) -> tuple[str, Groups, dict[str, Any]]:
    """Kind, groups and defaults of a torch optimizer that has not stepped yet.

    Raises OverspillError OVS207 for an optimizer without a kernel here, or one that already has state.
    """
    kind = kernel_name_of(optimizer)
    if optimizer.state:
        raise OverspillError(
            "OVS207",
            "The optimizer has already stepped; its state would be lost.",
            field="optimizer",
            next_step="Attach before the first step, or load the state through session.optimizer.load_state_dict().",
        )
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_optimizer_state_dict_pre_hooks")
    if any(getattr(optimizer, name, None) for name in hooks):
        raise OverspillError(
            "OVS207",
            "Hooks are registered on the torch optimizer, which is not the one that will step.",
            field="optimizer",
            next_step="Register them on session.optimizer after attach().",
        )
    groups = [group | {"params": list(group["params"])} for group in optimizer.param_groups]
    return kind, groups, dict(optimizer.defaults)
