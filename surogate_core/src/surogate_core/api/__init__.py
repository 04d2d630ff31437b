"""The interface of plugins: one frozen dataclass for each kind of definition.

A plugin is a module that an entry point of the group `surogate` names. It must not import torch at import time. It
declares the version of each of its hooks that it was written for, and implements the hooks that it needs:

    from surogate_core.api import OptimizerDef, provides

    SUROGATE_API = {"optimizers": 1}
    surogate_optimizers = provides([OptimizerDef(name="sgd", ...)])

The fields of an `options` model, a pydantic model with `extra="forbid"`, are keys of the user's YAML file. Their names
need a prefix (`adamw_beta1`), because all installed plugins share one flat namespace of keys.
"""

from __future__ import annotations

from ..dtypes import DTYPES, Dtype, accumulator
from ..errors import ConfigError, NonFiniteError, PluginError, ProgramError, RunStopped, SurogateError, need
from ..origin import Definition
from ..program.builder import Builder
from ..program.inputs import BatchInputs, Scalars
from ..program.op import Op, Program
from ..program.opdef import (
    IN_OUTPUTS,
    Apart,
    Emitter,
    Gradients,
    GroupWise,
    OpDef,
    OutSpec,
    ParamKind,
    Product,
    Rewrites,
    RowWise,
    first_output,
)
from ..program.shards import Sharding, chunk_size, part_size
from ..program.value import UNFINISHED_LABEL, WEIGHT_LABEL, Init, Place, Shard, Value
from .adapters import ADAPTER_LABEL, AdapterContext, AdapterDef, Merge
from .base import Deterministic, DeviceInfo, Link, NoOptions, Support, Target
from .bounded_pattern import check_pattern, match_groups, matches_whole
from .checkpoint_forms import CheckpointFormDef, Part, StoredTensor
from .data import Column, DatasetFormatDef, Encoded, Omission, Tokenizer
from .destination import refuse_checkpoint
from .export_formats import ExportContext, ExportFormatDef, ExportTensor, LinearModules, Rewritten
from .hooks import provides
from .json_object import read_json_object
from .kernels import BindContext, Call, KernelDef, Launch
from .losses import Document, Loss, LossContext, LossDef, PrepareContext, Prepared, Prepass
from .models import (
    CAUSAL_LM,
    IMAGE_TEXT_TO_TEXT,
    WRITES_TEXT,
    Dims,
    Head,
    HFTensor,
    Layout,
    Matrix,
    Metric,
    ModelDef,
    RowChoice,
    WeightMap,
)
from .offloading import OffloadContext, OffloadDef
from .optimizers import OptimizerDef, TrainedParam, UpdateContext
from .recipes import (
    LowerContext,
    LoweringDef,
    Numerics,
    NumericsColumn,
    ParamInfo,
    Precision,
    PrecisionRequest,
    Programs,
    QuantizedTensor,
    RecipeDef,
    Refusal,
)
from .running import (
    CallbackReport,
    EndReport,
    EvalReport,
    Finding,
    GpuReport,
    Logger,
    LoggerDef,
    NumericsReport,
    OutputReport,
    Report,
    RunInfo,
    SampleReport,
    StepReport,
    SystemInfo,
    figures_of,
)
from .weight_formats import CheckpointForm, StorageContext, WeightFormatDef
from .world import Comm, JoinContext, LauncherDef, Span, Store, StoreLost, Task, World

__all__ = [
    "ADAPTER_LABEL",
    "CAUSAL_LM",
    "DTYPES",
    "IMAGE_TEXT_TO_TEXT",
    "IN_OUTPUTS",
    "UNFINISHED_LABEL",
    "WEIGHT_LABEL",
    "WRITES_TEXT",
    "AdapterContext",
    "AdapterDef",
    "Apart",
    "BatchInputs",
    "BindContext",
    "Builder",
    "Call",
    "CallbackReport",
    "CheckpointForm",
    "CheckpointFormDef",
    "Column",
    "Comm",
    "ConfigError",
    "DatasetFormatDef",
    "Definition",
    "Deterministic",
    "DeviceInfo",
    "Dims",
    "Document",
    "Dtype",
    "Emitter",
    "Encoded",
    "EndReport",
    "EvalReport",
    "ExportContext",
    "ExportFormatDef",
    "ExportTensor",
    "Finding",
    "GpuReport",
    "Gradients",
    "GroupWise",
    "HFTensor",
    "Head",
    "Init",
    "JoinContext",
    "KernelDef",
    "Launch",
    "LauncherDef",
    "Layout",
    "LinearModules",
    "Link",
    "Logger",
    "LoggerDef",
    "Loss",
    "LossContext",
    "LossDef",
    "LowerContext",
    "LoweringDef",
    "Matrix",
    "Merge",
    "Metric",
    "ModelDef",
    "NoOptions",
    "NonFiniteError",
    "Numerics",
    "NumericsColumn",
    "NumericsReport",
    "OffloadContext",
    "OffloadDef",
    "Omission",
    "Op",
    "OpDef",
    "OptimizerDef",
    "OutSpec",
    "OutputReport",
    "ParamInfo",
    "ParamKind",
    "Part",
    "Place",
    "PluginError",
    "Precision",
    "PrecisionRequest",
    "PrepareContext",
    "Prepared",
    "Prepass",
    "Product",
    "Program",
    "ProgramError",
    "Programs",
    "QuantizedTensor",
    "RecipeDef",
    "Refusal",
    "Report",
    "Rewrites",
    "Rewritten",
    "RowChoice",
    "RowWise",
    "RunInfo",
    "RunStopped",
    "SampleReport",
    "Scalars",
    "Shard",
    "Sharding",
    "Span",
    "StepReport",
    "StorageContext",
    "Store",
    "StoreLost",
    "StoredTensor",
    "Support",
    "SurogateError",
    "SystemInfo",
    "Target",
    "Task",
    "Tokenizer",
    "TrainedParam",
    "UpdateContext",
    "Value",
    "WeightFormatDef",
    "WeightMap",
    "World",
    "accumulator",
    "check_pattern",
    "chunk_size",
    "figures_of",
    "first_output",
    "match_groups",
    "matches_whole",
    "need",
    "part_size",
    "provides",
    "read_json_object",
    "refuse_checkpoint",
]
