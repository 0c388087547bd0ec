"""Memory of a real training step of any module, traced on the meta device: no closed form needed, none assumed."""

from overspill.trace.rules import CPU, CUDA, CUDA_HOPPER, EMULATED, AttentionKernel, DeviceRules
from overspill.trace.step import Batch, TensorSpec, Trace, TraceOptions, language_batch, trace_step

__all__ = [
    "CPU",
    "CUDA",
    "CUDA_HOPPER",
    "EMULATED",
    "AttentionKernel",
    "Batch",
    "DeviceRules",
    "TensorSpec",
    "Trace",
    "TraceOptions",
    "language_batch",
    "trace_step",
]
