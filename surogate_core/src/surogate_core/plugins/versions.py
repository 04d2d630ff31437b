"""The version of each hook: which ones core serves, and what changed from one to the next.

A plugin declares what it was written for: `SUROGATE_API = {"ops": 1, "recipes": 1}`. Changing a definition, or what
its functions get, so that plugins must change, raises `newest` of the hook and adds a line to its `changes`. `oldest`
stays as it is while core can serve both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Final

from ..errors import PluginError
from ..version import __version__
from ..words import nearest
from .hookspecs import HOOKS
from .provided import CORE, Plugin

PAGE: Final = "docs/reference/hooks.md"
"""The page that lists all changes."""


@dataclass(frozen=True)
class Served:
    """The versions of a hook that core serves. changes: what a plugin must change to reach each one after the first."""

    oldest: int = 1
    newest: int = 1
    changes: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


SERVED: Final = {hook.removeprefix("surogate_"): Served() for hook in (*HOOKS, "surogate_diagnose")}
"""By the name of the hook without `surogate_`. Version 1 of each is that of release 0.2.0, the first one."""


def refuse_other_program(package: str) -> None:
    """Raise PluginError unless the program `surogate` has the minor version of `package`, whose command it runs.

    The metadata of a package that `surogate` requires cannot require `surogate`.
    """
    own, program = (version(name) for name in (package, "surogate"))
    if own.split(".")[:2] != program.split(".")[:2]:
        raise PluginError(f"{package} {own} runs in surogate {own}, not {program}. pip install -U surogate {package}")


def mismatch(plugin: Plugin, declared: object, hooks: Sequence[str]) -> str:
    """Return why a plugin that has `hooks` and declares these versions is not served, and what to do; "" if it is."""
    update = "" if plugin.file else f" Try: pip install -U {plugin.distribution}"
    subject = "" if plugin.file else f"{plugin.module} "
    numbers = declared if isinstance(declared, Mapping) else {}
    if not isinstance(declared, Mapping) or any(type(number) is not int or number < 1 for number in numbers.values()):
        found = "declares no SUROGATE_API" if declared is None else f"has SUROGATE_API = {declared!r:.60}"
        wanted = {hook: SERVED[hook].newest for hook in hooks or ("ops",)}
        return f"{subject}{found}, not a number for each hook. {_write(wanted)}.{update}"
    for hook in numbers:
        if hook not in SERVED:
            near = nearest(str(hook), SERVED)
            hint = f"did you mean {near}?" if near else f"hooks: {', '.join(SERVED)}"
            return f"{subject}has a number for {hook!r} in SUROGATE_API, which is no hook; {hint}"
    if missing := [hook for hook in hooks if hook not in numbers]:
        wanted = {**numbers, **{hook: SERVED[hook].newest for hook in missing}}
        return f"{subject}has no number for {', '.join(missing)} in SUROGATE_API. {_write(wanted)}.{update}"
    for hook, number in numbers.items():
        served = SERVED[hook]
        known = (
            f"{subject}is written for version {number} of surogate_{hook}, surogate-core {__version__} serves {served}"
        )
        if number > served.newest:
            return f"{known}. {PAGE} of a newer release says what changed. Try: pip install -U {CORE}"
        if number < served.oldest:
            changes = "; ".join(f"{at}: {text}" for at, text in served.changes.items() if at > number)
            return f"{known}. Changed in {changes} ({PAGE}).{update}"
    return ""


def _write(wanted: Mapping[str, int]) -> str:
    return f"Write SUROGATE_API = {json.dumps(wanted)}, and see {PAGE} for what changed"
