"""`trace_step`: the memory events of a real training step, of any model, without a byte of its memory.

The model is built on the meta device and its step is run: forwards, backwards, clipping, the optimizer, evaluation.
Deep models are shortened to a few periods of their layers and spliced back to full depth (trace/splice.py); the
optimizer runs for real on all parameters. docs/theory/trace.md says how, and how well it agrees with real runs.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from overspill.forecast.events import BlockMisuse, Category, Event, peaks_by_phase
from overspill.trace.attention import without_values
from overspill.trace.autocast import one_autocast_for_all_devices
from overspill.trace.interception import Interception, intercepting
from overspill.trace.layers import Follower, Layers, Repetition, find_layers, pruned, repetition
from overspill.trace.recorder import Mark, Recorder, for_each_tensor
from overspill.trace.result import Trace
from overspill.trace.rules import CUDA, AttentionKernel, DeviceRules
from overspill.trace.splice import Irregular, spliced

__all__ = ["Batch", "TensorSpec", "Trace", "TraceOptions", "language_batch", "trace_step"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one input."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.int64


Batch = Mapping[str, TensorSpec]


def language_batch(sequences: int, seq_len: int, *, attention_mask: bool = False) -> dict[str, TensorSpec]:
    """Inputs of a causal language model: ids and labels, and a 2-D mask if asked for, of (sequences, seq_len)."""
    names = ("input_ids", "labels", *(("attention_mask",) if attention_mask else ()))
    return {name: TensorSpec((sequences, seq_len)) for name in names}


def model_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that a Hugging Face model computes itself. Its logits are let go of before backward."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's AdamW as it is by default on the device (foreach where the rules say so)."""
    return torch.optim.AdamW(parameters, lr=1e-4)


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """How the step is run.

    ``optimizer``: makes an optimizer, or a footprint of one (trace/optimizers.py), from the trained parameters.
    ``autocast``: the dtype of mixed precision; None is none. ``outputs_fp32``: the model's 16-bit outputs are cast to
    fp32, as accelerate does under mixed precision. ``every_layer``: trace the whole depth, splice nothing.
    ``padded``: 2-D masks have zeros in them.
    ``evaluation``: batches of an evaluation at the end; ``accumulate_logits`` keeps their logits, as the Trainer does
    with ``compute_metrics``.
    """

    rules: DeviceRules = CUDA
    attention: AttentionKernel = AttentionKernel.SDPA
    optimizer: Callable[[list[nn.Parameter]], Any] = adamw
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor] = model_loss
    autocast: torch.dtype | None = None
    outputs_fp32: bool = False
    max_grad_norm: float | None = None
    zero_grad_to_none: bool = True
    evaluation: tuple[Batch, ...] = ()
    accumulate_logits: bool = False
    every_layer: bool = False
    padded: bool = False


def trace_step(
    build_model: Callable[[], nn.Module],
    steps: Sequence[Sequence[Batch]],
    options: TraceOptions | None = None,
) -> Trace:
    """Traces training steps of a model.

    Args:
        build_model: makes the model, with adapters, frozen parameters and checkpointing as it will be trained. It is
            called with meta as the default device.
        steps: for each optimizer step its micro-batches. Two steps at least show the state in the holes of the
            first; the longest batch may come wherever it will.
        options: how the step is run.
    """
    options = options or TraceOptions()
    with torch.device("meta"):
        model = build_model()
    model.train()
    layers = find_layers(model)
    repetitions = {} if options.every_layer else {found.name: repetition(found) for found in layers}
    notes: list[str] = []
    implementation = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if implementation == "eager" and options.attention is not AttentionKernel.EAGER:
        notes.append(f"the model computes attention itself (eager), not by {options.attention}")
    if any(r.copies for r in repetitions.values()):
        try:
            return _traced(model, steps, options, layers, repetitions, notes)
        except (Irregular, BlockMisuse, IndexError, KeyError) as why:  # the last two: a model that needs all its layers
            notes.append(f"every layer was traced: {why}")
            with torch.device("meta"):
                model = build_model()
            model.train()
            layers = find_layers(model)
    return _traced(model, steps, options, layers, {}, notes)


def _traced(
    model: nn.Module,
    steps: Sequence[Sequence[Batch]],
    options: TraceOptions,
    layers: tuple[Layers, ...],
    repetitions: dict[str, Repetition],
    notes: list[str],
) -> Trace:
    run = _Run(model, options, layers, repetitions)
    run.all_steps(steps)
    records, marks = run.recorder.at_start(), run.recorder.marks
    for number, found in enumerate(layers):
        if found.name in repetitions:
            records, marks = spliced(records, marks, number, found.name, repetitions[found.name])
    vocabulary = _vocabulary(model)
    events = tuple(
        Event(r.kind, r.block, m.nbytes, _category(m, vocabulary), r.phase, m.module)
        for r in records
        if (m := marks[r.block]).nbytes
    )
    return Trace(
        events=events,
        peaks=peaks_by_phase(events, options.rules.granule_nbytes),
        granule_nbytes=options.rules.granule_nbytes,
        repetitions=tuple(repetitions.items()),
        notes=tuple(notes),
    )


def _vocabulary(model: nn.Module) -> int | None:
    find: Any = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    weight = getattr(head, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) else None


def _category(mark: Mark, vocabulary: int | None) -> Category:
    if mark.width == vocabulary and mark.category in (Category.ACTIVATIONS, Category.TEMPORARIES):
        return Category.LOGITS
    return mark.category


class _Run:
    """One run of all steps on meta."""

    def __init__(
        self, model: nn.Module, options: TraceOptions, layers: tuple[Layers, ...], repetitions: dict[str, Repetition]
    ) -> None:
        self.model, self.options = model, options
        self.recorder = Recorder()
        self.parameters = dict(model.named_parameters())  # tied ones once, at full depth
        self.keep = {name: r.kept for name, r in repetitions.items() if r.copies}
        self.sources = _sources(self.parameters, repetitions)
        self.layers = layers
        self.workspaces: set[bool] = set()

    def all_steps(self, steps: Sequence[Sequence[Batch]]) -> None:
        options, recorder = self.options, self.recorder
        self._load()
        trained = [p for p in self.parameters.values() if p.requires_grad]
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()
        try:
            with ExitStack() as stack:
                stack.enter_context(pruned(self.model, self.keep))
                self.follower = Follower(self.model, self.layers, recorder)
                stack.enter_context(self.follower.following(self.model))
                running = Interception(options.rules, options.attention, on_product=self._product)
                stack.enter_context(one_autocast_for_all_devices(running.cache))
                stack.enter_context(_foreach_as_on_the_device(options.rules))
                stack.enter_context(without_values(padded=options.padded))
                stack.enter_context(intercepting(running))
                stack.enter_context(recorder)
                optimizer = options.optimizer(trained)
                for micro_batches in steps:
                    self._step(micro_batches, optimizer, trained)
                self._evaluate()
                del optimizer
        finally:
            if collecting:
                gc.enable()

    def _load(self) -> None:
        """Weights come one module after the other; one that is quantised on the device is there whole for a moment."""
        for prefix, module in self.model.named_modules():
            whole = getattr(module, "loaded_nbytes", 0)
            with self.recorder.while_loading(whole) if whole else nullcontext():
                own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
                for name, tensor in own:
                    self.recorder.adopt(tensor, Category.WEIGHTS, f"{prefix}.{name}" if prefix else name)

    def _product(self) -> None:
        """cuBLAS takes a workspace at a thread's first product."""
        rules = self.options.rules
        backward = self.follower.in_backward and rules.backward_has_own_workspace
        if rules.workspace_nbytes and backward not in self.workspaces:
            self.workspaces.add(backward)
            self.recorder.footprint(rules.workspace_nbytes, Category.WORKSPACE)

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        made = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in batch.items()}
        for tensor in made.values():
            self.recorder.mark(tensor, Category.INPUTS)
        return made

    def _autocast(self) -> Any:
        dtype = self.options.autocast
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with _outputs_fp32(self.model, self.options.outputs_fp32, self._autocast) as autocast, autocast():
            return self.options.loss(self.model, batch)

    def _step(self, micro_batches: Sequence[Batch], optimizer: Any, trained: list[nn.Parameter]) -> None:
        recorder, follower = self.recorder, self.follower
        for batch in micro_batches:
            first = recorder.next_block
            follower.begin("forward", backward=False)
            inputs = self._inputs(batch)
            loss = self._loss(inputs)
            for mark in recorder.alive_since(first):
                if mark.category is Category.TEMPORARIES:
                    mark.category = Category.ACTIVATIONS
            follower.begin("backward of the head", backward=True)
            loss.backward()  # type: ignore[no-untyped-call]
            follower.outside("after backward")
            for parameter in self.parameters.values():
                if parameter.grad is not None:
                    recorder.mark(parameter.grad, Category.GRADIENTS)
            del loss, inputs
        self._ghost_gradients()
        recorder.values_do_not_matter = True
        if self.options.max_grad_norm is not None:
            follower.outside("clip")
            torch.nn.utils.clip_grad_norm_(trained, self.options.max_grad_norm)
        follower.outside("step")
        optimizer.step()
        for state in optimizer.state.values():
            for_each_tensor(state, lambda tensor: recorder.mark(tensor, Category.OPTIMIZER))
        recorder.values_do_not_matter = False
        follower.outside("zero_grad")
        optimizer.zero_grad(set_to_none=self.options.zero_grad_to_none)

    def _ghost_gradients(self) -> None:
        """Parameters of layers that were left out get a gradient where their like has one; splicing accounts for it."""
        for name, source in self.sources.items():
            parameter, like = self.parameters[name], self.parameters[source]
            if parameter.grad is None and like.grad is not None:
                with torch.utils._python_dispatch._disable_current_modes():
                    parameter.grad = torch.empty_strided(
                        like.grad.shape, like.grad.stride(), dtype=like.grad.dtype, device="meta"
                    )
                self.recorder.ghost(parameter.grad)

    def _evaluate(self) -> None:
        options = self.options
        if not options.evaluation:
            return
        self.model.eval()
        kept: list[torch.Tensor] = []
        with torch.no_grad():
            for batch in options.evaluation:
                self.follower.begin("evaluation", backward=False)
                inputs = self._inputs(batch)
                with _outputs_fp32(self.model, options.outputs_fp32, self._autocast) as autocast, autocast():
                    output = self.model(**inputs)
                if options.accumulate_logits:
                    kept = [torch.cat([*kept, output.logits])]
                del output, inputs
        self.follower.outside("after evaluation")
        del kept
        self.model.train()


def _sources(parameters: dict[str, nn.Parameter], repetitions: dict[str, Repetition]) -> dict[str, str]:
    """For each parameter of a layer that is left out, the parameter of a traced layer of its kind."""
    found: dict[str, str] = {}
    for name in parameters:
        for listed, r in repetitions.items():
            if not r.copies or not name.startswith(listed + "."):
                continue
            layer, _, rest = name.removeprefix(listed + ".").partition(".")
            if int(layer) >= r.kept:
                like = r.first + 2 * r.period + (int(layer) - r.first) % r.period
                found[name] = f"{listed}.{like}.{rest}"
    return found


@contextmanager
def _outputs_fp32(model: nn.Module, on: bool, autocast: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """accelerate's way: autocast covers the model's forward alone, and its 16-bit outputs are then cast to fp32."""
    if not on:
        yield autocast
        return
    forward = model.forward

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        if isinstance(value, dict):
            for key, item in list(value.items()):
                value[key] = wide(item)
            return value
        return type(value)(wide(item) for item in value) if isinstance(value, list | tuple) else value

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            output = forward(*args, **kwargs)
        return wide(output)

    with mock.patch.object(model, "forward", wrapped):
        yield nullcontext


@contextmanager
def _foreach_as_on_the_device(rules: DeviceRules) -> Iterator[None]:
    """Optimizers and clipping choose foreach by the device's name; meta is not on their list, the device may be."""
    devices = torch.utils._foreach_utils._get_foreach_kernels_supported_devices() + (["meta"] if rules.foreach else [])
    with ExitStack() as stack:
        for module in (torch.utils._foreach_utils, importlib.import_module("torch.optim.optimizer")):
            stack.enter_context(mock.patch.object(module, "_get_foreach_kernels_supported_devices", lambda: devices))
        yield
