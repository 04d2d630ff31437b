"""`surogate plugins`: every plugin found, what it provides, and what is wrong with each that did not load."""

from __future__ import annotations

import json
import traceback
from typing import Any, Final

from ..api import API
from ..plugins.discovery import survey
from ..plugins.registry import KINDS, Plugin, Registry, State
from .external import Verb, all_verbs
from .render import output_width, paint, paragraph, print_error, print_warning, table, traceback_wanted

MOST_NAMES: Final = 6
"""Names listed of a kind; above that the table tells their number and `--json` the names."""


def plugins_command(as_json: bool) -> int:
    """Print the table or JSON. 2 when plugins are in conflict, else 0."""
    registry = survey()
    verbs = all_verbs()
    if as_json:
        print(json.dumps(_as_json(registry, verbs), indent=2))
    else:
        _print_table(registry, verbs)
    for conflict in registry.conflicts:
        print_error(conflict)
    return 2 if registry.conflicts else 0


def provides(registry: Registry, plugin: Plugin) -> dict[str, list[str]]:
    """Names of what a plugin provides, by kind."""
    names: dict[str, list[str]] = {}
    for kind in KINDS:
        found = {item.name for item in registry.provided if item.kind == kind and item.plugin == plugin}
        if found:
            names[kind] = sorted(found)
    return names


def _as_json(registry: Registry, verbs: list[Verb]) -> dict[str, Any]:
    return {
        "api": API,
        "plugins": [
            {
                "name": plugin.name,
                "distribution": plugin.distribution,
                "version": plugin.version,
                "module": plugin.module,
                "state": str(plugin.state),
                "reason": plugin.reason,
                "traceback": _traceback(plugin),
                "provides": provides(registry, plugin),
            }
            for plugin in registry.plugins
        ],
        "commands": [
            {
                "name": verb.name,
                "distribution": verb.distribution,
                "version": verb.version,
                "value": verb.entry.value,
                "problem": verb.problem,
            }
            for verb in verbs
        ],
        "conflicts": list(registry.conflicts),
        "notices": list(registry.notices),
    }


def _print_table(registry: Registry, verbs: list[Verb]) -> None:
    width = output_width()
    rows = [("NAME", "DISTRIBUTION", "VERSION", "STATE", "PROVIDES")]
    rows += [
        (plugin.name, plugin.distribution, plugin.version, str(plugin.state), _summary(provides(registry, plugin)))
        for plugin in registry.plugins
    ]
    rows += [(verb.name, verb.distribution, verb.version, "verb", verb.problem or "a command") for verb in verbs]
    print(table(rows, width))
    for plugin in registry.plugins:
        if plugin.state is not State.LOADED:
            print(f"\n{paint(plugin.name, 'bold')} ({plugin}) {plugin.state}")
            print(paragraph(plugin.reason, width, "  "))
            if plugin.error is not None and traceback_wanted():
                print("\n" + "\n".join(f"  {line}" for line in _traceback(plugin).splitlines()))
    idle = [notice for notice in registry.notices if notice.startswith("SUROGATE_PLUGINS")]
    for notice in idle:
        print_warning(notice)


def _summary(names: dict[str, list[str]]) -> str:
    parts = [
        f"{kind} {', '.join(found)}" if len(found) <= MOST_NAMES else f"{len(found)} {kind}s"
        for kind, found in names.items()
    ]
    return "; ".join(parts) or "-"


def _traceback(plugin: Plugin) -> str:
    if plugin.error is None:
        return ""
    return "".join(traceback.format_exception(plugin.error.__cause__ or plugin.error))
