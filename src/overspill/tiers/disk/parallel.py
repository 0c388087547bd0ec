"""A few plain threads over a list. Not concurrent.futures: its pools refuse work once the interpreter is at its exit
handlers, which is when a session that was never closed commits its last step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

__all__ = ["for_each"]

T = TypeVar("T")


def for_each(function: Callable[[T], object], items: Iterable[T], *, threads: int, name: str) -> None:
    """Call ``function`` on every item, ``threads`` at a time. After an error none is begun any more; it is raised.

    The caller is one of the threads, so that a machine that has no thread to give only makes it slower.
    """
    waiting = iter(items)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        while True:
            with lock:
                item = next(waiting, None) if not errors else None
            if item is None:
                return
            try:
                function(item)
            except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
                with lock:
                    errors.append(error)

    workers: list[threading.Thread] = []
    for i in range(threads - 1):
        worker = threading.Thread(target=work, name=f"{name}-{i}")
        try:
            worker.start()
        except RuntimeError:  # "can't start new thread"
            break
        workers.append(worker)
    work()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
