"""The ops of NVFP4 storage: `fp4_block_quantize`, `_dequantize`, `_amax` and `_to_e4m3`.

Attrs, besides those of `surogate_core.api.matrix_storage`:

four_over_six  (`fp4_block_quantize`) choose for each block whether its largest code is 4 or 6

A weight is codes [R, K / 2], scales [R, K / 16] and a global scale for each matrix. In ModelOpt's names these are
`weight`, `weight_scale` and `weight_scale_2`. The global scale is amax / (6 * 448), or amax / (6 * 256) with
`four_over_six`, so dequantizing does not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, OutSpec, ParamInfo, Value
from surogate_core.api.matrix_storage import MatrixStorage, need

if TYPE_CHECKING:
    from .options import Fp4WeightOptions

BLOCK = 16
"""Elements of a row that share a scale."""


def _states(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> list[OutSpec]:
    need(
        shape[1] % BLOCK == 0,
        f"{shape[1]} columns are no multiple of the NVFP4 block of {BLOCK}. Do not quantize this weight",
    )
    return [
        OutSpec("codes", (shape[0], shape[1] // 2), "uint8"),
        OutSpec("scales", (shape[0], shape[1] // BLOCK), "e4m3"),
        OutSpec("global_scales", (len(attrs["rows"]),), "fp32"),
    ]


def _read(stored: Sequence[Value], attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    codes = stored[0]
    need(len(codes.shape) == 2, f"codes must have two dimensions, got {codes!r}")
    return (codes.shape[0], 2 * codes.shape[1]), attrs


def _attrs(info: ParamInfo, options: Fp4WeightOptions) -> Mapping[str, Any]:
    param = info.param
    if param.shape[1] % BLOCK:
        raise ConfigError(
            f"qlora_fp4: {param.name} has {param.shape[1]} columns, which is no multiple of {BLOCK}, the block of "
            "NVFP4. Use another format."
        )
    return {}


def _writing(options: Fp4WeightOptions) -> Mapping[str, Any]:
    return {"four_over_six": options.qlora_four_over_six}


STORAGE = MatrixStorage(
    kind="fp4_block",
    title="NVFP4",
    reference="surogate_qlora_fp4.reference",
    states=_states,
    read=_read,
    attrs=_attrs,
    writing=_writing,
    declares=({}, {"four_over_six": bool}, {}),
)
OPS = STORAGE.ops
