"""The instants of a step on one rank, and the highest of them: what rests, plus what each phase has alive.

The peak is a maximum over phases, never a sum. A layer's own figures come from the tape (forecast/layers); here they
are put one after the other: what earlier layers kept, what is gathered, which gradients are there already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units, optimizer_nbytes
from overspill.forecast.layers.figures import LayerFigures, layer_figures
from overspill.forecast.layers.head import HeadFigures, head_figures
from overspill.forecast.layers.run import Run
from overspill.forecast.tape import Category
from overspill.model.facts import LayerKind, ModelFacts

__all__ = ["CATEGORIES", "Instant", "Resting", "instants", "resting"]

CATEGORIES = tuple(category.name.lower() for category in Category)
FP32 = 4
_INT64 = 8


@dataclass(frozen=True, slots=True)
class Instant:
    """The highest moment of one phase. nbytes by category; they sum to what torch calls allocated."""

    phase: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    logits: int = 0
    communication: int = 0
    temporaries: int = 0

    @property
    def total_nbytes(self) -> int:
        return (
            self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.communication
            + self.temporaries
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Resting:
    """Between steps: weights with adapters, optimizer state with master, kept gradients, workspaces of libraries."""

    weights: int
    optimizer: int
    gradients: int
    workspace: int

    @property
    def total_nbytes(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.workspace


def resting(units: Units, resolved: Resolved, *, step_done: bool = True) -> Resting:
    """Formula `resting`. step_done False: before the first step, when there is no optimizer state yet."""
    sharding = resolved.sharding
    weight_share = 1 / sharding.ranks if sharding.splits_weights else 1.0
    optimizer_share = 1 / sharding.ranks if sharding.splits_optimizer else 1.0
    gradient_share = 1 / sharding.ranks if sharding.splits_gradients else 1.0
    expert_share = 1 / resolved.expert_ranks if sharding.splits_optimizer else 1.0

    def weights(unit: Unit) -> float:
        if not resolved.weights_on_device:
            return 0.0
        return weight_share * (
            unit.trained_numel * resolved.trained_itemsize
            + unit.frozen_numel * resolved.frozen_itemsize
            + unit.adapter_numel * resolved.adapter_itemsize
            + unit.quantised_nbytes
        )

    state = 0.0
    if step_done and resolved.optimizer.on_device:
        state = units.total(
            lambda unit: optimizer_nbytes(unit, resolved.optimizer, optimizer_share, optimizer_share, expert_share)
        )
    elif resolved.optimizer.master and resolved.optimizer.on_device:
        state = units.total(
            lambda unit: (unit.trained_numel + unit.adapter_numel) * optimizer_share * resolved.optimizer.master
        )
    kept = 0.0
    if resolved.gradients_at_rest:
        kept = units.total(lambda unit: gradient_share * _gradient_nbytes(unit, resolved))
    return Resting(round(units.total(weights)), round(state), round(kept), resolved.workspace_nbytes)


def _gradient_nbytes(unit: Unit, resolved: Resolved) -> float:
    if not resolved.gradients_on_device:
        return 0.0
    return unit.trained_numel * resolved.gradient_itemsize + unit.adapter_numel * resolved.adapter_itemsize


def instants(
    facts: ModelFacts, units: Units, resolved: Resolved, run_of: Callable[[LayerKind], Run], stage: int = 0
) -> list[Instant]:
    """Every phase's highest instant, in the order of a step. stage: of the pipeline; only the last has the loss."""
    rest = resting(units, resolved)
    layers = [(kind, count, unit, layer_figures(kind, run_of(kind))) for kind, count, unit in units.layers]
    last = stage == resolved.pipeline - 1
    head = _head(facts, resolved, run_of(layers[-1][0]), units) if last else None
    return _Step(facts, units, resolved, rest, layers, head, stage).instants()


def _head(facts: ModelFacts, resolved: Resolved, run: Run, units: Units) -> HeadFigures | None:
    if facts.head is None:
        return None
    return head_figures(
        run,
        code=resolved.loss,
        shift=resolved.logits,
        hidden=facts.hidden,
        vocab=facts.vocab,
        final_norm=facts.text.final_norm,
        softcap=facts.logits_softcap is not None,
        scaled=facts.logits_scaled,
        caller_holds_logits=resolved.caller_holds_logits,
        converts_outputs=resolved.converts_outputs,
        chunks=resolved.loss_chunks,
        vocab_split=resolved.tensor if resolved.loss_parallel else 1,
    )


class _Step:
    """One micro-batch after another, on one rank. Layers stand in the order of their kinds' positions."""

    def __init__(
        self,
        facts: ModelFacts,
        units: Units,
        resolved: Resolved,
        rest: Resting,
        layers: list[tuple[LayerKind, int, Unit, LayerFigures]],
        head: HeadFigures | None,
        stage: int,
    ) -> None:
        self.stage = stage
        self.facts, self.units, self.resolved, self.rest, self.head = facts, units, resolved, rest, head
        by_position = sorted(
            (position, index)
            for index, (kind, count, _, _) in enumerate(layers)
            for position in (kind.positions[-count:] if stage else kind.positions[:count])
        )
        self.order = [index for _, index in by_position]
        self.layers = layers
        every = resolved.checkpoint_every
        self.selective = resolved.checkpointing == "selective_op"
        self.checkpointed = [
            resolved.checkpointing != "none" and number % every == 0 for number in range(len(self.order))
        ]

    def instants(self) -> list[Instant]:
        result = [self._load(), *self._forward(), *self._backward(), self._reduction(), self._step()]
        return [one for one in result if one is not None]

    def _instant(self, phase: str, *, gradients: float = 0, activations: float = 0, logits: float = 0,
                 communication: float = 0, temporaries: float = 0) -> Instant:  # fmt: skip
        rest = self.rest
        return Instant(
            phase=phase,
            weights=rest.weights,
            optimizer=rest.optimizer,
            gradients=round(rest.gradients + gradients),
            activations=round(activations),
            logits=round(logits),
            communication=round(communication),
            temporaries=round(temporaries + rest.workspace),
        )

    def _load(self) -> Instant:
        largest = max((unit.largest_numel or unit.quantised_numel for _, _, unit in self._all_units()), default=0)
        return Instant("load", weights=self.rest.weights, temporaries=largest * self.resolved.style.compute)

    def _all_units(self) -> list[tuple[str, int, Unit]]:
        outer = [(unit.name, 1, unit) for unit in (self.units.embedding, self.units.head, self.units.root)]
        return [(kind.name, count, unit) for kind, count, unit in self.units.layers] + outer

    def _kept_of(self, number: int) -> int:
        figures = self.layers[self.order[number]][3]
        if not self.checkpointed[number]:
            return figures.kept_nbytes
        if self.selective:
            return figures.selected_nbytes
        return 0 if self.resolved.offloads_boundaries else figures.boundary_nbytes

    def _inputs(self) -> int:
        """Ids, labels, attention mask and positions of the micro-batch, int64, and rotary tables."""
        return 4 * _INT64 * self.resolved.tokens

    def _gathered_root(self) -> int:
        """FSDP: what stands outside the layers is one unit, gathered from the first forward to the last backward."""
        sharding = self.resolved.sharding
        if not sharding.splits_weights or sharding.kind == "zero3":
            return 0
        numel = sum(unit.numel for unit in (self.units.embedding, self.units.head, self.units.root))
        if sharding.whole_model_unit:
            numel += sum(count * unit.numel for _, count, unit in self.units.layers)
        return numel * sharding.gathered_itemsize

    def _gathered_layer(self, unit: Unit, units_alive: int) -> int:
        sharding = self.resolved.sharding
        if not sharding.splits_weights or sharding.whole_model_unit:
            return 0
        one = unit.numel * sharding.gathered_itemsize + unit.quantised_nbytes
        if sharding.kind == "zero3":
            largest = max(unit.numel for _, _, unit in self._all_units())
            ahead = sharding.prefetch_bucket_numel + max(largest, unit.numel)
            whole = sum(count * unit.numel for _, count, unit in self._all_units())
            return min(ahead, sharding.max_live_numel + largest, whole) * sharding.gathered_itemsize
        return one * (units_alive + sharding.copied_units)

    def _forward(self) -> list[Instant]:
        resolved, base = self.resolved, self._inputs() + self._embedding_scratch()
        kept, best, best_total = 0, None, -1
        flight = max(0, resolved.microbatches_in_flight - self.stage - 1)
        whole = sum(self._kept_of(number) for number in range(len(self.order)))
        for number, index in enumerate(self.order):
            _, _, unit, figures = self.layers[index]
            own = figures.forward_nbytes if self.checkpointed[number] else figures.recorded_nbytes
            gathered = self._gathered_layer(unit, 1 + (resolved.sharding.kind == "fsdp2"))
            total = kept + own + gathered
            if total > best_total:
                best, best_total = (kept + own, gathered), total
            kept += self._kept_of(number)
        assert best is not None
        result = [
            self._instant(
                "forward",
                gradients=self._earlier_gradients(),
                activations=best[0] + base + flight * whole,
                communication=best[1] + self._gathered_root(),
            )
        ]
        if self.head is not None:
            head = self.head
            logits = head.logits_nbytes
            result.append(
                self._instant(
                    "loss",
                    gradients=self._earlier_gradients(),
                    activations=kept + base + flight * whole + head.forward_nbytes - logits,
                    logits=logits,
                    communication=self._gathered_root(),
                )
            )
        self.kept, self.flight = kept, flight * whole
        return result

    def _embedding_scratch(self) -> int:
        return 0

    def _earlier_gradients(self) -> float:
        """Gradients that are there when a micro-batch begins: those of the micro-batches before it."""
        resolved = self.resolved
        if resolved.accumulation == 1 or resolved.gradients_at_rest or resolved.update_in_backward:
            return 0
        return self._all_gradients()

    def _all_gradients(self) -> float:
        resolved = self.resolved
        share = 1 / resolved.sharding.ranks if resolved.sharding.splits_gradients else 1.0
        return self.units.total(lambda unit: share * _gradient_nbytes(unit, resolved))

    def _backward(self) -> list[Instant]:
        resolved, sharding = self.resolved, self.resolved.sharding
        share = 1 / sharding.ranks if sharding.splits_gradients else 1.0
        before = self._earlier_gradients()
        done = 0.0
        base = self._inputs() + self.flight
        result = []
        root = self._gathered_root()
        earlier = bool(before) or resolved.gradients_at_rest
        if self.head is not None:
            head = self.head
            result.append(
                self._instant(
                    "backward of the loss",
                    gradients=before,
                    activations=self.kept + base + head.backward_nbytes - head.logits_nbytes,
                    logits=head.logits_nbytes,
                    communication=root,
                )
            )
            if not earlier and not resolved.update_in_backward:
                done += share * _gradient_nbytes(self._head_unit(), resolved)
        kept = self.kept
        best: Instant | None = None
        retained = 0
        root_gradient = 0.0
        if sharding.splits_gradients and sharding.kind in ("fsdp1", "fsdp2"):
            root_gradient = self._unreduced(self._head_unit())
        for number in reversed(range(len(self.order))):
            _, _, unit, figures = self.layers[self.order[number]]
            kept -= self._kept_of(number)
            own = self._own_backward(number, figures)
            alive = 1 + (sharding.prefetched_units if number else 0)
            unreduced = self._unreduced(unit) * (1 + sharding.pending_reductions)
            in_layer = 0 if earlier else figures.gradients_at_peak_nbytes * (0 if sharding.splits_gradients else 1)
            one = self._instant(
                "backward of a layer",
                gradients=before + done + in_layer,
                activations=kept + base + retained + own - (in_layer if not sharding.splits_gradients else 0),
                logits=self.head.held_nbytes if self.head is not None else 0,
                communication=root + self._gathered_layer(unit, alive) + unreduced + root_gradient,
            )
            if best is None or one.total_nbytes > best.total_nbytes:
                best = one
            if sharding.retains_inputs:
                retained += 2 * figures.boundary_nbytes
            if not earlier and not resolved.update_in_backward:
                done += share * _gradient_nbytes(unit, resolved)
        assert best is not None
        result.append(best)
        embedding = self.units.embedding
        if embedding.trained_numel:
            dense = embedding.trained_numel * resolved.style.compute
            result.append(
                self._instant(
                    "backward of the embeddings",
                    gradients=before + done,
                    activations=base + retained,
                    temporaries=dense,
                    communication=root + root_gradient,
                )
            )
        return result

    def _head_unit(self) -> Unit:
        """Whose gradient the loss's backward makes: tied, it is the embedding's, and stays while the layers go back."""
        return self.units.embedding if self.facts.tied else self.units.head

    def _own_backward(self, number: int, figures: LayerFigures) -> int:
        if not self.checkpointed[number]:
            return figures.backward_nbytes
        if self.resolved.reentrant:
            return max(figures.recomputed_nbytes, figures.recorded_nbytes + figures.output_nbytes)
        return max(
            figures.backward_nbytes
            + (
                figures.boundary_nbytes
                if figures.backward_nbytes < figures.recomputed_nbytes - figures.output_nbytes
                else 0
            ),
            figures.recorded_nbytes + figures.output_nbytes,
        )

    def _unreduced(self, unit: Unit) -> float:
        """Gradients of one unit before they are reduced, beside what a rank keeps of them."""
        sharding = self.resolved.sharding
        trained = unit.trained_numel + unit.adapter_numel
        if sharding.kind in ("fsdp1", "fsdp2") and sharding.ranks > 1:
            full = trained * sharding.gathered_itemsize
            wide = trained * sharding.reduce_itemsize if sharding.reduce_itemsize != sharding.gathered_itemsize else 0
            return full + wide
        return 0

    def _reduction(self) -> Instant | None:
        sharding = self.resolved.sharding
        if sharding.kind not in ("zero1", "zero2", "zero3", "ddp"):
            return None
        return None

    def _step(self) -> Instant:
        resolved, sharding = self.resolved, self.resolved.sharding
        share = 1 / sharding.ranks if sharding.splits_optimizer else 1.0
        facts = resolved.optimizer
        gradients = 0.0 if resolved.gradients_at_rest else self._all_gradients()
        if resolved.update_in_backward:
            largest = max(unit.largest_numel for _, _, unit in self._all_units())
            return self._instant("optimizer step", temporaries=largest * (facts.step or facts.step_largest))
        trained = self.units.total(lambda unit: share * (unit.trained_numel + unit.adapter_numel))
        widest = max(unit.largest_numel for _, _, unit in self._all_units()) * share
        temporaries = trained * facts.step + widest * facts.step_largest if facts.on_device else 0.0
        return self._instant("optimizer step", gradients=gradients, temporaries=temporaries)
