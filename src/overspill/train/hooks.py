"""Pre-hooks: a block's update is finished before a module that owns one of its parameters runs, is saved or loaded.

A module waits for the parameters it owns itself, and for those of its children where they all belong to one block
(a module may use a child's weight without running the child, as nn.MultiheadAttention does with its projection).
A parameter that is used by no such module is found while the first step runs, and its block is then waited for
before the whole model: see ``HookSet.settle``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from overspill.errors import OverspillError

__all__ = ["HookSet"]


class HookSet:
    """The hooks of one model; removed by close().

    Args:
        block_by_id: block index by id of a trainable parameter.
        wait: ends a pending update of a block, and orders its weights before the device's next work.
    """

    def __init__(self, model: nn.Module, block_by_id: dict[int, int], wait: Callable[[int], None]) -> None:
        self._wait = wait
        self._owner_pid = os.getpid()
        self._block_by_id = block_by_id
        self._seen: set[int] = set()
        self._early: tuple[int, ...] = ()
        self._settled = False
        self.handles: list[torch.utils.hooks.RemovableHandle] = []
        for module in model.modules():
            own = _blocks(module.parameters(recurse=False), block_by_id)
            below = _blocks(module.parameters(), block_by_id)
            blocks = below if len(below) == 1 else own
            is_root = module is model
            if blocks or is_root:
                self.handles.append(
                    module.register_forward_pre_hook(self._make(module, tuple(sorted(blocks)), is_root))
                )
            if own:
                # state_dict() and load_state_dict() come to every module, so each answers for its own parameters.
                before = self._make_wait(tuple(sorted(own)))
                self.handles.append(module.register_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
                self.handles.append(module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]

    def _make(self, module: nn.Module, blocks: tuple[int, ...], is_root: bool) -> Callable[[nn.Module, Any], None]:
        covered = {id(p) for p in module.parameters(recurse=False)}
        if len(_blocks(module.parameters(), self._block_by_id)) == 1:
            covered |= {id(p) for p in module.parameters()}

        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            if is_root:
                if os.getpid() != self._owner_pid:
                    raise OverspillError("OVS503", "The model was run in a forked child, which has not its weights.")
                for block in self._early:
                    self._wait(block)
            if not self._settled:
                self._seen |= covered
            for block in blocks:
                self._wait(block)

        # torch.compile breaks its graph at the wait, instead of tracing threads and events.
        wait: Callable[[nn.Module, Any], None] = torch.compiler.disable(before_forward)  # type: ignore[no-untyped-call]
        return wait

    def _make_wait(self, blocks: tuple[int, ...]) -> Callable[..., None]:
        def before(*_: Any) -> None:
            for block in blocks:
                self._wait(block)

        return before

    def settle(self, with_gradient: Iterable[nn.Parameter]) -> None:
        """After the first backward: blocks of parameters that got a gradient though no hook covers them."""
        if self._settled:
            return
        uncovered = (p for p in with_gradient if id(p) not in self._seen)
        self._early = tuple(sorted({self._block_by_id[id(p)] for p in uncovered}))
        self._settled = True

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def _blocks(parameters: Iterable[nn.Parameter], block_by_id: dict[int, int]) -> set[int]:
    return {block_by_id[id(p)] for p in parameters if id(p) in block_by_id}
