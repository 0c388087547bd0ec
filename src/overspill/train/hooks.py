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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from overspill.errors import OverspillError

__all__ = ["HookSet"]


class HookSet:
    """The hooks of one model; removed by close().

    Args:
        block_by_id: block index by id of a trainable parameter.
        wait: ends a pending update of a block, and orders its weights before the device's next work.
    """

    def __init__(
        self,
        model: nn.Module,
        block_by_id: dict[int, int],
        *,
        wait: Callable[[int], None],
        flush: Callable[[], None],
        before: HookSet | None = None,
    ) -> None:
        self._wait = wait
        self._owner_pid = os.getpid()
        self._block_by_id = block_by_id
        # What a set that this one replaces has learnt stays true: blocks keep their indices.
        self._seen: set[int] = before._seen if before is not None else set()
        self._uncovered: set[int] = before._uncovered if before is not None else set()
        self._early: tuple[int, ...] = before._early if before is not None else ()
        self._settled = False
        self._forwards = 0
        self._uses: _FirstUses | None = None
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
                # Before weights are overwritten, what is being written of them has to be on disk as well.
                read = self._make_wait(tuple(sorted(own)))
                self.handles.append(module.register_state_dict_pre_hook(read))  # type: ignore[no-untyped-call]
                self.handles.append(module.register_load_state_dict_pre_hook(lambda *_: flush()))  # type: ignore[no-untyped-call]
        self.handles.append(model.register_forward_hook(lambda *_: self._after_root(), always_call=True))

    def _make(self, module: nn.Module, blocks: tuple[int, ...], is_root: bool) -> Callable[[nn.Module, Any], None]:
        covered = {id(p) for p in module.parameters(recurse=False)}
        if len(_blocks(module.parameters(), self._block_by_id)) == 1:
            covered |= {id(p) for p in module.parameters()}

        def before_forward(_module: nn.Module, _inputs: Any) -> None:
            if os.getpid() != self._owner_pid:
                raise OverspillError("OVS503", "The model was run in a forked child, which has not its weights.")
            if is_root:
                for block in self._early:
                    self._wait(block)
                self._forwards += 1
                if not self._settled and self._uses is None:
                    self._uses = _FirstUses(self._block_by_id, self._seen, self._uncovered)
                    self._uses.__enter__()  # type: ignore[no-untyped-call]
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
        if self._settled or self._forwards == 0:
            return  # nothing to learn any more, or yet: this set was made after the forward
        self._uncovered |= {id(p) for p in with_gradient if id(p) not in self._seen}
        self._early = tuple(sorted({self._block_by_id[key] for key in self._uncovered if key in self._block_by_id}))
        self._settled = True

    @property
    def early(self) -> tuple[int, ...]:
        return self._early

    def _after_root(self) -> None:
        if self._uses is not None:
            self._uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._uses = None

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class _FirstUses(TorchFunctionMode):
    """Notes parameters that some torch function takes before the module that owns them has run."""

    def __init__(self, block_by_id: dict[int, int], seen: set[int], uncovered: set[int]) -> None:
        super().__init__()
        self._block_by_id, self._seen, self._uncovered = block_by_id, seen, uncovered

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _READS_NO_VALUES:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, nn.Parameter) and id(value) in self._block_by_id and id(value) not in self._seen:
                    self._uncovered.add(id(value))
        return func(*args, **(kwargs or {}))


#: Attributes (``weight.dtype``) and methods that look at a parameter and not at its values.
_READS_NO_VALUES = frozenset(
    (
        "__get__",
        "size",
        "dim",
        "numel",
        "nelement",
        "element_size",
        "stride",
        "is_floating_point",
        "is_contiguous",
        "__len__",
    )
)


def _blocks(parameters: Iterable[nn.Parameter], block_by_id: dict[int, int]) -> set[int]:
    return {block_by_id[id(p)] for p in parameters if id(p) in block_by_id}
