"""Every hook that a plugin can implement. Each returns a list of definitions, which `api/` documents."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Final

import pluggy

from ..api import (
    AdapterDef,
    CheckpointFormDef,
    DatasetFormatDef,
    Definition,
    ExportFormatDef,
    KernelDef,
    LauncherDef,
    LoggerDef,
    LossDef,
    LoweringDef,
    ModelDef,
    OffloadDef,
    OpDef,
    OptimizerDef,
    RecipeDef,
    WeightFormatDef,
)

_PROVIDED: Final[Mapping[str, tuple[str, type[Definition]]]] = {
    "surogate_models": ("model", ModelDef),
    "surogate_ops": ("op", OpDef),
    "surogate_kernels": ("kernel", KernelDef),
    "surogate_recipes": ("recipe", RecipeDef),
    "surogate_lowerings": ("lowering", LoweringDef),
    "surogate_adapters": ("adapter", AdapterDef),
    "surogate_optimizers": ("optimizer", OptimizerDef),
    "surogate_losses": ("loss", LossDef),
    "surogate_weight_formats": ("weight format", WeightFormatDef),
    "surogate_checkpoint_forms": ("checkpoint form", CheckpointFormDef),
    "surogate_export_formats": ("export format", ExportFormatDef),
    "surogate_offload_strategies": ("offload", OffloadDef),
    "surogate_dataset_formats": ("format", DatasetFormatDef),
    "surogate_launchers": ("launcher", LauncherDef),
    "surogate_loggers": ("logger", LoggerDef),
}

HOOKS: Final[Mapping[str, str]] = {hook: kind for hook, (kind, _) in _PROVIDED.items()}
"""The hooks that provide definitions, and the kind of each."""

KINDS: Final[Mapping[str, type[Definition]]] = dict(_PROVIDED.values())
"""Every kind of thing that a plugin provides, and the class of its definitions."""

_spec = pluggy.HookspecMarker("surogate")
SPECS: Final = SimpleNamespace(
    surogate_diagnose=_spec(lambda system: None), **{hook: _spec(lambda: None) for hook in HOOKS}
)
"""The arguments of each hook, for pluggy. `surogate_diagnose` returns findings for `surogate doctor`."""
