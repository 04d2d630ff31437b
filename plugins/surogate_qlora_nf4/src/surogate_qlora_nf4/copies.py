"""E4M3 copies of a stored weight with one scale, which FP8 products read, without the dequantized weight between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surogate_core.api import Emitter, Op, ParamInfo, Value

from .ops import MULTIPLE


def e4m3_copies(
    b: Emitter, info: ParamInfo, stored: Sequence[Value], attrs: dict[str, Any], op: Op, outputs: Sequence[int]
) -> Sequence[Value] | None:
    """Return the outputs of `op` with these indices, if it is `fp8_quantize` of a weight by its own magnitude.

    Outputs of `op` are the copy, with `transposed` the transposed copy, and the scale. `stored` ends with the amax.
    Each copy is written by an op of its own: forward products read one, and backward products may read the other.
    """
    expected = {"dtype": "e4m3", "scaling": "current", "transposed": op.attrs.get("transposed")}
    sizes = (*(matrix.rows for matrix in info.matrices), info.param.shape[1])
    if op.kind != "fp8_quantize" or op.attrs != expected or any(size % MULTIPLE for size in sizes):
        return None
    scale = len(op.outs) - 1
    made: dict[int, Value] = {}
    for index in [i for i in outputs if i != scale] or [0]:
        made[index], made[scale] = b.emit("nf4_to_e4m3", *stored, **attrs, transposed=index == 1)
    return [made[i] for i in outputs]
