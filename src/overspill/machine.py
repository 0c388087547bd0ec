"""Machine: what a job runs on, as facts. `probe` fills it in; a forecast takes one from a file as well."""

from __future__ import annotations

from pydantic import Field

from overspill.schema import BytesPerSecond, Frozen, Nbytes

__all__ = ["Accelerator", "Disk", "Machine"]


class Accelerator(Frozen):
    name: str
    memory_nbytes: Nbytes


class Disk(Frozen):
    """One directory for state, and what its drive was measured to do (bytes per second; 0: not measured)."""

    directory: str
    filesystem: str = ""
    free_nbytes: Nbytes = 0
    odirect: bool = False
    hard_links: bool = False
    read_bytes_per_s: BytesPerSecond = 0.0
    write_bytes_per_s: BytesPerSecond = 0.0
    mixed_bytes_per_s: BytesPerSecond = Field(default=0.0, description="Reads and writes at once, both counted.")


class Machine(Frozen):
    """One host. memory_nbytes is what this process may use (the cgroup's limit where that is smaller)."""

    name: str = "this machine"
    cpu: str = ""
    simd: str = Field(
        default="", description="Widest instruction set that the kernels use: x86-64-v4, x86-64-v3, baseline, neon."
    )
    physical_cores: int = Field(default=1, ge=1)
    threads: int = Field(default=1, ge=1, description="Compute threads that this process may run at once.")
    memory_nbytes: Nbytes = 0
    available_nbytes: Nbytes = 0
    memory_bytes_per_s: BytesPerSecond = 0.0
    matmul_flops_per_s: float = Field(default=0.0, ge=0, description="fp32 matrix products, all threads; 0: unknown.")
    busy_cores: float = Field(default=0.0, ge=0, description="Cores that others took while speeds were measured.")
    pinned_limit_nbytes: Nbytes | None = Field(default=None, description="RLIMIT_MEMLOCK; None: no limit.")
    accelerators: tuple[Accelerator, ...] = ()
    disks: tuple[Disk, ...] = ()
