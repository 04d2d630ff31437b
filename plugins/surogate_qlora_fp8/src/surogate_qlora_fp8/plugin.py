"""Hooks of `surogate-qlora-fp8`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from . import exports
from .format import FP8
from .forms import BLOCKS, TENSORS
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {
    **{"ops": 1, "weight_formats": 1, "checkpoint_forms": 1, "export_formats": 1, "kernels": 1, "diagnose": 1}
}
SUROGATE_EXAMPLES = {
    "checkpoint form fp8_blocks": [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "fp8", "weight_block_size": [48, 32]},
    ],
    "checkpoint form fp8_tensor": [{"quant_method": "fp8", "weight_block_size": None}],
    "export format fp8-blocks": [{"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}],
}
surogate_ops = provides(OPS)
surogate_weight_formats = provides([FP8])
surogate_checkpoint_forms = provides([BLOCKS, TENSORS])
surogate_export_formats = provides([exports.BLOCKS, exports.CHANNEL])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_qlora_fp8", KERNELS)
