"""The ops of blockwise FP8 storage: quantize a weight, dequantize it, measure it, and copy it to E4M3.

Attrs:

rows   rows of each logical matrix that is fused in the param. Each is quantized as if it were a tensor of its own.
tile   rows and columns of the squares that share a scale. The last squares of a matrix may be smaller.
dtype  (all but `fp8_tile_quantize`) of the dequantized weight
transposed
       (`fp8_tile_to_e4m3`) write the copy transposed

The scales of a matrix are [ceil(rows / tile), ceil(K / tile)]; those of fused matrices follow each other. In
`transformers` they are `weight_scale_inv`. A weight is its code times its scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Emitter, Gradients, Op, OpDef, OutSpec, Value
from surogate_core.errors import ProgramError

Ins = Sequence[Value]
Attrs = Mapping[str, Any]
Specs = list[OutSpec]

WEIGHT = "weight"
"""Label of a dequantized weight."""

TILES = (64, 128, 256)

MULTIPLE = 16
"""Rows of each matrix and columns of a weight that is copied to E4M3 are multiples of this."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


def _stored(shape: tuple[int, ...], name: str, attrs: Attrs) -> Specs:
    """Return what is stored of a weight. Raises ProgramError if its shape cannot be quantized."""
    rows, tile = attrs["rows"], attrs["tile"]
    _need(len(shape) == 2, f"{name} is {list(shape)}: only matrices are stored in FP8")
    _need(tile in TILES, f"tile is {tile}: it must be one of {TILES}")
    _need(
        min(rows, default=0) > 0 and sum(rows) == shape[0],
        f"{name} is {list(shape)}, but the rows of its matrices are {tuple(rows)}, together {sum(rows)}",
    )
    high, wide = sum(-(-count // tile) for count in rows), -(-shape[1] // tile)
    return [OutSpec("codes", shape, "e4m3"), OutSpec("scales", (high, wide), "fp32")]


def _quantize(ins: Ins, attrs: Attrs) -> Specs:
    (w,) = ins
    _need(w.dtype in ("fp32", "bf16"), f"{w.name} is {w.dtype}: fp32 or bf16 can be stored in FP8")
    return _stored(w.shape, w.name, attrs)


def _dequantize(ins: Ins, attrs: Attrs) -> Specs:
    codes, shape = ins[0], ins[0].shape
    for value, spec in zip(ins, _stored(shape, codes.name, attrs), strict=True):
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
        kind="fp8_tile_quantize",
        infer=_quantize,
        reference="surogate_qlora_fp8.reference:fp8_tile_quantize",
        vjp=_no_gradient,
        flops=lambda op: 10 * op.ins[0].size,
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="fp8_tile_dequantize",
        infer=_dequantize,
        reference="surogate_qlora_fp8.reference:fp8_tile_dequantize",
        vjp=_no_gradient,
        flops=lambda op: op.outs[0].size,
        math=lambda op: "fp32",
        always_recomputed=True,
    ),
    OpDef(
        kind="fp8_tile_amax",
        infer=_amax,
        reference="surogate_qlora_fp8.reference:fp8_tile_amax",
        vjp=_no_gradient,
        flops=lambda op: op.ins[0].size,
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="fp8_tile_to_e4m3",
        infer=_to_e4m3,
        reference="surogate_qlora_fp8.reference:fp8_tile_to_e4m3",
        vjp=_no_gradient,
        flops=lambda op: 2 * op.outs[0].size,
        math=lambda op: "fp32",
        always_recomputed=True,
    ),
)
