"""Definitions that a program hands over itself, beside those of installed packages."""

from __future__ import annotations

from collections.abc import Sequence

from ..api import Definition
from ..errors import PluginError
from ..words import fold
from .definition_check import faults
from .hookspecs import KINDS
from .provided import Plugin, Provided
from .registry import Registry

GIVEN = Plugin("given", "this program", "itself", "__main__")


def with_given(registry: Registry, definitions: Sequence[Definition]) -> Registry:
    """Return a registry that has `definitions` too. They are checked and attributed as those of a plugin are.

    Raises PluginError for a definition that is wrong, or has the name of an installed one.
    """
    if not definitions:
        return registry
    given = [_provided(definition) for definition in definitions]
    for item in given:
        for installed in registry.provided:
            _refuse_same(item, installed)
    return Registry((*registry.plugins, GIVEN), (*registry.provided, *given), registry.diagnose, registry.remarks)


def _refuse_same(given: Provided, installed: Provided) -> None:
    if given.kind != installed.kind or given.kind == "kernel":  # several kernels may serve an op
        return
    if fold(given.name) == fold(installed.name):
        raise PluginError(
            f"{given.kind} {given.name!r}: {installed.plugin} has one of this name. Give yours another name."
        )
    if given.kind != "model":
        return
    for architecture in given.definition.architectures:
        if architecture in installed.definition.architectures:
            raise PluginError(
                f"model {given.name!r}: {installed.plugin} builds {architecture}. Give your architecture another name, "
                "here and in the model's config."
            )


def _provided(definition: Definition) -> Provided:
    kinds = [kind for kind, expected in KINDS.items() if isinstance(definition, expected)]
    if not kinds:
        raise PluginError(f"{type(definition).__name__} is no definition. Give a definition of surogate_core.api.")
    name = str(getattr(definition, {"op": "kind", "kernel": "op"}.get(kinds[0], "name")))
    for fault in faults(kinds[0], name, definition):
        raise PluginError(fault)
    return Provided(kinds[0], name, definition, GIVEN)
