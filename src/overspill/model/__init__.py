"""What a model looks like, without the model: parameter names and shapes, and the blocks that they fall into.

Pure Python, no torch. A session reads the same names and shapes off a live module.
"""

from __future__ import annotations

from overspill.model.blocks import Block, BlockParameter, find_blocks
from overspill.model.families import FAMILIES, DecoderFacts
from overspill.model.shape import ModelShape, ParameterShape, read_config

__all__ = [
    "FAMILIES",
    "Block",
    "BlockParameter",
    "DecoderFacts",
    "ModelShape",
    "ParameterShape",
    "find_blocks",
    "read_config",
]
