"""Hand-offs between an accelerator and the host pool. On a CPU-only machine none of this runs.

Each asynchronous copy is a value (buffer, event, device) with the invariant it protects; both directions have a
stream of their own, made once. All device code goes through torch.accelerator, torch.Stream and torch.Event.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["DeviceLink", "HandOff"]


class HandOff(NamedTuple):
    """``buffer`` (host memory) may be read, or written again, only after ``event`` has happened on ``device``."""

    buffer: torch.Tensor
    event: torch.Event
    device: torch.device


class DeviceLink:
    """Copies of gradients down and of weights up, block by block.

    Invariants: a block's update starts after its gradients have arrived (``wait_fetched``); its weights on the host
    are not written again before the copy that reads them is done (``wait_stored``); the compute stream does not read
    a block's weights on the device before they have arrived (``order_before_compute``).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._down = torch.Stream(device)
        self._up = torch.Stream(device)
        self._fetches: dict[int, list[HandOff]] = {}
        self._stores: dict[int, HandOff] = {}
        self.down_nbytes = 0
        self.up_nbytes = 0

    def begin(self) -> None:
        """What the compute stream has queued so far (the backward) comes before the copies down that follow."""
        self._down.wait_stream(torch.accelerator.current_stream(self.device))

    def fetch(self, host: torch.Tensor, on_device: torch.Tensor, block: int) -> None:
        """Start copying a gradient to the host."""
        with self._down:
            host.copy_(on_device, non_blocking=True)
            event = self._down.record_event()
        # The caching allocator must not hand the gradient's memory out again before the copy has read it.
        on_device.record_stream(self._down)
        self._fetches.setdefault(block, []).append(HandOff(host, event, self.device))
        self.down_nbytes += host.nbytes

    def wait_fetched(self, block: int) -> None:
        """The block's gradients are in host memory."""
        for hand_off in self._fetches.pop(block, ()):
            hand_off.event.synchronize()

    def wait_all_fetched(self) -> None:
        for block in list(self._fetches):
            self.wait_fetched(block)

    def store(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], block: int) -> None:
        """Start copying updated weights (host, on device) to the device."""
        with self._up, torch.no_grad():
            for host, on_device in pairs:
                on_device.copy_(host, non_blocking=True)
                self.up_nbytes += host.nbytes
            event = self._up.record_event()
        self._stores[block] = HandOff(pairs[0][0], event, self.device)

    def wait_stored(self, block: int) -> None:
        """The block's weights in host memory may be written again."""
        hand_off = self._stores.get(block)
        if hand_off is not None:
            hand_off.event.synchronize()

    def order_before_compute(self, block: int) -> None:
        """The compute stream's next work sees the block's new weights."""
        hand_off = self._stores.get(block)
        if hand_off is not None:
            torch.accelerator.current_stream(self.device).wait_event(hand_off.event)
