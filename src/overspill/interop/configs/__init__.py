"""Configurations that people already have, read as a Job: Accelerate, axolotl, DeepSpeed, HF, LLaMA-Factory, torchtune,
TRL. One file a format; each key is used, ignored with a reason, or named as unknown. No torch.
"""

from overspill.interop.configs.core import Assumption, ConfigReading
from overspill.interop.configs.reading import FORMATS, find_format, read_config

__all__ = ["FORMATS", "Assumption", "ConfigReading", "find_format", "read_config"]
