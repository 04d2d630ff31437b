"""The ops of MXFP4 storage: `mxfp4_quantize`, `_dequantize`, `_amax`, `_to_e4m3` and `_to_e5m2`.

A weight is codes [R, K / 2], two E2M1 numbers a byte of which the first is in the lower half, and scales [R, K / 32],
an E8M0 code for each 32 elements of a row: the exponent of a power of two, plus 127. See the OCP Microscaling Formats
specification 1.0, sections 5.3.3 and 5.4.1. These are the bytes of `..._blocks` and `..._scales` of checkpoints.

Matrices that are fused in a param share nothing, so a row is stored alike in every one of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, OutSpec, ParamInfo, Value
from surogate_core.api.matrix_storage import MatrixStorage, need

if TYPE_CHECKING:
    from .options import Mxfp4WeightOptions

BLOCK = 32
"""Elements of a row that share a scale."""


def _states(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> list[OutSpec]:
    need(
        shape[1] % BLOCK == 0,
        f"{shape[1]} columns are no multiple of the MXFP4 block of {BLOCK}. Do not quantize this weight",
    )
    return [
        OutSpec("codes", (shape[0], shape[1] // 2), "uint8"),
        OutSpec("scales", (shape[0], shape[1] // BLOCK), "uint8"),
    ]


def _read(stored: Sequence[Value], attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    codes = stored[0]
    need(len(codes.shape) == 2, f"codes must have two dimensions, got {codes!r}")
    return (codes.shape[0], 2 * codes.shape[1]), attrs


def _attrs(info: ParamInfo, options: Mxfp4WeightOptions) -> Mapping[str, Any]:
    param = info.param
    if param.shape[1] % BLOCK:
        raise ConfigError(
            f"qlora_mxfp4: {param.name} has {param.shape[1]} columns, which is no multiple of {BLOCK}, the block of "
            "MXFP4. Use another format."
        )
    return {}


STORAGE = MatrixStorage(
    kind="mxfp4",
    title="MXFP4",
    reference="surogate_qlora_mxfp4.reference",
    states=_states,
    read=_read,
    attrs=_attrs,
    apart=True,
    copied_to=("e4m3", "e5m2"),
)
OPS = STORAGE.ops
