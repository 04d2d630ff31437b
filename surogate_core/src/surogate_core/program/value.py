"""Values: the named buffers that a program reads and writes. Concrete shapes, no symbols."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

Role = Literal["input", "param", "grad", "state", "act"]
"""What a value is for, hence who owns its memory and how long it lives:

input   written by the loop before a program runs (tokens, lr, step); never by an op
param   a model weight in its compute dtype; written by `load` and `update`
grad    gradient of a param, accumulated over the micro-steps of an optimizer step
state   anything else that outlives a program: optimizer moments, masters, amax history, loss sums
act     an activation: lives from the op that writes it to the last op that reads it, in the shared arena
"""

DTYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "e4m3": 1, "e5m2": 1, "int64": 8, "int32": 4, "uint8": 1}
"""Every storage dtype and its bytes per element. fp64 exists for tests against finite differences."""

DTYPE_CODES = {"fp32": 0, "bf16": 1, "fp64": 2, "int32": 3, "int64": 4, "e4m3": 5, "e5m2": 6, "uint8": 7}
"""What compiled kernels call them: `enum DType` of include/surogate/dtype.h."""

FLOAT_DTYPES = frozenset({"fp64", "fp32", "bf16"})
"""Dtypes in which values can carry gradients."""


@dataclass(frozen=True, kw_only=True)
class Init:
    """How a param or state starts when it is not loaded.

    kind: "zeros", "ones", "normal" (mean 0, standard deviation `std`), "uniform" (in [-`bound`, `bound`)), "constant"
    (`value`).
    `residual_projection` marks the two matrices a block that write to the residual stream; the config key
    `init_projections_to_zero` zeroes exactly those.
    """

    kind: Literal["zeros", "ones", "normal", "uniform", "constant"] = "zeros"
    std: float = 0.0
    bound: float = 0.0
    value: float = 0.0
    residual_projection: bool = False


@dataclass(frozen=True, eq=False)
class Value:
    """One buffer. Compared by identity; names are unique within a family of programs and are for people.

    `label` is the kind of activation ("norm", "residual", "qkv", "gate_up" ...): memory reports group by it and
    recomputation selects by it. `block` is the transformer block that it belongs to, -1 outside of blocks.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    label: str = ""
    block: int = -1
    init: Init | None = None

    @cached_property
    def size(self) -> int:
        """Number of elements; a scalar has one."""
        return prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the buffer, without alignment."""
        return self.size * DTYPE_BYTES[self.dtype]

    def __repr__(self) -> str:
        return f"{self.name}:{self.dtype}[{','.join(map(str, self.shape))}]"
