"""Weight formats that four ops make: one quantizes a matrix, one dequantizes, one measures, and one copies it to E4M3.

A fifth one copies it to E5M2, if the format says so (`copied_to`). A `MatrixStorage` says what is stored of a matrix.
From that it declares the ops, whose references and kernels the package brings, and it has the functions of a
`WeightFormatDef`:

    STORAGE = MatrixStorage(
        kind="int4", title="INT4", reference="acme.reference", states=states, read=read, attrs=attrs
    )
    OPS = STORAGE.ops
    INT4 = WeightFormatDef(quantize=STORAGE.quantize, dequantize=STORAGE.dequantize, copies=STORAGE.copies, ...)

Attrs of the ops, besides those of the format:

rows        rows of each logical matrix that is fused in the param. Each is quantized as if it were a tensor of its own.
dtype       (all but `<kind>_quantize`) of the dequantized weight
transposed  (`<kind>_to_e4m3` and `_to_e5m2`) write the copy transposed

Inputs and outputs:

<kind>_quantize    weight -> the stored values
<kind>_dequantize  stored values -> weight
<kind>_amax        stored values -> fp32 [matrices, 2]: of each dequantized matrix the largest finite magnitude, and 1
                   if an element is not finite, else 0
<kind>_to_e4m3     stored values, amax -> the weight in E4M3 with one scale, and that scale, fp32 [2]
<kind>_to_e5m2     the same in E5M2, whose scale is a power of two
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic

from ..errors import ProgramError, need
from ..program.op import Op
from ..program.opdef import Apart, OpDef, OutSpec
from ..program.value import WEIGHT_LABEL, Value
from .base import Options, Support, Target
from .recipes import ParamInfo
from .weight_formats import StorageContext

Ins = Sequence[Value]
Attrs = Mapping[str, Any]
Specs = list[OutSpec]
Shape = tuple[int, ...]

MAX_RUNS = 32
"""Runs of matrices of equal height that can be fused in a param: `max_fused_runs` of <surogate/fused_rows.cuh>."""

_COPY_MULTIPLE = 16
"""Rows of each matrix and columns of a weight that is copied to FP8 are multiples of this."""


def supports(op: Op, target: Target) -> Support:
    """Return whether a device and core's headers for kernels (`fused_rows.cuh`, `e4m3_copy.cuh`) serve an op."""
    if (runs := len(list(groupby(op.attrs["rows"])))) > MAX_RUNS:
        return Support(False, f"{runs} runs of matrices of equal height are fused, at most {MAX_RUNS} can be")
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    return Support(True)


@dataclass(frozen=True, kw_only=True)
class MatrixStorage(Generic[Options]):
    """A state in which a format stores a part of a matrix.

    kind       prefix of the kinds of the four ops
    title      the format in errors
    reference  module of the references, which have the names of the kinds
    states     (shape, attrs of `<kind>_quantize`) -> what is stored of a matrix. Raises ProgramError for a shape or for
               attrs that the format does not have. The rows are already checked.
    read       (stored values, attrs of `<kind>_dequantize`) -> (shape, attrs of the op that quantized them)
    attrs      (param, options) -> attrs of all four ops. Raises ConfigError, with what to do, for a param that the
               format cannot store.
    writing    options -> further attrs of `<kind>_quantize`
    reading    param -> further attrs of the other ops
    apart      whether what is stored of some of several matrices is read and written by itself (`OpDef.apart`): no
               further attribute depends on how many there are. Copies of some have the amax of all.
    copied_to  dtypes in which the format makes copies
    declares   {name: type} of what `attrs`, `writing` and `reading` return (`OpDef.attrs`), in this order
    """

    kind: str
    title: str
    reference: str
    states: Callable[[Shape, Attrs], Specs]
    read: Callable[[Ins, Attrs], tuple[Shape, Attrs]]
    attrs: Callable[[ParamInfo, Options], Attrs]
    writing: Callable[[Options], Attrs] = lambda options: {}
    reading: Callable[[ParamInfo], Attrs] = lambda info: {}
    apart: bool = False
    copied_to: tuple[str, ...] = ("e4m3",)
    declares: tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, Any]] = ({}, {}, {})

    # ------------------------------------------------------------------------------------------------- weight format

    def quantize(self, context: StorageContext[Options]) -> Sequence[Value]:
        """`WeightFormatDef.quantize`. The last state is the amax."""
        b, info, options = context.builder, context.param, context.options
        param, attrs = info.param, {**self._attrs(info, options), **self.writing(options)}
        specs = self._quantize((param,), attrs)
        states = [b.state(f"{param.name}.{s.label}", s.shape, s.dtype, None, derived=True) for s in specs]
        stored = b.emit(f"{self.kind}_quantize", param, outs=states, **attrs)
        amax = b.state(f"{param.name}.amax", (len(info.matrices), 2), "fp32", None, derived=True)
        return *stored, *b.emit(f"{self.kind}_amax", *stored, outs=[amax], **self._reading(info, options))

    def dequantize(self, stored: Ins, context: StorageContext[Options]) -> Value:
        """`WeightFormatDef.dequantize`."""
        attrs = self._reading(context.param, context.options)
        return context.builder.apply(f"{self.kind}_dequantize", *stored[:-1], **attrs)

    def copies(
        self, stored: Ins, op: Op, outputs: Sequence[int], context: StorageContext[Options]
    ) -> Sequence[Value] | None:
        """`WeightFormatDef.copies`, of an op that makes copies in one of `copied_to` (`OpDef.copies_to`).

        Each copy is written by an op of its own: forward products read one, and backward products may read the other.
        """
        b, info = context.builder, context.param
        sizes = (*(matrix.rows for matrix in info.matrices), info.param.shape[1])
        dtype = b.ops[op.kind].copies_to(op)
        if dtype not in self.copied_to or any(size % _COPY_MULTIPLE for size in sizes):
            return None
        attrs, scale = self._reading(info, context.options), len(op.outs) - 1
        made: dict[int, Value] = {}
        for index in [i for i in outputs if i != scale] or [0]:
            made[index], made[scale] = b.emit(f"{self.kind}_to_{dtype}", *stored, **attrs, transposed=index == 1)
        return [made[i] for i in outputs]

    def _attrs(self, info: ParamInfo, options: Options) -> dict[str, Any]:
        return {"rows": tuple(matrix.rows for matrix in info.matrices), **self.attrs(info, options)}

    def _reading(self, info: ParamInfo, options: Options) -> dict[str, Any]:
        return {**self._attrs(info, options), **self.reading(info), "dtype": info.param.dtype}

    # ----------------------------------------------------------------------------------------------------------- ops

    @property
    def ops(self) -> tuple[OpDef, ...]:
        """The ops, in the order of this module's docstring."""
        return (
            self._op("quantize", self._quantize, 20, apart=self._apart),
            self._op("dequantize", self._dequantize, 2, always_recomputed=True, apart=self._apart),
            self._op("amax", self._amax, 2),
            *(
                self._op(f"to_{dtype}", self._to(dtype), 4, always_recomputed=True, apart=self._copies_apart)
                for dtype in self.copied_to
            ),
        )

    def _apart(self, op: Op) -> Apart | None:
        return Apart(ins=tuple(range(len(op.ins))), outs=tuple(range(len(op.outs)))) if self.apart else None

    def _copies_apart(self, op: Op) -> Apart | None:
        """A copy of some matrices has the scale of all: the amax is read whole."""
        beside = (0,) if op.attrs["transposed"] else ()
        return Apart(ins=tuple(range(len(op.ins) - 1)), outs=(0,), beside=beside) if self.apart else None

    def _op(self, name: str, infer: Callable[[Ins, Attrs], Specs], flops_of_a_weight: int, **fields: Any) -> OpDef:
        kind, (both, writing, reading) = f"{self.kind}_{name}", self.declares
        attrs = writing if name == "quantize" else {**reading, "dtype": str}
        return OpDef(
            kind=kind,
            infer=infer,
            attrs={"rows": tuple, **both, **attrs, **({"transposed": bool} if name.startswith("to_") else {})},
            reference=f"{self.reference}:{kind}",
            vjp=lambda b, op, grads: (None,) * len(op.ins),  # a stored weight is frozen
            flops=lambda op: flops_of_a_weight * self._size(op),
            math=lambda op: "fp32",
            **fields,
        )

    def _size(self, op: Op) -> int:
        if op.kind == f"{self.kind}_quantize":
            return op.ins[0].size
        (rows, columns), _ = self.read(op.ins, op.attrs)
        return rows * columns

    def _stored(self, shape: Shape, name: str, attrs: Attrs) -> Specs:
        rows = attrs["rows"]
        need(len(shape) == 2, f"{name} is {list(shape)}: only matrices are stored in {self.title}")
        need(
            min(rows, default=0) > 0 and sum(rows) == shape[0],
            f"{name} is {list(shape)}, but the rows of its matrices are {tuple(rows)}, together {sum(rows)}",
        )
        try:
            return self.states(shape, attrs)
        except ProgramError as error:
            raise ProgramError(f"{name} is {list(shape)}: {error}") from None

    def _quantize(self, ins: Ins, attrs: Attrs) -> Specs:
        (w,) = ins
        need(w.dtype in ("fp32", "bf16"), f"{w.name} is {w.dtype}: fp32 or bf16 can be stored in {self.title}")
        return self._stored(w.shape, w.name, attrs)

    def _dequantize(self, ins: Ins, attrs: Attrs) -> Specs:
        shape, written = self.read(ins, attrs)
        specs = self._stored(shape, f"the weight of {ins[0].name}", written)
        need(len(ins) == len(specs), f"needs {len(specs)} inputs, got {len(ins)}")
        for value, spec in zip(ins, specs, strict=True):
            need(
                (value.shape, value.dtype) == (spec.shape, spec.dtype),
                f"{spec.label} of a weight {list(shape)} must be {spec.dtype} {list(spec.shape)}, got {value!r}",
            )
        need(attrs["dtype"] in ("fp32", "bf16"), f"dequantizes to fp32 or bf16, not {attrs['dtype']}")
        return [OutSpec(WEIGHT_LABEL, shape, attrs["dtype"])]

    def _amax(self, ins: Ins, attrs: Attrs) -> Specs:
        self._dequantize(ins, attrs)
        return [OutSpec("amax", (len(attrs["rows"]), 2), "fp32")]

    def _to(self, dtype: str) -> Callable[[Ins, Attrs], Specs]:
        return lambda ins, attrs: self._copied(ins, attrs, dtype)

    def _copied(self, ins: Ins, attrs: Attrs, dtype: str) -> Specs:
        *stored, amax = ins
        (weight,), (needed,) = self._dequantize(stored, attrs), self._amax(stored, attrs)
        of_more = self.apart and amax.shape[1:] == (2,) and amax.shape[0] > needed.shape[0]
        need(
            (amax.shape == needed.shape or of_more) and amax.dtype == needed.dtype,
            f"amax of a weight of {len(attrs['rows'])} matrices must be {needed.dtype} {list(needed.shape)}, "
            f"got {amax!r}",
        )
        for size in (*attrs["rows"], weight.shape[1]):
            need(
                size % _COPY_MULTIPLE == 0,
                f"rows of matrices and columns must be multiples of {_COPY_MULTIPLE}, got {size}",
            )
        shape = weight.shape[::-1] if attrs["transposed"] else weight.shape
        return [OutSpec(WEIGHT_LABEL, shape, dtype), OutSpec(WEIGHT_LABEL, (2,), "fp32")]
