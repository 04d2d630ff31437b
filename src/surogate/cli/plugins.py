"""`surogate plugins`: every plugin found, what it provides, and why it did not load if it did not."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, Final

from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.hookspecs import KINDS
from surogate_core.plugins.provided import CORE, Plugin, State
from surogate_core.plugins.registry import Registry
from surogate_core.plugins.versions import SERVED

from ..config.plugin_files import plugin_files, read_run
from ..surface import PUBLIC, private_imports, source_files
from .external import Command, all_commands
from .json_output import print_json
from .render import output_width, paint, paragraph, print_error, print_warning, table, traceback_wanted

_SHOWN: Final = ("name", "distribution", "version", "module", "file", "state", "reason")
MOST_NAMES: Final = 6
"""Names of a kind that the table lists; if there are more it shows their number, and `--json` has the names."""


def plugins_command(config: Path | None, as_json: bool) -> int:
    """Print the table or JSON. Return 2 if plugins are in conflict or could not be loaded, else 0."""
    registry = load_registry(files=plugin_files(read_run(config, ())) if config else ())
    commands = all_commands()
    if as_json:
        print_json(_as_json(registry, commands))
    else:
        _print_table(registry, commands)
    for conflict in registry.conflicts:
        print_error(conflict)
    broken = any(plugin.state not in (State.LOADED, State.BLOCKED) for plugin in registry.plugins)
    return 2 if registry.conflicts or broken else 0


def provides(registry: Registry, plugin: Plugin) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for kind in KINDS:
        found = {item.name for item in registry.provided if item.kind == kind and item.plugin == plugin}
        if found:
            names[kind] = sorted(found)
    return names


def _as_json(registry: Registry, commands: list[Command]) -> dict[str, Any]:
    return {
        "api": {hook: {"oldest": served.oldest, "newest": served.newest} for hook, served in SERVED.items()},
        "plugins": [
            {
                **{key: getattr(plugin, key) for key in _SHOWN},
                "traceback": _traceback(plugin),
                "provides": provides(registry, plugin),
                "private_imports": _private_imports(plugin),
            }
            for plugin in registry.plugins
        ],
        "commands": [
            {
                "name": command.name,
                "distribution": command.distribution,
                "version": command.version,
                "value": command.entry.value,
                "problem": command.problem,
            }
            for command in commands
        ],
        "conflicts": list(registry.conflicts),
        "notices": list(registry.notices),
    }


def _print_table(registry: Registry, commands: list[Command]) -> None:
    width = output_width()
    rows = [("NAME", "DISTRIBUTION", "VERSION", "STATE", "PROVIDES")]
    rows += [
        (plugin.name, plugin.distribution, plugin.version, str(plugin.state), _summary(provides(registry, plugin)))
        for plugin in registry.plugins
    ]
    rows += [(c.name, c.distribution, c.version, "command", c.problem or "a command") for c in commands]
    print(table(rows, width))
    for plugin in registry.plugins:
        if plugin.state is not State.LOADED:
            print(f"\n{paint(plugin.name, 'bold')} ({plugin}) {plugin.state}")
            print(paragraph(plugin.reason, width, "  "))
            if plugin.error is not None and traceback_wanted():
                print("\n" + "\n".join(f"  {line}" for line in _traceback(plugin).splitlines()))
    for remark in registry.remarks:
        print_warning(remark)
    for plugin in registry.plugins:
        if imported := _private_imports(plugin):
            modules, public = ", ".join(imported), ", ".join(PUBLIC)
            print_warning(f"plugin '{plugin.name}' of {plugin} imports {modules}, which may change; public: {public}")


def _private_imports(plugin: Plugin) -> list[str]:
    """Return the modules of core that a loaded plugin imports and that are not public."""
    if plugin.state is not State.LOADED or plugin.distribution in (CORE, "surogate"):
        return []
    return sorted({module for _, _, module in private_imports(source_files(plugin))})


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
