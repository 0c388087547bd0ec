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
from overspill.model.read import FoundModel, read_config, read_model
from overspill.model.shape import ModelShape, ParameterShape
from overspill.model.sized import SizedModel, shape_of_size
from overspill.model.summary import DecoderFacts

__all__ = [
    "FAMILIES",
    "AttentionFacts",
    "Block",
    "BlockParameter",
    "DecoderFacts",
    "FoundModel",
    "LayerKind",
    "LinearShape",
    "MlpFacts",
    "ModelFacts",
    "ModelShape",
    "MoeFacts",
    "ParameterShape",
    "SizedModel",
    "Stack",
    "VisionFacts",
    "find_blocks",
    "read_config",
    "read_model",
    "shape_of_size",
]
