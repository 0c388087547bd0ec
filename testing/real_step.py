"""Training steps on real tensors, watched: what a trace of the same step is compared with.

Storages are followed as a trace follows them, but on real tensors, with real kernels and none of the trace's
interception. `profiled_peak_nbytes` counts malloc itself (torch's profiler) and knows nothing of storages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from overspill.forecast.events import Category, Event, peaks_by_phase
from overspill.trace.recorder import Recorder, Segment

__all__ = ["grouped", "phase_peaks", "profiled_peak_nbytes", "train"]


def train(
    model: Any,
    steps: Sequence[Sequence[tuple[int, int]]],
    *,
    device: str = "cpu",
    foreach: bool | None = None,
    max_grad_norm: float | None = 1.0,
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] | None = None,
    autocast: torch.dtype | None = None,
    attention_mask: bool = False,
    at: Callable[[str], None] = lambda _: None,
) -> None:
    """A plain loop: for each step its micro-batches as (sequences, seq_len). ``at`` is told each phase's name."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    chosen = optimizer(trained) if optimizer else torch.optim.AdamW(trained, lr=1e-4, foreach=foreach)
    vocabulary = model.config.vocab_size
    for micro_batches in steps:
        for sequences, seq_len in micro_batches:
            at("forward")
            ids = torch.randint(0, vocabulary, (sequences, seq_len)).to(device)
            batch = {"input_ids": ids, "labels": ids.clone()}
            if attention_mask:
                batch["attention_mask"] = torch.ones_like(ids)
            if autocast is None:
                loss = model(**batch).loss
            else:
                with torch.autocast(device, dtype=autocast):
                    loss = model(**batch).loss
            at("backward")
            loss.backward()
            del loss, batch, ids
        if max_grad_norm is not None:
            at("clip")
            torch.nn.utils.clip_grad_norm_(trained, max_grad_norm, foreach=foreach)
        at("step")
        chosen.step()
        at("zero_grad")
        chosen.zero_grad()


def phase_peaks(model: Any, steps: Sequence[Sequence[tuple[int, int]]], **options: Any) -> dict[str, int]:
    """The peak of each phase of `train` on the CPU, in bytes of storages, without rounding."""
    recorder = Recorder("cpu")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        recorder.adopt(tensor, Category.WEIGHTS, name)
    recorder.segment = Segment(1)

    def at(phase: str) -> None:
        recorder.phase = phase

    with recorder:
        train(model, steps, at=at, **options)
    events = [
        Event(r.kind, r.block, recorder.marks[r.block].nbytes, recorder.marks[r.block].category, r.phase)
        for r in recorder.at_start()
    ]
    return {peak.phase: peak.nbytes for peak in peaks_by_phase(events, 1)}


def grouped(peaks: Any) -> dict[str, int]:
    """A trace's phase points in the four phases of `train`."""
    found: dict[str, int] = {}
    for peak in peaks:
        name = peak.phase
        if "backward" in name:
            name = "backward"
        elif name.startswith("forward") or name == "loss":
            name = "forward"
        found[name] = max(found.get(name, 0), peak.nbytes)
    return found


def profiled_peak_nbytes(step: Callable[[], None]) -> int:
    """The most that ``step`` held of malloc's memory at once beyond what was there, as the profiler saw it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    current = highest = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            current += event.nbytes()
            highest = max(highest, current)
    return highest
