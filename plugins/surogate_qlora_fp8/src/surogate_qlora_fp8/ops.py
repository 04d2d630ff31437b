"""The ops of blockwise FP8 storage: `fp8_tile_quantize`, `_dequantize`, `_amax` and `_to_e4m3`.

Attrs, besides those of `surogate_core.api.matrix_storage`:

tile   rows and columns of the squares that share a scale. The last squares of a matrix may be smaller.

The scales of a matrix are [ceil(rows / tile), ceil(K / tile)]; those of fused matrices follow each other. In
`transformers` they are `weight_scale_inv`. A weight is its code times its scale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import OutSpec, ParamInfo, Value, need
from surogate_core.api.matrix_storage import MatrixStorage

if TYPE_CHECKING:
    from .options import Fp8WeightOptions

TILES = (64, 128, 256)


def _states(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> list[OutSpec]:
    tile = attrs["tile"]
    need(tile in TILES, f"tile is {tile}: it must be one of {TILES}")
    high, wide = sum(-(-count // tile) for count in attrs["rows"]), -(-shape[1] // tile)
    return [OutSpec("codes", shape, "e4m3"), OutSpec("scales", (high, wide), "fp32")]


def _read(stored: Sequence[Value], attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    return stored[0].shape, attrs


def _attrs(info: ParamInfo, options: Fp8WeightOptions) -> Mapping[str, Any]:
    return {"tile": options.qlora_block_size}


STORAGE = MatrixStorage(
    kind="fp8_tile",
    title="FP8",
    reference="surogate_qlora_fp8.reference",
    states=_states,
    read=_read,
    attrs=_attrs,
    declares=({"tile": int}, {}, {}),
)
OPS = STORAGE.ops
