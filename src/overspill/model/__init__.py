"""What a model looks like, without the model: parameter names and shapes, layers by kind, and the blocks of a session.

Pure Python, no torch. A session reads the same names and shapes off a live module.
"""

from __future__ import annotations

from overspill.model.blocks import Block, BlockParameter, find_blocks
from overspill.model.facts import (
    AttentionFacts,
    LayerKind,
    LinearShape,
    MlpFacts,
    ModelFacts,
    MoeFacts,
    Stack,
    VisionFacts,
)
from overspill.model.families import FAMILIES
from overspill.model.shape import ModelShape, ParameterShape, read_config
from overspill.model.summary import DecoderFacts

__all__ = [
    "FAMILIES",
    "AttentionFacts",
    "Block",
    "BlockParameter",
    "DecoderFacts",
    "LayerKind",
    "LinearShape",
    "MlpFacts",
    "ModelFacts",
    "ModelShape",
    "MoeFacts",
    "ParameterShape",
    "Stack",
    "VisionFacts",
    "find_blocks",
    "read_config",
]
