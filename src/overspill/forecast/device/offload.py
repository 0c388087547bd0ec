"""What a rank holds outside its card: classes that the job moves to DRAM or to disk. Formula `off device`.

Per rank; a node holds that times its ranks. Optimizer state on the host comes with its fp32 master; gradients that are
moved arrive in fp32; paged state is unified memory, which the driver backs with pageable DRAM when it must.
"""

from __future__ import annotations

from overspill.forecast.device.settings import Resolved
from overspill.forecast.device.states import Unit, Units, optimizer_nbytes
from overspill.job import Job

__all__ = ["off_device_nbytes"]

FP32 = 4


def off_device_nbytes(job: Job, units: Units, resolved: Resolved) -> tuple[int, int, int]:
    """(pinned DRAM, pageable DRAM, disk), in bytes."""
    sharding, offload = resolved.sharding, job.offload
    share = 1 / sharding.ranks if sharding.splits_optimizer else 1.0
    weight_share = 1 / sharding.ranks if sharding.splits_weights else 1.0
    host = disk = pageable = 0.0
    expert_share = 1 / resolved.expert_ranks if sharding.splits_optimizer else 1.0
    state = units.total(lambda unit: optimizer_nbytes(unit, resolved.optimizer, share, share, expert_share))

    def trained(unit: Unit) -> float:
        return (unit.trained_numel - unit.expert_numel + unit.adapter_numel) * share + unit.expert_numel * expert_share

    if job.optimizer.paged:
        pageable += state
    elif offload.optimizer == "host":
        host += state
    elif offload.optimizer == "disk":
        disk += state
    gradients = units.total(lambda unit: trained(unit) * FP32)
    if offload.gradients == "host" or offload.optimizer in ("host", "disk"):
        host += gradients
    elif offload.gradients == "disk":
        disk += gradients
    weights = units.total(
        lambda unit: (
            weight_share
            * (unit.trained_numel * resolved.trained_itemsize + unit.frozen_numel * resolved.frozen_itemsize)
        )
    )
    if not resolved.weights_on_host:
        weights = 0.0
    if offload.weights == "host":
        host += weights
    elif offload.weights == "disk":
        disk += weights
    if offload.activations != "device":
        layers = sum(count for _, count, _ in units.layers)
        hidden = max((kind.hidden for kind, _, _ in units.layers), default=0)
        boundaries = layers * hidden * resolved.tokens * resolved.style.residual
        if offload.activations == "host":
            host += boundaries
        else:
            disk += boundaries
    if not offload.pinned:
        return 0, round(host + pageable), round(disk)
    return round(host), round(pageable), round(disk)
