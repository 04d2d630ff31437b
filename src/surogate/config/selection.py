"""Keys that select plugins by name: `recipe`, `optimizer`, `launcher`, `loss`, `adapter`, `report_to`."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from surogate_core.words import fold, nearest

from .errors import Findings, Problem, shown, shown_key
from .keys import DISTRIBUTIONS, NOT_YET_NAMES, foreign
from .registry import Registry
from .schema import TrainConfig

REQUIRED = ("recipe", "optimizer", "launcher", "loss")
"""Kinds of plugins of which every run has one, selected by the key of the same name."""

AUTO = "auto"
"""The launcher is the one that recognises the environment, or whose own key the config has."""

OPTIONAL = ("adapter",)
"""Kinds of plugins that a run can do without: `none`, the default, selects nothing."""


def registered_name(kind: str, key: str, value: str, registry: Registry, findings: Findings) -> str | None:
    """Return the registered spelling of the name `value` of `key`; None, with a problem, if no plugin provides it."""
    names = {fold(name): name for name in registry.names(kind)}
    found = names.get(fold(value))
    if found is not None:
        return found
    instead = NOT_YET_NAMES.get((kind, fold(value)))
    if instead is not None:
        findings.wrong(key, f"{shown_key(value)}: not yet: it is not built; {instead}")
        return None
    elsewhere = foreign().get(kind, {}).get(fold(value))
    if elsewhere is not None:
        findings.wrong(key, f"{shown_key(value)} is unknown; {elsewhere}")
        return None
    # The exact name of a package that is not installed is no misspelling of one that is.
    guess = None if (kind, fold(value)) in DISTRIBUTIONS else nearest(value, names)
    if guess is not None:
        findings.wrong(key, f"{shown_key(value)} is unknown; did you mean {names[guess]}?")
    else:
        missing = registry.missing(kind, shown_key(value))
        text = str(missing).removeprefix(f"{kind}: ")
        findings.problems.append(Problem(key, text, error=missing))
        findings.failed.add(key)
    return None


def select_plugins(core: dict[str, Any], plugin_keys: Collection[str], registry: Registry, findings: Findings) -> None:
    """Replace the names of plugins in `core` by their registered spellings. plugin_keys: those that the config has.

    A name that cannot be used is removed, so that validation continues with the default.
    """
    launcher = core.get("launcher", AUTO)
    if launcher is None or (isinstance(launcher, str) and fold(launcher) == AUTO):
        core["launcher"] = _recognised_launcher(plugin_keys, registry, findings)
    for kind in REQUIRED:
        _select(core, kind, registry, findings)
    for kind in OPTIONAL:
        value = core.get(kind)
        if value is None or (isinstance(value, str) and fold(value) == "none"):
            core.pop(kind, None)
        else:
            _select(core, kind, registry, findings)
    _select_loggers(core, registry, findings)


def _recognised_launcher(plugin_keys: Collection[str], registry: Registry, findings: Findings) -> str:
    """Return the launcher whose variables are set, or whose own key is given; core's own if there is none."""
    found = {
        name: signs
        for name, launcher in registry.launchers().items()
        if (signs := launcher.matches(os.environ) or (launcher.key if launcher.key in plugin_keys else ""))
    }
    if len(found) > 1:
        each = " and ".join(f"{name} (by {signs})" for name, signs in found.items())
        findings.wrong("launcher", f"auto: {each} would start this run. Choose one of them")
    return next(iter(found), "local")


def _select(core: dict[str, Any], kind: str, registry: Registry, findings: Findings) -> None:
    value = core.get(kind, TrainConfig.model_fields[kind].default)
    if kind not in findings.failed and not (isinstance(value, str) and value.strip()):
        findings.wrong(kind, f"must be a name (got {shown(value)})")
    name = None if kind in findings.failed else registered_name(kind, kind, value, registry, findings)
    core.pop(kind, None)
    if name is not None:
        core[kind] = name


def _select_loggers(core: dict[str, Any], registry: Registry, findings: Findings) -> None:
    value = core.pop("report_to", ())
    names = [value] if isinstance(value, str) else value
    if "report_to" in findings.failed:
        return
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        findings.wrong("report_to", f"must be a name or a list of names (got {shown(value)})")
        return
    found = [
        registered_name("logger", "report_to", name, registry, findings)
        for name in names
        if fold(name) not in ("none", "")
    ]
    core["report_to"] = [name for name in found if name is not None]
