"""A recipe of a third party: products of the blocks in MXFP8, with references alone.

Operands are E4M3, and every 32 elements along the summed dimension share a power of two, the smallest that clips none
of them. Unlike FP8 with a scale for a whole tensor there is no history, and unlike NVFP4 no magnitude of the tensor: a
form of a matrix is two values, its numbers [R, C] and its scales [R, C / 32].

Everything but the format comes from `surogate_core.api.products`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pluggy
import torch
from torch import Tensor

from surogate_core.api import (
    Builder,
    DeviceInfo,
    LowerContext,
    Op,
    OpDef,
    OutSpec,
    Precision,
    PrecisionRequest,
    Program,
    ProgramError,
    Programs,
    RecipeDef,
    Support,
    Value,
)
from surogate_core.api.products import (
    Operand,
    QuantizedWeights,
    Quantizer,
    SkippedBlocks,
    lower_products,
    quantized_precision,
    quantized_weights,
)
from surogate_core.reference.rounding import TORCH_DTYPES

SUROGATE_API = {"recipes": 1, "ops": 1}
hookimpl = pluggy.HookimplMarker("surogate")

BLOCK, LARGEST = 32, 448.0
Form = tuple[Value, ...]

# ----------------------------------------------------------------------------------------------------------------- ops


def infer_quantize(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (x,) = ins
    if x.dtype != "bf16" or len(x.shape) != 2 or any(size % BLOCK for size in x.shape):
        raise ProgramError(f"a bf16 matrix of multiples of {BLOCK} is quantized, not {x!r}")
    shapes = [x.shape] * attrs["rows"] + [x.shape[::-1]] * attrs["columns"]
    return [
        spec
        for rows, columns in shapes
        for spec in (
            OutSpec(x.label, (rows, columns), "e4m3"),
            OutSpec(x.label, (rows, columns // BLOCK), "ue8m0"),
        )
    ]


def infer_linear(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (m, k), (n, other) = ins[0].shape, ins[2].shape
    if k != other:
        raise ProgramError(f"a sums over {k} elements, b over {other}")
    return [OutSpec("linear", (m, n), attrs["dtype"])]


def mxfp8_quantize(x: Tensor, *, rows: bool, columns: bool) -> tuple[Tensor, ...]:
    """Forms of x, and of its transpose."""
    matrices = [x.float()] * rows + [x.float().T.contiguous()] * columns
    return tuple(part for matrix in matrices for part in _form(matrix))


def _form(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = x.view(len(x), -1, BLOCK)
    amax = blocks.abs().amax(dim=-1)
    fraction, exponent = torch.frexp(amax / LARGEST)  # amax / 448 = fraction * 2^exponent, 1/2 <= fraction < 1
    exponent = (exponent - (fraction == 0.5).int()).masked_fill(amax == 0, -127).clamp(-127, 127)
    bits = (exponent + 127).masked_fill(~amax.isfinite(), 255).to(torch.uint8)  # 255 is NaN
    scaled = torch.ldexp(blocks, -exponent[..., None]).clamp(-LARGEST, LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(x.shape), bits.view(torch.float8_e8m0fnu)


def values(q: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers of a form in fp32."""
    return (q.float().view(len(q), -1, BLOCK) * scales.float()[..., None]).view(q.shape)


def mxfp8_linear(
    a: Tensor, scales_a: Tensor, b: Tensor, scales_b: Tensor, added: Tensor | None = None, *, dtype: str
) -> Tensor:
    """a b^T of two forms, plus a bias [N] or a base [M, N]."""
    product = values(a, scales_a) @ values(b, scales_b).T
    return (product if added is None else product + added.float()).to(TORCH_DTYPES[dtype])


OPS = (
    OpDef(
        kind="mxfp8_quantize",
        infer=infer_quantize,
        reference=f"{__name__}:mxfp8_quantize",
        attrs={"rows": bool, "columns": bool},
        flops=lambda op: 4 * op.ins[0].size,
        math=lambda op: "fp32",
    ),
    OpDef(
        kind="mxfp8_linear",
        infer=infer_linear,
        reference=f"{__name__}:mxfp8_linear",
        attrs={"dtype": str},
        flops=lambda op: 2 * op.outs[0].size * op.ins[0].shape[1],
        math=lambda op: "fp8",
    ),
)

# ------------------------------------------------------------------------------------------------------------ lowering


@dataclass(frozen=True)
class Weights:
    """The forms of all weights: of their rows, for y, and of their columns, for dx."""

    forms: Mapping[Value, tuple[Form, Form]]

    @classmethod
    def declared(cls, b: Builder, weights: QuantizedWeights) -> Weights:
        forms = {}
        for weight in sorted(weights.params, key=lambda param: param.name):
            specs = infer_quantize([weight], {"rows": True, "columns": weight in weights.by_dgrad})
            names = ("rows", "rows.scales", "columns", "columns.scales")
            with b.block(weight.block):
                states = tuple(
                    b.state(f"mxfp8.{weight.name}.{name}", spec.shape, spec.dtype, None, derived=True)
                    for name, spec in zip(names, specs, strict=False)
                )
            forms[weight] = (states[:2], states[2:])
        return cls(forms)

    def quantize(self, b: Builder, chosen: Collection[Value]) -> None:
        for weight, (rows, columns) in self.forms.items():
            if weight in chosen:
                with b.block(weight.block):
                    b.emit("mxfp8_quantize", weight, outs=[*rows, *columns], rows=True, columns=bool(columns))


class MxQuantizer(Quantizer):
    def __init__(self, builder: Builder, weights: Weights) -> None:
        self._b, self._weights = builder, weights
        self._forms: dict[Value, Mapping[str, Form]] = {}

    def quantize(self, operand: Operand) -> Collection[Op]:
        outs = self._b.emit("mxfp8_quantize", operand.value, rows=operand.by_rows, columns=operand.by_wgrad)
        self._forms[operand.value] = {"rows": outs[:2], "columns": outs[-2:]}
        return ()

    def multiply(self, op: Op, left: Operand, weight: Value, *, base: Value | None, bias: Value | None) -> None:
        right = self._weights.forms[weight][left.which == "dy"]
        added = [value for value in (base, bias) if value is not None]
        self._emit(op, self._forms[left.value]["rows"], right, added)

    def wgrad(self, op: Op, dy: Operand, x: Operand) -> None:
        self._emit(op, self._forms[dy.value]["columns"], self._forms[x.value]["columns"])

    def _emit(self, op: Op, a: Form, b: Form, added: Sequence[Value] = ()) -> None:
        dtype = op.outs[0].dtype
        self._b.emit("mxfp8_linear", *a, *b, *added, outs=op.outs, accumulate=op.accumulate, dtype=dtype)


# -------------------------------------------------------------------------------------------------------------- recipe


def precision(request: PrecisionRequest, options: SkippedBlocks) -> Precision:
    return quantized_precision(request, "mxfp8", "e4m3", "e4m3")


def supports(device: DeviceInfo, precision: Precision, options: SkippedBlocks) -> Support:
    if device.sm is not None and device.sm < 100:
        return Support(False, f"MXFP8 products need SM100, {device.title} is SM{device.sm}")
    return Support(True)


def lower(programs: Programs, context: LowerContext) -> Programs:
    b = context.builder
    chosen = quantized_weights(programs, context, context.options, BLOCK, "MXFP8 products", "use recipe: bf16")
    weights = Weights.declared(b, chosen)

    def lowered(program: Program) -> Program:
        return lower_products(program, b, chosen, lambda operands: MxQuantizer(b, weights))

    with b.record("derive") as derive:
        weights.quantize(b, chosen.params)
    with b.record("update") as update:
        weights.quantize(b, set(chosen.grads.values()))
    programs = replace(programs, micro=lowered(programs.micro), evaluate=lowered(programs.evaluate))
    return programs.appending(derive, update)


MXFP8 = RecipeDef(
    name="mxfp8",
    summary="MXFP8 products: E4M3 with a power of two for every 32 elements",
    options=SkippedBlocks,
    precision=precision,
    supports=supports,
    lower=lower,
    product_error=lambda precision, options: 0.04,
    kernels_of=("bf16",),
)


@hookimpl
def surogate_recipes() -> Iterable[RecipeDef]:
    return [MXFP8]


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    return OPS
