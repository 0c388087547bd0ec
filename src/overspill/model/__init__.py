"""What a model looks like, without the model: parameter names and shapes, and the blocks that they fall into.

Pure Python, no torch. A session reads the same names and shapes off a live module.
"""

from __future__ import annotations

from overspill.model.blocks import Block, BlockParameter, find_blocks

__all__ = ["Block", "BlockParameter", "find_blocks"]
