"""The ops of NF4: quantize a weight, dequantize it, measure it, and copy it to E4M3.

Attrs of all:

rows    rows of each logical matrix that is fused in the param. Each is quantized as if it were a tensor of its own.
block   elements that share an absmax
double  (`nf4_quantize`) also quantize the absmax, to 8 bits
shape, dtype
        (all but `nf4_quantize`) of the dequantized weight
transposed
        (`nf4_to_e4m3`) write the copy transposed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, Value
from surogate_core.errors import ProgramError

from .tables import BLOCKS, GROUP

Ins = Sequence[Value]
Attrs = Mapping[str, Any]
Specs = list[OutSpec]

WEIGHT = "weight"
"""Label of a dequantized weight."""

MULTIPLE = 16
"""Rows of each matrix and columns of a weight that is copied to E4M3 are multiples of this."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


def groups(rows: Sequence[int], columns: int, block: int) -> int:
    """Return the number of nested absmax of fused matrices."""
    return sum(-(-count * columns // block // GROUP) for count in rows)


def _stored(shape: tuple[int, ...], name: str, attrs: Attrs, double: bool) -> Specs:
    """Return what is stored of a weight. Raises ProgramError if its shape cannot be quantized."""
    rows, block = attrs["rows"], attrs["block"]
    _need(len(shape) == 2, f"{name} is {list(shape)}: only matrices are stored in NF4")
    _need(block in BLOCKS, f"block is {block}: it must be one of {BLOCKS}")
    _need(
        min(rows, default=0) > 0 and sum(rows) == shape[0],
        f"{name} is {list(shape)}, but the rows of its matrices are {tuple(rows)}, together {sum(rows)}",
    )
    _need(
        shape[1] % block == 0,
        f"{name} is {list(shape)}: {shape[1]} columns are no multiple of the NF4 block of {block}. "
        f"Choose a block that divides {shape[1]}, or do not quantize this weight",
    )
    size = shape[0] * shape[1]
    codes = OutSpec("codes", (size // 2,), "uint8")
    if not double:
        return [codes, OutSpec("absmax", (size // block,), "fp32")]
    return [
        codes,
        OutSpec("absmax", (size // block,), "uint8"),
        OutSpec("nested", (groups(rows, shape[1], block),), "fp32"),
        OutSpec("offset", (len(rows),), "fp32"),
    ]


def _quantize(ins: Ins, attrs: Attrs) -> Specs:
    (w,) = ins
    _need(w.dtype in ("fp32", "bf16"), f"{w.name} is {w.dtype}: fp32 or bf16 can be stored in NF4")
    return _stored(w.shape, w.name, attrs, attrs["double"])


def _dequantize(ins: Ins, attrs: Attrs) -> Specs:
    codes, shape = ins[0], tuple(attrs["shape"])
    stored = _stored(shape, f"the weight of {codes.name}", attrs, double=len(ins) > 2)
    _need(len(ins) == len(stored), f"needs 2 inputs, or 4 with double quantization, got {len(ins)}")
    for value, spec in zip(ins, stored, strict=True):
        _need(
            (value.shape, value.dtype) == (spec.shape, spec.dtype),
            f"{spec.label} of a weight {list(shape)} must be {spec.dtype} {list(spec.shape)}, got {value!r}",
        )
    _need(attrs["dtype"] in ("fp32", "bf16"), f"dequantizes to fp32 or bf16, not {attrs['dtype']}")
    return [OutSpec(WEIGHT, shape, attrs["dtype"])]


def _amax(ins: Ins, attrs: Attrs) -> Specs:
    _dequantize(ins, attrs)
    return [OutSpec("amax", (len(attrs["rows"]), 2), "fp32")]


def _to_e4m3(ins: Ins, attrs: Attrs) -> Specs:
    *stored, amax = ins
    (weight,), (needed,) = _dequantize(stored, attrs), _amax(stored, attrs)
    _need(
        (amax.shape, amax.dtype) == (needed.shape, needed.dtype),
        f"amax of a weight of {len(attrs['rows'])} matrices must be {needed.dtype} {list(needed.shape)}, got {amax!r}",
    )
    for size in (*attrs["rows"], weight.shape[1]):
        _need(size % MULTIPLE == 0, f"rows of matrices and columns must be multiples of {MULTIPLE}, got {size}")
    shape = weight.shape[::-1] if attrs["transposed"] else weight.shape
    return [OutSpec(WEIGHT, shape, "e4m3"), OutSpec(WEIGHT, (2,), "fp32")]


def _no_gradient(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """A stored weight is frozen."""
    return (None,) * len(op.ins)


OPS: tuple[OpDef, ...] = (
    OpDef(
        kind="nf4_quantize",
        infer=_quantize,
        reference="surogate_qlora_nf4.reference:nf4_quantize",
        vjp=_no_gradient,
        flops=lambda op: 20 * op.ins[0].size,
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="nf4_dequantize",
        infer=_dequantize,
        reference="surogate_qlora_nf4.reference:nf4_dequantize",
        vjp=_no_gradient,
        flops=lambda op: op.outs[0].size,
        math=lambda op: "fp32",
        always_recomputed=True,
    ),
    OpDef(
        kind="nf4_amax",
        infer=_amax,
        reference="surogate_qlora_nf4.reference:nf4_amax",
        vjp=_no_gradient,
        flops=lambda op: prod(op.attrs["shape"]),
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="nf4_to_e4m3",
        infer=_to_e4m3,
        reference="surogate_qlora_nf4.reference:nf4_to_e4m3",
        vjp=_no_gradient,
        flops=lambda op: 2 * op.outs[0].size,
        math=lambda op: "fp32",
        always_recomputed=True,
    ),
)
