"""A step's allocations in order, for the allocator's replay: what it will hold (reserved) against what is alive.

The same step as the closed form's (phases.py), layer for layer, on one tape with its log on: weights as they rest,
every layer's forward, the loss, recomputation and backward, gradients as they arrive, the optimizer. Two steps, since
optimizer state is born in the holes that the first backward leaves. Units of sharded state: stream_units.py. The
replay: forecast/allocator.py; what is made of it: overhead.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from overspill.forecast.device.ends import early_runs
from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units
from overspill.forecast.device.stream_state import Pieces, state_itemsize, unit_pieces
from overspill.forecast.device.stream_units import Exchange
from overspill.forecast.device.zero import backward_buffers_nbytes, resting_buffers_nbytes, step_nbytes
from overspill.forecast.events import Event
from overspill.forecast.layers import head as heads
from overspill.forecast.layers.figures import layer_figures, run_layer
from overspill.forecast.layers.litgpt_head import run_litgpt_head
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Category, Memory, Node, Selection, Tape, Tensor
from overspill.model.facts import LayerKind, ModelFacts
from overspill.units import MiB

__all__ = ["LOADING", "step_events"]

_INT64 = 8
_LARGE_NBYTES = MiB
#: The phase of what happens before the first step.
LOADING = "load"
#: torch/nn/parallel/distributed.py, bucket_cap_mb
_DDP_BUCKET_NBYTES = 25 * MiB
#: Layers that the host is ahead of the device ([Note: Recorded]): as many as FSDP1's limiter lets it be
#: (torch/distributed/fsdp/_limiter_utils.py); nothing limits it elsewhere.
_AHEAD = 2


@dataclass
class _Ran:
    """One layer between its forward and its backward. kept: of a layer that is not run."""

    boundary: Tensor | None = None
    out: Tensor | None = None
    selection: Selection | None = None
    kept: Tensor | None = None


@dataclass
class _Pass:
    """One micro-batch between its forward and its backward. last: the output of the last layer."""

    inputs: Tensor
    root: list[Tensor]
    ran: list[_Ran] = field(default_factory=list)
    last: list[Tensor] = field(default_factory=list)


class _Stream:
    """One rank's step, written down."""

    def __init__(
        self, facts: ModelFacts, units: Units, resolved: Resolved, run_of: Callable[[LayerKind], Run], runs: int,
        stage: int, *, recorded: bool,
    ) -> None:  # fmt: skip
        self.facts, self.units, self.resolved, self.run_of = facts, units, resolved, run_of
        self.memory = Memory()
        self.memory.log = []
        self.tape = Tape(self.memory)
        self.exchange = Exchange(self.tape, units, resolved)
        self.last_stage = stage == resolved.pipeline - 1
        self.flight = max(0, resolved.microbatches_in_flight - stage - 1)
        by_position = sorted(
            (position, index)
            for index, (kind, count, _) in enumerate(units.layers)
            for position in (kind.positions[-count:] if stage else kind.positions[:count])
        )
        own = [unit_pieces(unit, kind, resolved) for kind, _, unit in units.layers]
        self.layers = [(position, units.layers[index][0], own[index]) for position, index in by_position]
        self.early = early_runs(resolved, [(kind, run_of(kind)) for kind, _, _ in units.layers]) if not stage else {}
        self.embedding, self.head, self.rest = (
            unit_pieces(unit, None, resolved) for unit in (units.embedding, units.head, units.root)
        )
        self.resting: list[Tensor] = []
        self.state: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self.arrived: list[Tensor] = []
        self.held: list[Tensor] = []
        self.kept_nbytes: dict[str, int] = {}
        self.accumulates = False
        #: Blocks of collectives, by the layer that they were used in, that NCCL's stream is recorded on.
        self.crossed: deque[list[int]] = deque([[]])
        if recorded:
            self.tape.on_collective = self._crosses
        every = resolved.checkpoint_every
        self.checkpointed = [
            resolved.checkpointing != "none" and number % every == 0 for number in range(len(self.layers))
        ]
        #: Layers that one run of a layer stands for: the others only keep what they keep.
        self.group = max(1, -(-len(self.layers) // runs))

    def run(self, steps: int) -> list[Event]:
        self._load()
        log = self.memory.log
        assert log is not None
        loaded = len(log)
        for step in range(steps):
            self._step(first=step == 0)
        large = {event.block for event in log if event.nbytes >= _LARGE_NBYTES}
        return [
            event._replace(phase=LOADING) if index < loaded else event
            for index, event in enumerate(log)
            if event.block in large
        ]

    # ---- what rests ----

    def _all_pieces(self) -> list[Pieces]:
        """In the order of the model's parameters, which is the optimizer's."""
        return [self.embedding, *(pieces for _, _, pieces in self.layers), self.rest, self.head]

    def _load(self) -> None:
        resolved, tape, sharding = self.resolved, self.tape, self.resolved.sharding
        self.resting.append(tape.scratch(resolved.workspace_nbytes // 2))
        share = 1 / sharding.ranks if sharding.splits_weights else 1.0
        if not resolved.weights_on_host:
            if sharding.kind in ("zero1", "zero2") or resolved.gradients_at_rest:
                self._load_joined(share)
            else:
                for pieces in self._all_pieces():
                    self.resting += self._weights(pieces, share)
        if resolved.optimizer.master and resolved.optimizer.on_device:
            self._masters()
        buffers = resting_buffers_nbytes(self.units, resolved)
        while buffers > 0:
            one = min(buffers, _DDP_BUCKET_NBYTES) if sharding.kind == "ddp" else buffers
            self.resting.append(tape.scratch(one))
            buffers -= one

    def _weights(self, pieces: Pieces, share: float) -> list[Tensor]:
        """FSDP1 joins a unit's parameters into one; the others leave each by itself."""
        of_expert = 1 / self.resolved.expert_ranks if self.resolved.sharding.splits_weights else share
        sizes = [nbytes * (of_expert if is_expert else share) for _, nbytes, is_expert in pieces.weights]
        if self.resolved.sharding.kind == "fsdp1" and share < 1:
            sizes = [sum(sizes)]
        return [self.tape.scratch(int(nbytes)) for nbytes in sizes if nbytes >= 1]

    def _load_joined(self, share: float) -> None:
        """The parameters are made one by one and then moved into one buffer (Megatron's _ParamAndGradBuffer, ZeRO's
        flatten_dense_tensors_aligned); gradients that rest are a buffer of the same kind."""
        resolved, tape = self.resolved, self.tape
        single = [block for pieces in self._all_pieces() for block in self._weights(pieces, share)]
        for expert in (False, True):
            numel = sum(
                count
                for pieces in self._all_pieces()
                for count, of_expert in zip(pieces.trained, pieces.expert, strict=True)
                if of_expert == expert
            )
            if numel and resolved.optimizer.on_device:
                self.resting.append(tape.scratch(round(numel * resolved.trained_itemsize * share)))
            if numel and resolved.gradients_at_rest:
                self.resting.append(tape.scratch(round(numel * resolved.gradient_itemsize * self._rested_share())))
        frozen = sum(pieces.unit.frozen_numel * resolved.frozen_itemsize for pieces in self._all_pieces())
        frozen += sum(pieces.unit.quantised_nbytes for pieces in self._all_pieces())
        if frozen:
            self.resting.append(tape.scratch(round(frozen * share)))
        single.clear()

    def _masters(self) -> None:
        """fp32 copies are made with the optimizer, before the first step; its moments in the first."""
        for _, shares in self._updated():
            self.state += [self.tape.scratch(round(numel * self.resolved.optimizer.master)) for numel in shares]

    def _rested_share(self) -> float:
        sharding = self.resolved.sharding
        return 1 / sharding.ranks if sharding.splits_gradients else 1.0

    # ---- a step ----

    def _step(self, *, first: bool) -> None:
        """Micro-batches: those in flight, and two more where there are so many, since the second adds to gradients."""
        resolved = self.resolved
        count = max(1, min(resolved.accumulation, self.flight + 2))
        waiting: list[_Pass] = []
        for number in range(count):
            waiting.append(self._forward())
            if len(waiting) > self.flight or number == count - 1:
                self._backward(waiting.pop(0), first=first)
        while waiting:
            self._backward(waiting.pop(0), first=first)
        self.exchange.finish()
        self.crossed.append([])
        for layer in self.crossed:
            for block in layer:
                self.memory.completed(block)
        self.crossed = deque([[]])
        self._update(first=first)
        self.gradients.clear()
        self.accumulates = False

    def _run(self, number: int) -> Run:
        position, kind, _ = self.layers[number]
        run = self.early[position][1] if position in self.early else self.run_of(kind)
        return replace(run, keeps_grads=self._keeps())

    def _keeps(self) -> bool:
        """Whether a layer's gradients stay until somebody takes them: until the unit's reduction, or the step."""
        resolved, sharding = self.resolved, self.resolved.sharding
        if resolved.update_in_backward or resolved.gradients_at_rest:
            return False
        if sharding.kind in ("fsdp1", "fsdp2") and sharding.ranks > 1:
            return True
        if sharding.splits_gradients or resolved.gradients_on_host:
            return False
        return not self.accumulates

    def _crosses(self, tensor: Tensor) -> None:
        """[Note: Recorded] An asynchronous collective records its tensors on NCCL's stream (ProcessGroupNCCL.cpp,
        before torch 2.8): let go, they are free when the device gets there, which the host is layers ahead of."""
        if tensor.storage is not None:
            self.memory.recorded.add(tensor.storage.block)
            self.crossed[-1].append(tensor.storage.block)

    def _next_layer(self) -> None:
        self.crossed.append([])
        while len(self.crossed) > _AHEAD:
            for block in self.crossed.popleft():
                self.memory.completed(block)

    def _as_leaf(self, x: Tensor, *, needs: bool = True) -> Tensor:
        leaf = Tensor(x.storage, x.numel, x.itemsize, requires_grad=needs)
        if needs:
            leaf.node = Node(self.tape.next_number(), (), (), self._sink)
        return leaf

    def _sink(self, tape: Tape, grad: Tensor) -> tuple[()]:
        self.arrived.append(Tensor(grad.storage, grad.numel, grad.itemsize))
        return ()

    def _outer(self, *parts: Pieces) -> tuple[Unit, tuple[Pieces, ...]]:
        """The unit that holds ``parts``, which stand outside the layers."""
        found = parts if self.resolved.sharding.wrap_embeddings else (self.embedding, self.rest, self.head)
        if self.resolved.sharding.whole_model_unit:
            found = tuple(self._all_pieces())
        units = [one.unit for one in found]
        whole = Unit(
            "+".join(unit.name for unit in units) if len(units) < 4 else "model",
            sum(unit.trained_numel for unit in units), sum(unit.frozen_numel for unit in units),
            sum(unit.adapter_numel for unit in units), sum(unit.quantised_nbytes for unit in units), 0, 0,
        )  # fmt: skip
        return whole, found

    @property
    def _root_stays(self) -> bool:
        """What is outside the layers is one unit, gathered through the whole step."""
        sharding = self.resolved.sharding
        return sharding.splits_weights and sharding.kind != "zero3" and not sharding.wrap_embeddings

    def _gather_layer(self, number: int, *, forward: bool) -> list[Tensor]:
        if self.resolved.sharding.whole_model_unit:
            return []
        _, _, pieces = self.layers[number]
        unit = replace(pieces.unit, name=f"layer {number}")
        following = None
        if not forward and number:
            following = replace(self.layers[number - 1][2].unit, name=f"layer {number - 1}")
        return self.exchange.gather(unit, (pieces,), forward=forward, following=following)

    def _forward(self) -> _Pass:
        tape, resolved, facts = self.tape, self.resolved, self.facts
        whole, parts = self._outer(self.embedding)
        root = self.exchange.gather(whole, parts, forward=True)
        made = _Pass(tape.scratch(4 * _INT64 * resolved.tokens), root if self._root_stays else [])
        rows = resolved.tokens // (resolved.tensor if resolved.sequence_parallel else 1)
        h = tape.new(rows * facts.hidden, self.run_of(self.layers[0][1]).style.residual)
        if not self._root_stays:
            self.exchange.let_go(root)
        for number, (_, kind, _) in enumerate(self.layers):
            if number % self.group:
                made.ran.append(self._kept_copy(number, kind, h))
                continue
            run = self._run(number)
            gathered = self._gather_layer(number, forward=True)
            selection = Selection() if self.checkpointed[number] and resolved.checkpointing == "selective_op" else None
            source = self._as_leaf(h, needs=run.input_needs_grad)
            tape.grad_enabled, tape.selection = not self.checkpointed[number], selection
            out = run_layer(tape, kind, source, run)
            tape.grad_enabled, tape.selection = True, None
            if selection is not None and resolved.style.compiled:
                selection.drop_last()
            del source
            if self.checkpointed[number]:
                boundary = h if not resolved.offloads_boundaries else Tensor(None, h.numel, h.itemsize)
                made.ran.append(_Ran(boundary=boundary, selection=selection))
                del boundary
            else:
                made.ran.append(_Ran(out=Tensor(None, out.numel, out.itemsize, node=out.node)))
            h = Tensor(out.storage, out.numel, out.itemsize)
            del out
            self._next_layer()
            if resolved.sharding.reshard_after_forward or resolved.sharding.kind == "zero3":
                self.exchange.let_go(gathered)
            else:
                made.root += gathered
        made.last.append(h)
        return made

    def _kept_copy(self, number: int, kind: LayerKind, boundary: Tensor) -> _Ran:
        """What a layer that is not run keeps, as one block."""
        if self.checkpointed[number] and self.resolved.checkpointing != "selective_op":
            return _Ran(kept=self.tape.scratch(0 if self.resolved.offloads_boundaries else boundary.nbytes))
        key = kind.name
        if key not in self.kept_nbytes:
            figures = layer_figures(kind, self._run(number))
            self.kept_nbytes[key] = figures.selected_nbytes if self.checkpointed[number] else figures.kept_nbytes
        return _Ran(kept=self.tape.scratch(self.kept_nbytes[key]))

    def _backward(self, one: _Pass, *, first: bool) -> None:
        resolved, tape, sharding = self.resolved, self.tape, self.resolved.sharding
        if first and len(self.resting) and not self.accumulates:
            self.resting.append(tape.scratch(resolved.workspace_nbytes // 2))  # the backward's thread has its own
        buffers = self._buckets()
        grads = [self._of_output(one)]
        waiting = list(tape.gradients)  # of the head
        tape.gradients.clear()
        tied = None
        if not self.units.head.numel and self.units.embedding.trained_numel and self.last_stage:
            tied = tape.new(self.units.embedding.trained_numel, resolved.style.compute, Category.GRADIENTS)
        if sharding.wrap_embeddings or not self._reduces():
            self._take((self.rest, self.head), waiting)
        retained: list[Tensor] = []
        for number in reversed(range(len(self.layers))):
            ran = one.ran.pop()
            if ran.kept is not None:
                self._skip(number, ran, retained)
                continue
            gathered = self._gather_layer(number, forward=False)
            self._through(number, ran, grads, retained)
            self._next_layer()
            self.exchange.let_go(gathered)
            own = list(tape.gradients)
            tape.gradients.clear()
            self._take((self.layers[number][2],), own)
        if self.units.embedding.trained_numel:
            dense = [tape.new(self.units.embedding.trained_numel, resolved.style.compute, Category.GRADIENTS)]
            if tied is not None and resolved.loss != "chunked":
                dense = [tape.new(self.units.embedding.trained_numel, resolved.style.compute, Category.GRADIENTS)]
            tied = None
            if self._keeps() or self._reduces():
                waiting += dense
            dense.clear()
        grads.clear()
        if self._root_stays:
            self.exchange.let_go(one.root)
        self._take((self.embedding,) if sharding.wrap_embeddings else (self.embedding, self.rest, self.head), waiting)
        retained.clear()
        buffers.clear()
        self.held.clear()
        tape.outliving.clear()
        self.accumulates = True

    def _reduces(self) -> bool:
        return self.resolved.sharding.kind in ("fsdp1", "fsdp2", "zero2", "zero3") and self.resolved.sharding.ranks > 1

    def _buckets(self) -> list[Tensor]:
        nbytes = backward_buffers_nbytes(self.units, self.resolved)
        count = 2 if self.resolved.sharding.overlap_comm and self.resolved.sharding.kind != "zero3" else 1
        return [self.tape.scratch(nbytes // count) for _ in range(count) if nbytes]

    def _take(self, pieces: tuple[Pieces, ...], grads: list[Tensor]) -> None:
        """Who gets a unit's gradients: a reduction, or nobody until the step."""
        sharding = self.resolved.sharding
        if self.resolved.update_in_backward:
            grads.clear()
        elif self._reduces() and not (sharding.accumulates_whole and self.resolved.accumulation > 1):
            shards = self.exchange.reduce(pieces, grads)
            if not self.accumulates and not self.resolved.gradients_on_host:
                self.gradients += shards
        elif not self.accumulates:
            self.gradients += grads
        grads.clear()

    def _skip(self, number: int, ran: _Ran, retained: list[Tensor]) -> None:
        """A layer that is not run: its gradients arrive, what it kept goes."""
        kept, ran.kept = ran.kept, None
        if self.resolved.sharding.retains_inputs and kept is not None:
            retained += [kept, self.tape.scratch(kept.nbytes)]
        del kept
        pieces = self.layers[number][2]
        own: list[Tensor] = []
        if self._keeps() and not self._reduces():
            own = [self.tape.new(numel, self.resolved.gradient_itemsize) for numel in pieces.trained]
        self._take((pieces,), own)

    def _through(self, number: int, ran: _Ran, grads: list[Tensor], retained: list[Tensor]) -> None:
        """A layer's backward, its recomputation first; ``grads`` holds the gradient of its output, then of its
        input."""
        tape, resolved = self.tape, self.resolved
        run, kind = self._run(number), self.layers[number][1]
        boundary, out = ran.boundary, ran.out
        ran.boundary = ran.out = None
        if boundary is not None:
            if boundary.storage is None:
                boundary = tape.new(boundary.numel, boundary.itemsize)
            if ran.selection is not None:
                ran.selection.again()
            tape.selection = ran.selection
            out = run_layer(tape, kind, self._as_leaf(boundary, needs=run.input_needs_grad), run)
            tape.selection = ran.selection = None
            if not resolved.reentrant:
                out = Tensor(None, out.numel, out.itemsize, node=out.node)
        assert out is not None
        self.arrived.clear()
        if out.node is not None:
            held = grads[0] if resolved.reentrant else None  # torch.autograd.backward's arguments
            tape.backward(out, grads.pop())
            del held
        del out
        if self.arrived:
            grads[:] = [self.arrived.pop()]
        elif not grads:
            grads.append(tape.new(1, 1))
        if resolved.sharding.retains_inputs:
            if boundary is not None:
                retained.append(boundary)
            retained.append(Tensor(grads[0].storage, grads[0].numel, grads[0].itemsize))

    # ---- the end of the model ----

    def _of_output(self, one: _Pass) -> Tensor:
        """Forward's end and the loss's backward; the gradient of the last layer's output."""
        tape, facts = self.tape, self.facts
        h = one.last.pop()
        shape = Tensor(None, h.numel, h.itemsize)
        if facts.head is None or not self.last_stage:
            del h
            return tape.new(shape.numel, shape.itemsize, Category.TEMPORARIES)
        whole, parts = self._outer(self.rest, self.head)
        gathered = [] if self._root_stays else self.exchange.gather(whole, parts, forward=True)
        box = [self._as_leaf(h)]
        del h
        loss = self._loss(box)
        self.arrived.clear()
        if loss.node is not None:
            tape.backward(loss, tape.new(1, 4))
        del loss
        if not self._root_stays:
            self.exchange.let_go(gathered)
        if self.arrived:
            return self.arrived.pop()
        return tape.new(shape.numel, shape.itemsize, Category.TEMPORARIES)

    def _loss(self, box: list[Tensor]) -> Tensor:
        """The loss; what its caller goes on holding is in `held` until the backward is done."""
        resolved, facts = self.resolved, self.facts
        run = replace(self.run_of(self.layers[-1][1]), keeps_grads=self._keeps())
        softcap = facts.logits_softcap is not None
        if resolved.style.code == "litgpt":
            if resolved.sharding.flat_gradients and not self.units.head.trained_numel + self.units.head.adapter_numel:
                run = replace(run, trained=lambda name: False)
            loss, logits, _ = run_litgpt_head(
                self.tape, run, box, hidden=facts.hidden, vocab=facts.vocab, final_norm=facts.text.final_norm,
                softcap=softcap,
            )  # fmt: skip
            self.held += logits
            return loss
        loss, held = heads.run_head(
            self.tape, run, box, code=resolved.loss, shift=resolved.logits, hidden=facts.hidden, vocab=facts.vocab,
            final_norm=facts.text.final_norm, softcap=softcap, scaled=facts.logits_scaled,
            converts_outputs=resolved.converts_outputs, chunks=resolved.loss_chunks,
            vocab_split=resolved.tensor if resolved.loss_parallel else 1, holds=resolved.caller_holds_logits,
            compiled=resolved.compiled_loss,
        )  # fmt: skip
        if resolved.caller_holds_logits and held is not None:
            self.held.append(Tensor(held.storage, held.numel, held.itemsize))
        return loss

    # ---- the optimizer ----

    def _shares(self, pieces: Pieces) -> list[float]:
        """Elements of each trained tensor that this rank updates."""
        if not self.resolved.sharding.splits_optimizer:
            return [float(numel) for numel in pieces.trained]
        return pieces.shards(self.resolved)

    def _updated(self) -> list[tuple[Pieces, list[float]]]:
        """ZeRO updates one partition of all. FSDP1 keeps the parameters as views of a unit's flat one (use_orig_params,
        the default of `accelerate launch` and Fabric): a rank has the first ones whole until its share is full."""
        kind = self.resolved.sharding.kind
        found = [(pieces, self._shares(pieces)) for pieces in self._all_pieces() if pieces.trained]
        if kind == "fsdp1" and self.resolved.sharding.ranks > 1:
            return [(pieces, _first(pieces.trained, sum(shares))) for pieces, shares in found]
        if kind.startswith("zero") and found:
            return [(found[0][0], [sum(sum(shares) for _, shares in found)])]
        return found

    def _update(self, *, first: bool) -> None:
        resolved, tape, optimizer = self.resolved, self.tape, self.resolved.optimizer
        if not optimizer.on_device:
            return
        updated = self._updated()
        copies: list[Tensor] = []
        share = 1 / resolved.sharding.ranks if resolved.sharding.splits_optimizer else 1.0
        if copied := step_nbytes(self.units, resolved, share):
            copies = [tape.scratch(round(copied * part)) for part in (2 / 3, 1 / 3)]
        if first:
            for pieces, shares in updated:
                each = state_itemsize(pieces.unit, resolved) - optimizer.master
                count = max(1, round(each / 4)) if each > 4 else 2 if each else 0
                self.state += [tape.scratch(round(numel * each / count)) for numel in shares for _ in range(count)]
        if resolved.update_in_backward:
            return
        temporaries = [
            tape.scratch(round(numel * optimizer.step)) for _, shares in updated for numel in shares if optimizer.step
        ]
        if optimizer.step_largest:
            largest = max((numel for _, shares in updated for numel in shares), default=0)
            temporaries.append(tape.scratch(round(largest * optimizer.step_largest)))
        temporaries.clear()
        copies.clear()


def _first(numels: tuple[int, ...], room: float) -> list[float]:
    """The elements of the first tensors, until ``room`` is full."""
    found = []
    for numel in numels:
        if room <= 0:
            break
        found.append(min(float(numel), room))
        room -= numel
    return found


def step_events(
    facts: ModelFacts,
    units: Units,
    resolved: Resolved,
    run_of: Callable[[LayerKind], Run],
    *,
    stage: int = 0,
    steps: int = 2,
    runs: int = 40,
    recorded: bool = False,
) -> list[Event]:
    """The events of ``steps`` steps from a fresh process on. runs: layers that are run; the others only keep theirs.
    stage: of the pipeline. recorded: tensors of asynchronous collectives are held back ([Note: Recorded]).

    Blocks below 1 MiB are left out: they have a pool of their own, of 2 MiB segments, that no large block waits for.
    """
    return _Stream(facts, units, resolved, run_of, runs, stage, recorded=recorded).run(steps)
