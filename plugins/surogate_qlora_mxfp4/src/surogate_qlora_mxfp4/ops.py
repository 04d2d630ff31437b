"""The ops of MXFP4 storage: `mxfp4_quantize`, `_dequantize`, `_amax`, `_to_e4m3` and `_to_e5m2`.

A weight is codes [R, K / 2], two E2M1 numbers a byte of which the first is in the lower half, and scales [R, K / 32],
an E8M0 code for each 32 elements of a row: the exponent of a power of two, plus 127. See the OCP Microscaling Formats
specification 1.0, sections 5.3.3 and 5.4.1. These are the bytes of `..._blocks` and `..._scales` of checkpoints.

Matrices that are fused in a param share nothing, so a row is stored alike in every one of them.
"""

from __future__ import annotations

from surogate_core.api.e2m1_storage import e2m1_storage

BLOCK = 32
"""Elements of a row that share a scale."""

STORAGE = e2m1_storage(
    kind="mxfp4",
    title="MXFP4",
    key="qlora_mxfp4",
    block=BLOCK,
    scales="uint8",
    reference="surogate_qlora_mxfp4.reference",
    apart=True,
    copied_to=("e4m3", "e5m2"),
)
OPS = STORAGE.ops
