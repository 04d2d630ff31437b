"""The ops of NVFP4 storage: `fp4_block_quantize`, `_dequantize`, `_amax` and `_to_e4m3`.

Attrs, besides those of `surogate_core.api.matrix_storage`:

four_over_six  (`fp4_block_quantize`) choose for each block whether its largest code is 4 or 6

A weight is codes [R, K / 2], scales [R, K / 16] and a global scale for each matrix. In ModelOpt's names these are
`weight`, `weight_scale` and `weight_scale_2`. The global scale is amax / (6 * 448), or amax / (6 * 256) with
`four_over_six`, so dequantizing does not depend on that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.api.e2m1_storage import e2m1_storage

if TYPE_CHECKING:
    from .options import Fp4WeightOptions

BLOCK = 16
"""Elements of a row that share a scale."""


def _writing(options: Fp4WeightOptions) -> Mapping[str, Any]:
    return {"four_over_six": options.qlora_four_over_six}


STORAGE = e2m1_storage(
    kind="fp4_block",
    title="NVFP4",
    key="qlora_fp4",
    block=BLOCK,
    scales="e4m3",
    global_scales=True,
    reference="surogate_qlora_fp4.reference",
    writing=_writing,
    declares=({}, {"four_over_six": bool}, {}),
)
OPS = STORAGE.ops
