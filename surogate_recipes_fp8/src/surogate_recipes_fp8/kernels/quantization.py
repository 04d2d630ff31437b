"""The form in which an op that quantizes lists its scale: attr `scaling`, the last inputs and the last output."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from surogate_core.api import DTYPES, Op, Support, Value

from ..formats import LARGEST

SCALINGS = {"delayed": 0, "given": 1, "current": 2, "fallback": 3}
"""Codes of the attr `scaling`: `enum Scaling` of csrc/scale.h."""

TILE_COLUMNS = 128
"""Columns of a tile of csrc/quantize.cuh."""

MEASURED_BYTES = 256
"""First part of the workspace of an op that measures: the amax of its tensor."""


@dataclass(frozen=True)
class Quantization:
    """The values of an op that quantizes.

    ins, outs   without those of the scale
    """

    op: Op
    ins: tuple[Value, ...]
    outs: tuple[Value, ...]

    @staticmethod
    def of(op: Op, n_ins: int) -> Quantization:
        """Return that of an op whose first `n_ins` inputs are not its scale or amax."""
        return Quantization(op, op.ins[:n_ins], op.outs[:-1] if measures(op) else op.outs)

    @property
    def format(self) -> int:
        """Code of the dtype of q."""
        return DTYPES[self.op.attrs["dtype"]].code

    def scale(self, workspace: int) -> tuple[int, Value | int, Value | int, Value | int, int]:
        """Return the five arguments that describe a scale to compiled functions. See csrc/scale.h."""
        scaling = self.op.attrs["scaling"]
        rest: list[Value] = list(self.op.ins[len(self.ins) :])
        scale: Value | int = 0 if scaling == "current" else rest.pop(0)
        amax: Value | int = rest.pop(0) if rest else 0
        if measures(self.op):
            return SCALINGS[scaling], scale, amax, self.op.outs[-1], workspace
        return SCALINGS[scaling], scale, amax, 0, 0

    def optional(self, *present: bool) -> tuple[Value | int, ...]:
        """Return the outputs, with 0 in place of those that are not `present`."""
        outs = iter(self.outs)
        return tuple(next(outs) if there else 0 for there in present)


def measures(op: Op) -> bool:
    """Return whether a launch measures the amax before another one quantizes."""
    return op.attrs["scaling"] in ("current", "fallback")


def measured_bytes(op: Op) -> int:
    """Bytes of workspace for the measured amax."""
    return MEASURED_BYTES if measures(op) else 0


def extent(value: Value) -> tuple[int, int]:
    """Return (rows, columns) of a tensor: all dimensions but the last, and the last.

    A part of a matrix has one dimension. It is processed in rows of a tile's columns, or in the shortest ones.
    """
    if len(value.shape) == 1 and value.size % 256 == 0:
        columns = TILE_COLUMNS if value.size % (16 * TILE_COLUMNS) == 0 else 16
        return value.size // columns, columns
    return prod(value.shape[:-1]), value.shape[-1]


def supports(op: Op, value: Value, n_ins: int, *, accumulates: int = -1) -> Support:
    """Support `value` of rows and columns that are multiples of 16, and FP8 by a known scaling.

    n_ins        number of inputs before scale and amax
    accumulates  index of the output that the kernel can add to; -1: none
    """
    if not value.shape or any(size % 16 for size in extent(value)):
        return Support(False, f"rows and columns must be multiples of 16, got {value!r}")
    if op.accumulate - {accumulates}:
        return Support(False, "cannot accumulate into its outputs, other than sums over rows")
    scaling, dtype = op.attrs.get("scaling"), op.attrs.get("dtype")
    if scaling not in SCALINGS or dtype not in LARGEST:
        return Support(False, f"scaling and dtype must be of {(*SCALINGS, *LARGEST)}, got {scaling!r} and {dtype!r}")
    given = len(op.ins) - n_ins
    if given not in {"delayed": (2,), "given": (1,), "current": (0, 1), "fallback": (1,)}[scaling]:
        return Support(False, f"has {given} inputs after the first {n_ins}, which {scaling} scaling does not take")
    for state in op.ins[n_ins:]:
        if (state.dtype, state.shape) != ("fp32", (2,)):
            return Support(False, f"a scale and an amax must be fp32 [2], got {state!r}")
    return Support(True)


def supports_dtypes(op: Op, n_ins: int, dtypes: tuple[str, ...]) -> Support:
    """Support inputs of these dtypes, before scale and amax."""
    have = tuple(value.dtype for value in op.ins[:n_ins])
    return Support(True) if have == dtypes else Support(False, f"needs inputs of {dtypes}, got {have}")


def supports_format(op: Op, dtype: str) -> Support:
    """Support the format that recipes quantize the result of this op to: activations to e4m3, gradients to e5m2."""
    have = op.attrs.get("dtype")
    return Support(True) if have == dtype else Support(False, f"writes {dtype}, not {have!r}")
