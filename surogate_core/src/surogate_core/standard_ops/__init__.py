"""The standard ops: shape rules, backward rules and FLOPs of the ops of decoder models.

They are registered through the same hooks as a plugin's ops. The torch reference of the same name in `reference/ops.py`
defines what each op computes. docs/reference/ops.md has inputs, outputs and attributes of all.
"""

from __future__ import annotations

from ..program.opdef import OpDef
from .collectives import COLLECTIVES
from .elementwise import ELEMENTWISE
from .layers import LAYERS
from .products import PRODUCTS

__all__ = ["COLLECTIVES", "ELEMENTWISE", "LAYERS", "OPS", "PRODUCTS"]

OPS: tuple[OpDef, ...] = (*LAYERS, *PRODUCTS, *ELEMENTWISE, *COLLECTIVES)
