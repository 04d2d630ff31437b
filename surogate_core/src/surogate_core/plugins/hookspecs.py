"""Every hook that a plugin can implement. Each returns a list of definitions, which `api/` documents."""

from __future__ import annotations

from collections.abc import Iterable

import pluggy

from ..api import (
    AdapterDef,
    DatasetFormatDef,
    Finding,
    KernelDef,
    LauncherDef,
    LoggerDef,
    LoweringDef,
    ModelDef,
    OffloadDef,
    OpDef,
    OptimizerDef,
    RecipeDef,
    SystemInfo,
    WeightFormatDef,
)

hookspec = pluggy.HookspecMarker("surogate")


@hookspec
def surogate_models() -> Iterable[ModelDef]:  # type: ignore[empty-body]
    """Architectures: forward program and weight map."""


@hookspec
def surogate_ops() -> Iterable[OpDef]:  # type: ignore[empty-body]
    """New kinds of ops: shape rule, backward rule, FLOPs, torch reference."""


@hookspec
def surogate_kernels() -> Iterable[KernelDef]:  # type: ignore[empty-body]
    """Compiled implementations of ops of any plugin."""


@hookspec
def surogate_recipes() -> Iterable[RecipeDef]:  # type: ignore[empty-body]
    """Precision recipes: decide dtypes, lower the programs of a run to them."""


@hookspec
def surogate_lowerings() -> Iterable[LoweringDef]:  # type: ignore[empty-body]
    """Products of a pair of operand dtypes, for recipes that do not serve the pair themselves."""


@hookspec
def surogate_adapters() -> Iterable[AdapterDef]:  # type: ignore[empty-body]
    """Adapters: rewrite the forward program before differentiation and choose what is trained."""


@hookspec
def surogate_optimizers() -> Iterable[OptimizerDef]:  # type: ignore[empty-body]
    """Optimizers: append update ops and state."""


@hookspec
def surogate_weight_formats() -> Iterable[WeightFormatDef]:  # type: ignore[empty-body]
    """Forms in which frozen matrices are stored."""


@hookspec
def surogate_offload_strategies() -> Iterable[OffloadDef]:  # type: ignore[empty-body]
    """Strategies that keep values on the host."""


@hookspec
def surogate_dataset_formats() -> Iterable[DatasetFormatDef]:  # type: ignore[empty-body]
    """Dataset types: turn a row into tokens and a mask of trained tokens."""


@hookspec
def surogate_launchers() -> Iterable[LauncherDef]:  # type: ignore[empty-body]
    """Ways to start the workers of a run."""


@hookspec
def surogate_loggers() -> Iterable[LoggerDef]:  # type: ignore[empty-body]
    """Receivers of step and evaluation reports."""


@hookspec
def surogate_diagnose(system: SystemInfo) -> Iterable[Finding]:  # type: ignore[empty-body]
    """Findings for `surogate doctor`."""
