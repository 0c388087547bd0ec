"""The two ends of a stack: first layers that are unlike the others, and final norm, head and loss."""

from __future__ import annotations

from dataclasses import replace

from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Units
from overspill.forecast.layers.figures import LayerFigures, layer_figures
from overspill.forecast.layers.head import HeadFigures, head_figures
from overspill.forecast.layers.litgpt_head import litgpt_head_figures
from overspill.forecast.layers.run import Run
from overspill.model.facts import LayerKind, ModelFacts

__all__ = ["early_layers", "early_runs", "final_figures"]


def early_layers(resolved: Resolved, kinds: list[tuple[LayerKind, Run]]) -> dict[int, LayerFigures]:
    """By position: layers whose input needs no gradient as nothing before them is trained, or without the prompt."""
    return {position: layer_figures(kind, run) for position, (kind, run) in early_runs(resolved, kinds).items()}


def early_runs(resolved: Resolved, kinds: list[tuple[LayerKind, Run]]) -> dict[int, tuple[LayerKind, Run]]:
    """How those layers run, by position."""
    code = resolved.style.litgpt
    if code is None or not resolved.frozen_embedding:
        return {}
    early = {}
    for kind, run in kinds:
        for position in kind.positions:
            prompted = position >= resolved.first_prompt
            first = position == 0 if code.prompt != "adapter" else position <= resolved.first_prompt
            if first or not prompted:
                early[position] = (kind, replace(run, input_needs_grad=not first, prompted=prompted))
    return early


def final_figures(facts: ModelFacts, resolved: Resolved, run: Run, units: Units) -> HeadFigures | None:
    """None for a model without a head. run: that of the last layer."""
    if facts.head is None:
        return None
    if resolved.sharding.flat_gradients and not units.head.trained_numel + units.head.adapter_numel:
        run = replace(run, trained=lambda name: False)
    if resolved.style.code == "litgpt":
        return litgpt_head_figures(run, hidden=facts.hidden, vocab=facts.vocab, final_norm=facts.text.final_norm,
                                   softcap=facts.logits_softcap is not None)  # fmt: skip
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
        compiled=resolved.compiled_loss,
    )
