"""The ops of NVFP4 storage: quantize a weight, dequantize it, measure it, and copy it to E4M3.

Attrs:

rows           rows of each logical matrix that is fused in the param. Each is quantized as if it were a tensor of its
               own.
four_over_six  (`fp4_block_quantize`) choose for each block whether its largest code is 4 or 6
dtype          (all but `fp4_block_quantize`) of the dequantized weight
transposed     (`fp4_block_to_e4m3`) write the copy transposed

A weight is codes [R, K / 2], scales [R, K / 16] and a global scale for each matrix. In ModelOpt's names these are
`weight`, `weight_scale` and `weight_scale_2`. The global scale is amax / (6 * 448), or amax / (6 * 256) with
`four_over_six`, so dequantizing does not depend on that.
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

BLOCK = 16
"""Elements of a row that share a scale."""

MULTIPLE = 16
"""Rows of each matrix and columns of a weight that is copied to E4M3 are multiples of this."""


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ProgramError(message)


def _stored(shape: tuple[int, ...], name: str, attrs: Attrs) -> Specs:
    """Return what is stored of a weight. Raises ProgramError if its shape cannot be quantized."""
    rows = attrs["rows"]
    _need(len(shape) == 2, f"{name} is {list(shape)}: only matrices are stored in NVFP4")
    _need(
        min(rows, default=0) > 0 and sum(rows) == shape[0],
        f"{name} is {list(shape)}, but the rows of its matrices are {tuple(rows)}, together {sum(rows)}",
    )
    _need(
        shape[1] % BLOCK == 0,
        f"{name} is {list(shape)}: {shape[1]} columns are no multiple of the NVFP4 block of {BLOCK}. "
        "Do not quantize this weight",
    )
    return [
        OutSpec("codes", (shape[0], shape[1] // 2), "uint8"),
        OutSpec("scales", (shape[0], shape[1] // BLOCK), "e4m3"),
        OutSpec("global_scales", (len(rows),), "fp32"),
    ]


def _quantize(ins: Ins, attrs: Attrs) -> Specs:
    (w,) = ins
    _need(w.dtype in ("fp32", "bf16"), f"{w.name} is {w.dtype}: fp32 or bf16 can be stored in NVFP4")
    return _stored(w.shape, w.name, attrs)


def _dequantize(ins: Ins, attrs: Attrs) -> Specs:
    codes = ins[0]
    _need(len(codes.shape) == 2, f"codes must have two dimensions, got {codes!r}")
    shape = (codes.shape[0], 2 * codes.shape[1])
    for value, spec in zip(ins, _stored(shape, f"the weight of {codes.name}", attrs), strict=True):
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
        kind="fp4_block_quantize",
        infer=_quantize,
        reference="surogate_qlora_fp4.reference:fp4_block_quantize",
        vjp=_no_gradient,
        flops=lambda op: (100 if op.attrs["four_over_six"] else 20) * op.ins[0].size,
        passes=lambda op: op.ins[0].nbytes,
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="fp4_block_dequantize",
        infer=_dequantize,
        reference="surogate_qlora_fp4.reference:fp4_block_dequantize",
        vjp=_no_gradient,
        flops=lambda op: 2 * op.outs[0].size,
        math=lambda op: "fp32",
        always_recomputed=True,
    ),
    OpDef(
        kind="fp4_block_amax",
        infer=_amax,
        reference="surogate_qlora_fp4.reference:fp4_block_amax",
        vjp=_no_gradient,
        flops=lambda op: 4 * op.ins[0].size,
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="fp4_block_to_e4m3",
        infer=_to_e4m3,
        reference="surogate_qlora_fp4.reference:fp4_block_to_e4m3",
        vjp=_no_gradient,
        flops=lambda op: 2 * op.outs[0].size,
        math=lambda op: "fp32",
        always_recomputed=True,
    ),
)
