"""A step's allocations in order, for the allocator's replay: what it will hold (reserved) against what is alive.

The whole step runs on one tape with its log on: weights as they rest, every layer's forward, the loss, every layer's
recomputation and backward, the optimizer. Two steps, since optimizer state is born in the holes that the first backward
leaves. Without checkpointing the layers' graphs are kept until backward. The replay: forecast/allocator.py.
"""

from __future__ import annotations

from collections.abc import Callable

from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units
from overspill.forecast.events import Event, Kind
from overspill.forecast.layers import head as heads
from overspill.forecast.layers.figures import layer_figures, run_layer
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Category, Memory, Node, Tape, Tensor
from overspill.model.facts import LayerKind, ModelFacts

__all__ = ["step_events"]

_INT64 = 8
_LARGE_NBYTES = 2**20
#: The tensors that a layer's weights, and its optimizer state, are laid out in: a typical decoder layer has so many
#: matrices. It decides into how many segments they fall, and so the rounding.
_MATRICES = 7


def _tensors_of(unit: Unit) -> list[int]:
    """Elements of each tensor that the optimizer has state for; vectors, and adapters, as equal parts."""
    matrices = [rows * columns for rows, columns in unit.matrices]
    rest = unit.trained_numel + unit.adapter_numel - sum(matrices)
    return matrices + [rest // _MATRICES] * (_MATRICES if rest >= _MATRICES else 0)


class _Stream:
    """One rank's step, written down."""

    def __init__(
        self, facts: ModelFacts, units: Units, resolved: Resolved, run_of: Callable[[LayerKind], Run], runs: int
    ) -> None:
        self.facts, self.units, self.resolved, self.run_of = facts, units, resolved, run_of
        self.memory = Memory()
        self.memory.log = []
        self.tape = Tape(self.memory)
        self.layers = [(kind, unit) for kind, count, unit in units.layers for _ in range(count)]
        sharding = resolved.sharding
        self.weight_share = 1 / sharding.ranks if sharding.splits_weights else 1.0
        self.state_share = 1 / sharding.ranks if sharding.splits_optimizer else 1.0
        self.kept: list[Tensor] = []
        self.state: list[Tensor] = []
        self.arrived: list[Tensor] = []
        self.kept_nbytes: dict[str, int] = {}
        every = resolved.checkpoint_every
        self.checkpointed = [
            resolved.checkpointing != "none" and number % every == 0 for number in range(len(self.layers))
        ]
        #: Layers that one run of a layer stands for: the others only keep what they keep.
        self.group = max(1, -(-len(self.layers) // runs))

    def run(self, steps: int) -> list[Event]:
        self._load()
        for step in range(steps):
            self._step(first=step == 0)
        log = self.memory.log
        assert log is not None
        large = {block for block, nbytes in log if nbytes >= _LARGE_NBYTES}
        return [Event(Kind.MALLOC if nbytes else Kind.FREE, block, nbytes) for block, nbytes in log if block in large]

    def _load(self) -> None:
        resolved, tape = self.resolved, self.tape
        self.kept.append(tape.scratch(resolved.workspace_nbytes // 2))
        if resolved.weights_on_host:
            return
        for _, unit in self.layers:
            nbytes = (
                unit.frozen_numel * resolved.frozen_itemsize
                + unit.trained_numel * resolved.trained_itemsize
                + unit.quantised_nbytes
            ) * self.weight_share
            self.kept += [tape.scratch(int(nbytes / _MATRICES)) for _ in range(_MATRICES)]
            if unit.adapter_numel:
                self.kept.append(tape.scratch(int(unit.adapter_numel * resolved.adapter_itemsize * self.weight_share)))
        for unit in self._outer():
            size = resolved.trained_itemsize if unit.trained_numel else resolved.frozen_itemsize
            nbytes = (unit.trained_numel + unit.frozen_numel) * size + unit.quantised_nbytes
            if nbytes:
                self.kept.append(tape.scratch(int(nbytes * self.weight_share)))

    def _outer(self) -> tuple[Unit, Unit, Unit]:
        return (self.units.embedding, self.units.head, self.units.root)

    def _gather(self, unit: Unit) -> Tensor | None:
        sharding = self.resolved.sharding
        if not sharding.splits_weights:
            return None
        return self.tape.new(unit.numel * sharding.gathered_itemsize + unit.quantised_nbytes, 1, Category.COMMUNICATION)

    def _sink(self, tape: Tape, grad: Tensor) -> tuple[()]:
        self.arrived.append(Tensor(grad.storage, grad.numel, grad.itemsize))
        return ()

    def _as_leaf(self, x: Tensor) -> Tensor:
        leaf = Tensor(x.storage, x.numel, x.itemsize, requires_grad=True)
        leaf.node = Node(self.tape.next_number(), (), (), self._sink)
        return leaf

    def _step(self, *, first: bool) -> None:
        tape, resolved = self.tape, self.resolved
        tokens = resolved.tokens
        inputs = tape.scratch(4 * _INT64 * tokens)
        root = self._gather(self._root_unit())
        h = tape.new(tokens * self.facts.hidden, self.run_of(self.layers[0][0]).style.residual)
        graphs: list[tuple[Tensor, Tensor | None]] = []
        others: list[Tensor] = []
        for number, (kind, unit) in enumerate(self.layers):
            if number % self.group:
                others.append(self._kept_copy(number, kind, h))
                continue
            gathered = self._gather(unit)
            source = self._as_leaf(h)
            tape.grad_enabled = not self.checkpointed[number]
            out = run_layer(tape, kind, source, self.run_of(kind))
            tape.grad_enabled = True
            graphs.append((h, None) if self.checkpointed[number] else (Tensor(None, h.numel, h.itemsize), out))
            h = Tensor(out.storage, out.numel, out.itemsize)
            del gathered, source, out
        grad = self._loss(h, first=first)
        del h
        retained: list[Tensor] = []
        gradients: list[Tensor] = []
        whole: list[Tensor] = []
        for number, (kind, unit) in reversed(list(enumerate(self.layers))):
            if number % self.group:
                other = others.pop()
                if resolved.sharding.retains_inputs:
                    retained += [other, tape.scratch(other.nbytes)]
                del other
                gradients += self._reduced(unit)
                continue
            boundary, kept_out = graphs.pop()
            gathered = self._gather(unit)
            if kept_out is None:
                kept_out = run_layer(tape, kind, self._as_leaf(boundary), self.run_of(kind))
            self.arrived.clear()
            if kept_out.node is not None:
                tape.backward(kept_out, grad)
            if self.arrived:
                grad = self.arrived.pop()
            if resolved.sharding.retains_inputs:
                retained += [boundary, grad]
            if not tape.gradients:  # else they are what is there until the step
                gradients += self._reduced(unit)
            whole += tape.gradients
            tape.gradients.clear()
            del boundary, kept_out, gathered
        del grad, root, inputs
        retained.clear()
        self._update(first=first)
        gradients.clear()
        whole.clear()

    def _kept_copy(self, number: int, kind: LayerKind, boundary: Tensor) -> Tensor:
        """What a layer that is not run keeps, as one block."""
        if self.checkpointed[number]:
            return self.tape.scratch(boundary.nbytes)
        if kind.name not in self.kept_nbytes:
            self.kept_nbytes[kind.name] = layer_figures(kind, self.run_of(kind)).kept_nbytes
        return self.tape.scratch(self.kept_nbytes[kind.name])

    def _reduced(self, unit: Unit) -> list[Tensor]:
        """Gradients of a layer that stay, after the whole ones are gone."""
        resolved, sharding, tape = self.resolved, self.resolved.sharding, self.tape
        trained = unit.trained_numel + unit.adapter_numel
        if not trained or resolved.gradients_at_rest or resolved.update_in_backward:
            return []
        if resolved.gradients_on_host:
            return []
        if sharding.splits_gradients:
            whole = tape.scratch(trained * sharding.gathered_itemsize)
            kept = tape.scratch(int(trained / sharding.ranks * resolved.gradient_itemsize))
            del whole
            return [kept]
        return [tape.scratch(unit.trained_numel * resolved.gradient_itemsize)] if unit.trained_numel else []

    def _root_unit(self) -> Unit:
        outer = self._outer()
        return Unit(
            "root",
            sum(unit.trained_numel for unit in outer),
            sum(unit.frozen_numel for unit in outer),
            0,
            sum(unit.quantised_nbytes for unit in outer),
            0,
            0,
        )

    def _loss(self, h: Tensor, *, first: bool) -> Tensor:
        """Forward's end and the loss's backward; the gradient of the last layer's output."""
        resolved, tape, facts = self.resolved, self.tape, self.facts
        shape = Tensor(None, h.numel, h.itemsize)
        if facts.head is None:
            return tape.new(shape.numel, shape.itemsize, Category.TEMPORARIES)
        leaf = [self._as_leaf(h)]
        del h
        loss, held = heads.run_head(
            tape,
            self.run_of(self.layers[-1][0]),
            leaf,
            code=resolved.loss,
            shift=resolved.logits,
            hidden=facts.hidden,
            vocab=facts.vocab,
            final_norm=facts.text.final_norm,
            softcap=facts.logits_softcap is not None,
            scaled=facts.logits_scaled,
            converts_outputs=resolved.converts_outputs,
            chunks=resolved.loss_chunks,
            vocab_split=resolved.tensor if resolved.loss_parallel else 1,
            holds=resolved.caller_holds_logits,
            compiled=resolved.compiled_loss,
        )
        if not resolved.caller_holds_logits:
            held = None
        if first:
            self.kept.append(tape.scratch(resolved.workspace_nbytes // 2))  # the backward's thread has its own
        self.arrived.clear()
        if loss.node is not None:
            tape.backward(loss, tape.new(1, 4))
        del loss, held
        return self.arrived.pop() if self.arrived else tape.new(shape.numel, shape.itemsize, Category.TEMPORARIES)

    def _update(self, *, first: bool) -> None:
        optimizer, tape = self.resolved.optimizer, self.tape
        if first and optimizer.on_device:
            for unit in [unit for _, unit in self.layers] + list(self._outer()):
                for numel in _tensors_of(unit):
                    nbytes = int(numel * self.state_share * (optimizer.state + optimizer.master) / 2)
                    if nbytes:
                        self.state += [tape.scratch(nbytes) for _ in range(2)]
        if optimizer.step and optimizer.on_device and not self.resolved.update_in_backward:
            temporaries = []
            for unit in [unit for _, unit in self.layers] + list(self._outer()):
                for numel in _tensors_of(unit):
                    nbytes = int(numel * self.state_share * optimizer.step)
                    if nbytes:
                        temporaries.append(tape.scratch(nbytes))
            del temporaries


def step_events(
    facts: ModelFacts,
    units: Units,
    resolved: Resolved,
    run_of: Callable[[LayerKind], Run],
    *,
    steps: int = 2,
    runs: int = 40,
) -> list[Event]:
    """The events of ``steps`` steps from a fresh process on. runs: layers that are run; the others only keep theirs.

    Blocks below 1 MiB are left out: they have a pool of their own, of 2 MiB segments, that no large block waits for.
    """
    return _Stream(facts, units, resolved, run_of, runs).run(steps)
