"""What a run reports: StepReport, one row a step of ``RUN/metrics.jsonl``; Compared, forecast beside measurement."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from overspill.schema import Frozen

__all__ = ["Compared", "StepReport"]


class StepReport(Frozen):
    """One optimizer step. Losses are in full precision; ``null`` stands for what was not measured.

    Tiers are ``device``, ``host`` and ``disk``; classes are those of plan.StateClass. ``stall_seconds`` says for
    how long the computing thread waited, by cause: ``disk_read``, ``disk_write``, ``update``, ``commit``, and ``flush``
    where a checkpoint waited for all that was under way.
    """

    step: int = Field(ge=1)
    loss: float | None = Field(default=None, description="Mean over the step's target tokens.")
    grad_norm: float | None = Field(default=None, description="Global norm before clipping.")
    lr: float = Field(default=0.0, description="Learning rate of the first parameter group in this step.")
    tokens: int = Field(default=0, ge=0, description="Tokens through the model, padding left out.")
    seconds: float = Field(default=0.0, ge=0, description="Since the row before: they add up to the run.")
    stall_seconds: dict[str, float] = Field(default_factory=dict, description="Time waited, by cause.")
    read_nbytes: dict[str, int] = Field(default_factory=dict, description="Bytes read, by tier.")
    written_nbytes: dict[str, int] = Field(default_factory=dict, description="Bytes written, by tier.")
    held_nbytes: dict[str, dict[str, int]] = Field(default_factory=dict, description="Bytes held, by tier and class.")
    clip_factor: float | None = Field(default=None, description="What clipping multiplied the gradient with.")
    skipped: bool = Field(default=False, description="The update was skipped since the gradient was not finite.")
    committed_step: int | None = Field(default=None, description="Newest step that a crash cannot lose.")
    eval_loss: float | None = Field(default=None, description="Mean loss on the held-out sequences, where due.")


class Compared(Frozen):
    """One figure of the forecast beside what was measured; ``null`` where there is none."""

    what: str
    unit: Literal["bytes", "seconds"]
    forecast: float | None = None
    measured: float | None = None

    @property
    def difference(self) -> float | None:
        """Measured against forecast, as a share: 0.05 is 5 % more than forecast."""
        if not self.forecast or self.measured is None:
            return None
        return self.measured / self.forecast - 1
