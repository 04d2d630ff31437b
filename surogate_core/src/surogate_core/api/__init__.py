"""What a plugin hands over: one frozen dataclass per kind of thing, and nothing else.

A plugin is a light module (no torch at import) named by an entry point of the group `surogate`. It says which
version of this interface it was written for and implements the hooks it needs:

    import pluggy
    from surogate_core.api import OptimizerDef

    SUROGATE_API = 0
    hookimpl = pluggy.HookimplMarker("surogate")

    @hookimpl
    def surogate_optimizers():
        return [OptimizerDef(name="sgd", ...)]

Every `options` model is a pydantic model with `extra="forbid"` whose fields are keys of the user's YAML file; name
them with the plugin's own prefix (`adamw_beta1`), since all installed plugins share one flat space of keys.
"""

from __future__ import annotations

from ..origin import Definition
from ..program.inputs import BatchInputs, Scalars
from ..program.op import Op, Program
from ..program.opdef import Emitter, Gradients, OpDef, OutSpec
from ..program.value import Init, Value
from .adapters import AdapterDef, Merge
from .base import Deterministic, DeviceInfo, NoOptions, Support, Target
from .data import DatasetFormatDef, Encoded, Omission
from .kernels import BindContext, Call, KernelDef, Launch
from .models import Dims, HFTensor, ModelDef, WeightMap
from .optimizers import OffloadDef, OptimizerDef, ParamGrad
from .recipes import Precision, PrecisionRequest, RecipeDef
from .running import (
    Comm,
    EvalReport,
    Finding,
    GpuReport,
    LauncherDef,
    Logger,
    LoggerDef,
    RunInfo,
    StepReport,
    SystemInfo,
    Topology,
)

__all__ = [
    "API",
    "AdapterDef",
    "BatchInputs",
    "BindContext",
    "Call",
    "Comm",
    "DatasetFormatDef",
    "Definition",
    "Deterministic",
    "DeviceInfo",
    "Dims",
    "Emitter",
    "Encoded",
    "EvalReport",
    "Finding",
    "GpuReport",
    "Gradients",
    "HFTensor",
    "Init",
    "KernelDef",
    "Launch",
    "LauncherDef",
    "Logger",
    "LoggerDef",
    "Merge",
    "ModelDef",
    "NoOptions",
    "OffloadDef",
    "Omission",
    "Op",
    "OpDef",
    "OptimizerDef",
    "OutSpec",
    "ParamGrad",
    "Precision",
    "PrecisionRequest",
    "Program",
    "RecipeDef",
    "RunInfo",
    "Scalars",
    "StepReport",
    "Support",
    "SystemInfo",
    "Target",
    "Topology",
    "Value",
    "WeightMap",
]

API = 0
"""Version of this interface; core refuses a plugin whose `SUROGATE_API` is another. 0: any release may change it."""
