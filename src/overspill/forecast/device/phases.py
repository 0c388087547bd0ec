"""The instants of a step on one rank, and the highest of them: what rests, plus what each phase has alive.

The peak is a maximum over phases, never a sum. A layer's own figures come from the tape (forecast/layers); here they
are put one after the other: what earlier layers kept, what is gathered, which gradients are there already.
"""

from __future__ import annotations

from collections.abc import Callable

from overspill.forecast.device import fsdp
from overspill.forecast.device.ends import early_layers, final_figures
from overspill.forecast.device.resting import CATEGORIES, Instant, Resting, reduced_nbytes, resting
from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units
from overspill.forecast.device.zero import backward_buffers_nbytes, gathered_nbytes, step_nbytes, turn_nbytes
from overspill.forecast.layers.figures import LayerFigures, layer_figures
from overspill.forecast.layers.head import HeadFigures
from overspill.forecast.layers.run import Run
from overspill.model.facts import LayerKind, ModelFacts

__all__ = ["CATEGORIES", "Instant", "Resting", "instants", "resting"]

_INT64 = 8


def instants(
    facts: ModelFacts, units: Units, resolved: Resolved, run_of: Callable[[LayerKind], Run], stage: int = 0
) -> list[Instant]:
    """Every phase's highest instant, in the order of a step. stage: of the pipeline; only the last has the loss."""
    rest = resting(units, resolved)
    before = resting(units, resolved, step_done=False) if resolved.steps == 1 else rest
    layers = [(kind, count, unit, layer_figures(kind, run_of(kind))) for kind, count, unit in units.layers]
    last = stage == resolved.pipeline - 1
    head = final_figures(facts, resolved, run_of(layers[-1][0]), units) if last else None
    early = early_layers(resolved, [(kind, run_of(kind)) for kind, _, _ in units.layers]) if stage == 0 else {}
    return _Step(facts, units, resolved, (before, rest), layers, head, stage, early).instants()


class _Step:
    """One micro-batch after another, on one rank. Layers stand in the order of their kinds' positions."""

    def __init__(
        self,
        facts: ModelFacts,
        units: Units,
        resolved: Resolved,
        rests: tuple[Resting, Resting],
        layers: list[tuple[LayerKind, int, Unit, LayerFigures]],
        head: HeadFigures | None,
        stage: int,
        early: dict[int, LayerFigures],
    ) -> None:
        self.stage, self.early = stage, early
        self.facts, self.units, self.resolved, self.head = facts, units, resolved, head
        #: What rests before the step's update, and with it: they differ in a run of one step.
        self.rest, self.updated = rests
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
        return [self._load(), *self._forward(), *self._backward(), self._step()]

    def _instant(self, phase: str, *, gradients: float = 0, activations: float = 0, logits: float = 0,
                 communication: float = 0, temporaries: float = 0) -> Instant:  # fmt: skip
        rest = self.updated if phase == "optimizer step" else self.rest
        return Instant(
            phase=phase,
            weights=rest.weights,
            optimizer=rest.optimizer,
            gradients=round(rest.gradients + gradients),
            activations=round(activations),
            logits=round(logits),
            communication=round(communication + rest.buffers),
            temporaries=round(temporaries + rest.workspace),
        )

    def _load(self) -> Instant:
        largest = max((unit.largest_numel or unit.quantised_numel for _, _, unit in self._all_units()), default=0)
        if self.resolved.loads_whole:
            whole = self.units.total(lambda unit: unit.numel * self.resolved.style.weight + unit.quantised_nbytes)
            return Instant("load", weights=round(whole), temporaries=largest * self.resolved.style.compute)
        return Instant("load", weights=self.rest.weights, temporaries=largest * self.resolved.style.compute)

    def _all_units(self) -> list[tuple[str, int, Unit]]:
        outer = [(unit.name, 1, unit) for unit in (self.units.embedding, self.units.head, self.units.root)]
        return [(kind.name, count, unit) for kind, count, unit in self.units.layers] + outer

    def _figures(self, number: int) -> LayerFigures:
        return self.early.get(number) or self.layers[self.order[number]][3]

    def _kept_of(self, number: int) -> int:
        figures = self._figures(number)
        if not self.checkpointed[number]:
            return figures.kept_nbytes
        if self.selective:
            return figures.selected_nbytes
        return 0 if self.resolved.offloads_boundaries else figures.boundary_nbytes

    def _inputs(self) -> int:
        """Ids, labels, attention mask and positions of the micro-batch, int64, and rotary tables."""
        return 4 * _INT64 * self.resolved.tokens

    def _gathered_root(self, *parts: Unit) -> int:
        """What is gathered of the parts outside the layers while ``parts`` run; no part: while layers do."""
        sharding = self.resolved.sharding
        if sharding.kind == "zero3":
            return turn_nbytes(self.units, sharding) if parts else 0
        return fsdp.root_nbytes(self.units, parts, sharding)

    def _gathered_layer(self, unit: Unit, units_alive: int, copied: int = 0) -> int:
        sharding = self.resolved.sharding
        if sharding.kind == "zero3":
            return gathered_nbytes(self.units, unit, sharding)
        return fsdp.layer_nbytes(unit, units_alive + copied, sharding)

    def _forward(self) -> list[Instant]:
        resolved, base = self.resolved, self._inputs() + self._embedding_scratch()
        sharding, head_part = resolved.sharding, (self.units.head, self.units.root)
        kept, best, best_total = 0, None, -1
        last, last_logits = self._last_step()
        flight = max(0, resolved.microbatches_in_flight - self.stage - 1)
        whole = sum(self._kept_of(number) for number in range(len(self.order)))
        for number, index in enumerate(self.order):
            unit, figures = self.layers[index][2], self._figures(number)
            own = figures.forward_nbytes if self.checkpointed[number] else figures.recorded_nbytes
            # FSDP2 keeps the previous collective's output until the next one is under way.
            gathered = self._gathered_layer(unit, 1 + (sharding.kind == "fsdp2"), sharding.copied_units)
            total = kept + own + gathered
            if total > best_total:
                best, best_total = (kept + own + last, gathered), total
            kept += self._kept_of(number)
        assert best is not None
        result = [
            self._instant(
                "forward",
                logits=last_logits,
                gradients=self._earlier_gradients(),
                activations=best[0] + base + flight * whole,
                communication=best[1] + self._gathered_root(),
            )
        ]
        if self.head is not None:
            head = self.head
            if head.answer_nbytes + last + last_logits > head.forward_nbytes:
                held = {"activations": kept + base + flight * whole + last, "logits": head.answer_nbytes + last_logits}
                earlier, root = self._earlier_gradients(), self._gathered_root()
                result.append(self._instant("head", gradients=earlier, communication=root, **held))
            logits = head.logits_nbytes
            result.append(
                self._instant(
                    "loss",
                    gradients=self._earlier_gradients(),
                    activations=kept + base + flight * whole + head.forward_nbytes - logits,
                    logits=logits,
                    communication=self._gathered_root(*head_part),
                )
            )
        self.kept, self.flight = kept, flight * whole
        return result

    def _last_step(self) -> tuple[int, int]:
        """(activations, logits) of the step before that live until the model has answered."""
        if not self.resolved.holds_last_step or self.head is None:
            return 0, 0
        outliving = sum(self._figures(number).outliving_nbytes for number in range(len(self.order)))
        return outliving, self.head.held_nbytes

    def _embedding_scratch(self) -> int:
        return 0

    def _earlier_gradients(self) -> float:
        """Gradients that are there when a micro-batch begins: those of the micro-batches before it."""
        resolved = self.resolved
        if resolved.accumulation == 1 or resolved.longest_first:
            return 0
        if resolved.gradients_at_rest or resolved.update_in_backward:
            return 0
        return self._all_gradients()

    def _gradient_share(self) -> float:
        """Of a unit's gradients, what a rank holds: all of them while micro-batches add up without a reduction."""
        sharding = self.resolved.sharding
        if sharding.accumulates_whole and self.resolved.accumulation > 1:
            return 1.0
        return 1 / sharding.ranks if sharding.splits_gradients else 1.0

    def _all_gradients(self) -> float:
        resolved = self.resolved
        if resolved.gradients_on_host:
            return 0.0
        share = self._gradient_share()
        return self.units.total(lambda unit: reduced_nbytes(unit, resolved, share))

    def _backward(self) -> list[Instant]:
        resolved, sharding = self.resolved, self.resolved.sharding
        share = 1 / sharding.ranks if sharding.splits_gradients else 1.0
        share = 0.0 if resolved.gradients_on_host else share
        buffers = backward_buffers_nbytes(self.units, resolved)
        before = self._earlier_gradients()
        done = 0.0
        base = self._inputs() + self.flight
        result = []
        root = self._gathered_root()
        at_head = self._gathered_root(self.units.head, self.units.root)
        earlier = bool(before) or resolved.gradients_at_rest
        if self.head is not None:
            head = self.head
            result.append(
                self._instant(
                    "backward of the loss",
                    gradients=before,
                    activations=self.kept + base + head.backward_nbytes - head.logits_nbytes,
                    logits=head.logits_nbytes,
                    communication=at_head,
                )
            )
            if not earlier and not resolved.update_in_backward:
                done += reduced_nbytes(self.units.head, resolved, share)
        tied = self._tied_gradient()
        kept = self.kept
        best: Instant | None = None
        retained = 0
        root_gradient = fsdp.root_gradient_nbytes(self.units, sharding)
        previous = self.units.head
        for number in reversed(range(len(self.order))):
            unit, figures = self.layers[self.order[number]][2], self._figures(number)
            kept -= self._kept_of(number)
            own = self._own_backward(number, figures)
            alive = 1 + (sharding.prefetched_units if number else 0)
            gathered = self._gathered_layer(unit, alive, sharding.copied_in_backward)
            unreduced = fsdp.unreduced_nbytes(unit, previous, sharding, first=previous is self.units.head)
            previous = unit
            if sharding.flat_gradients:
                # the pieces are in the layer's own backward; then one tensor is made of them
                unreduced, own = 0, max(own, round(figures.boundary_nbytes + 2 * fsdp.whole_nbytes(unit, sharding)))
            in_layer = 0 if sharding.splits_gradients else figures.gradients_at_peak_nbytes
            one = self._instant(
                "backward of a layer",
                gradients=before + done + tied + (0 if earlier else in_layer),  # earlier ones are added to in place
                activations=kept + base + retained + own - in_layer,
                logits=self.head.held_nbytes if self.head is not None else 0,
                communication=root + gathered + unreduced + root_gradient + buffers,
            )
            if best is None or one.total_nbytes > best.total_nbytes:
                best = one
            if sharding.retains_inputs:
                retained += 2 * figures.boundary_nbytes
            retained += figures.outliving_nbytes
            if not earlier and not resolved.update_in_backward:
                done += reduced_nbytes(unit, resolved, share)
        assert best is not None
        result.append(best)
        if resolved.longest_first and sharding.accumulates_whole and resolved.accumulation > 1:
            result.append(self._later_micro_batch(root))
        embedding = self.units.embedding
        if embedding.trained_numel:
            # Of a tied head's gradient, which is a view, and the embedding's the sum is a third tensor (tape/core.py);
            # of a head in chunks it is a sum already, and the embedding's is added to it in place.
            thirds = 2 if tied and resolved.loss != "chunked" else 1
            dense = embedding.trained_numel * resolved.style.compute * thirds
            result.append(
                self._instant(
                    "backward of the embeddings",
                    gradients=before + done + tied,
                    activations=base + retained,
                    temporaries=dense,
                    communication=root + root_gradient + buffers,
                )
            )
        return result

    def _later_micro_batch(self, root: float) -> Instant:
        """When all gradients are there: the last layer's backward in a micro-batch of half the longest's tokens."""
        number = len(self.order) - 1
        unit, figures = self.layers[self.order[number]][2], self._figures(number)
        before = (self.kept - self._kept_of(number) + self._inputs()) // 2
        joined = round(figures.boundary_nbytes / 2 + 2 * fsdp.whole_nbytes(unit, self.resolved.sharding))
        own = max(self._own_backward(number, figures) // 2, joined)
        return self._instant(
            "later micro-batch",
            gradients=self._all_gradients(),
            activations=before + own,
            logits=self.head.held_nbytes // 2 if self.head is not None else 0,
            communication=root + self._gathered_layer(unit, 1 + self.resolved.sharding.prefetched_units),
        )

    def _tied_gradient(self) -> int:
        """[Note: Tied] The gradient of a head that shares the embedding's weight waits in the engine's input buffer of
        AccumulateGrad until the embedding's backward has run too (torch/csrc/autograd/engine.cpp): through the whole
        backward of the layers, whole and in the dtype of the product, whoever takes it afterwards."""
        if self.head is None or self.units.head.numel or not self.units.embedding.trained_numel:
            return 0
        return self.units.embedding.trained_numel * self.resolved.style.compute

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

    def _reduction(self) -> Instant | None:
        """ZeRO 1: all gradients are there, a bucket, and the copy of what this rank keeps of them."""
        resolved, sharding = self.resolved, self.resolved.sharding
        if sharding.kind != "zero1" or sharding.ranks == 1:
            return None
        whole = 0.0 if resolved.gradients_at_rest else self._all_gradients()
        return self._instant(
            "reduction of gradients",
            gradients=whole * (1 + 1 / sharding.ranks),
            communication=backward_buffers_nbytes(self.units, resolved),
        )

    def _step(self) -> Instant:
        resolved, sharding = self.resolved, self.resolved.sharding
        share = 1 / sharding.ranks if sharding.splits_optimizer else 1.0
        facts = resolved.optimizer
        gradients = 0.0 if resolved.gradients_at_rest else self._all_gradients()
        if sharding.kind == "zero1":
            gradients *= share  # what other ranks update is let go first (free_grad_in_param_list)
        if resolved.update_in_backward:
            largest = max(unit.largest_numel for _, _, unit in self._all_units())
            return self._instant("optimizer step", temporaries=largest * (facts.step or facts.step_largest))
        trained = self.units.total(lambda unit: share * (unit.trained_numel + unit.adapter_numel))
        part = max(unit.largest_numel for _, _, unit in self._all_units()) * share
        temporaries = trained * facts.step + part * facts.step_largest if facts.on_device else 0.0
        temporaries += step_nbytes(self.units, resolved, share)
        return self._instant("optimizer step", gradients=gradients, temporaries=temporaries)
