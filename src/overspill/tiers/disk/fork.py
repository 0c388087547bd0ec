"""A forked child must not touch the parent's store: its descriptors and its lock are closed there at once.

A DataLoader worker that outlives a killed owner would otherwise keep the run's lock, and a worker that wrote
would corrupt what the owner commits. The child's descriptors are copies, so closing them takes nothing away.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

__all__ = ["close_in_children"]


class Forkable(Protocol):
    """What a store shows to the fork handler; both are called without any lock, in a single-threaded child."""

    def fds(self) -> Iterable[int]: ...

    def mark_forked(self) -> None: ...


_stores: weakref.WeakSet[Forkable] = weakref.WeakSet()


def close_in_children(store: Forkable) -> None:
    """From now on a fork closes this store in the child."""
    _stores.add(store)


def _after_fork_in_child() -> None:
    for store in list(_stores):
        for fd in store.fds():
            with suppress(OSError):
                os.close(fd)
        store.mark_forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
