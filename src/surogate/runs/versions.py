"""Versions of everything that affects the numbers of a run."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import cache
from importlib import metadata

from surogate_core.planning.plan import Plan
from surogate_core.plugins.provided import Plugin

from .run import Run

_NEUTRAL = ("offload", "launcher")
"""Kinds of definitions that change no bit of a run."""


def library_versions() -> dict[str, str]:
    """Return the versions of core and of the libraries that every run uses."""
    wanted = ("surogate-core", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    return {name: _version(name) for name in wanted} | {"python": platform.python_version()}


@cache
def _version(name: str) -> str:
    """Return the version of an installed library. A run asks four times; each reads and parses a file of 1 to 20 KB."""
    return metadata.version(name)


def run_versions(run: Run, plan: Plan) -> dict[str, str]:
    """Return the versions of everything that affects the numbers of a run."""
    return library_versions() | plugin_versions(run, plan)


def plugin_versions(run: Run, plan: Plan) -> dict[str, str]:
    """Return {distribution: version} of the plugins that provide a run's model, recipe, optimizer, launcher, adapter,
    weight format, checkpoint form, offload strategies, ops and kernels."""
    return {plugin.distribution: plugin.version for plugin in sorted(_used(run, plan), key=lambda p: p.distribution)}


def neutral_distributions(run: Run, plan: Plan) -> set[str]:
    """Return the distributions of offload strategies and launchers of which the run uses nothing else: they change no
    bit."""
    registry = run.registry
    neutral = {registry.source(kind, name).plugin.distribution for kind in _NEUTRAL for name in registry.names(kind)}
    return neutral - {plugin.distribution for plugin in _computing(run, plan)}


def _used(run: Run, plan: Plan) -> Iterator[Plugin]:
    yield from _computing(run, plan)
    yield run.registry.source("launcher", run.config.launcher).plugin
    yield from (run.registry.source("offload", strategy.name).plugin for strategy, _ in plan.inputs.offload)


def _computing(run: Run, plan: Plan) -> Iterator[Plugin]:
    registry, given, config = run.registry, plan.inputs, run.config
    named = [("model", given.model.name), ("recipe", config.recipe), ("optimizer", config.optimizer)]
    named += [("loss", config.loss)]
    named += [("adapter", adapter.name) for adapter, _ in given.adapters]
    named += [("weight format", given.weight_format[0].name)] if given.weight_format else []
    named += [("checkpoint form", run.form[0].name)] if run.form else []
    ops = (op for program in plan.assembly.all_programs.values() for op in program.ops)
    named += [("op", kind) for kind in {op.attrs["of"] if op.kind == "reference_vjp" else op.kind for op in ops}]
    for kind, name in named:
        yield registry.source(kind, name).plugin
    serving = set(plan.kernels.providers.values())
    yield from (plugin for plugin in registry.plugins if plugin.distribution in serving)
