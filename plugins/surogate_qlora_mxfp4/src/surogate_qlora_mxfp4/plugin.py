"""Hooks of `surogate-qlora-mxfp4`."""

from __future__ import annotations

from surogate_core.api import provides
from surogate_core.api.compiled import compiled_hooks

from .exports import EXPORT
from .format import MXFP4
from .forms import FORM
from .kernels import KERNELS
from .ops import OPS

SUROGATE_API = {
    **{"ops": 1, "weight_formats": 1, "checkpoint_forms": 1, "export_formats": 1, "kernels": 1, "diagnose": 1}
}
SUROGATE_EXAMPLES = {
    "checkpoint form mxfp4": [{"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}],
}
surogate_ops = provides(OPS)
surogate_weight_formats = provides([MXFP4])
surogate_checkpoint_forms = provides([FORM])
surogate_export_formats = provides([EXPORT])
surogate_kernels, surogate_diagnose = compiled_hooks("surogate_qlora_mxfp4", KERNELS)
