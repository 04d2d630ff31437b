"""Discovery and loading of plugins: the only file that knows pluggy.

A plugin is an entry point of the group `surogate`: a short unique name and a light module. Every entry point of every
installed distribution gets a state (`registry.State`). A plugin that fails does not affect the others, and none is
skipped silently. pluggy checks hook implementations against `hookspecs.py`. Hooks are called plugin by plugin, so that
an exception names its plugin and the order of registration does not matter.

A file that a config or SUROGATE_PLUGINS names is a plugin too (`files.py`). It is named because it is needed: if it
does not load, that is an error. `SUROGATE_PLUGINS=-name,-other` switches plugins off, by entry name or by distribution.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any, Final

import pluggy

from ..api import Finding, SystemInfo
from ..errors import PluginError, described
from ..front_end import front_end
from ..origin import described_in
from ..version import __version__
from ..words import nearest
from .definition_check import faults
from .files import import_file, place_of, plugin_of
from .hookspecs import HOOKS, KINDS, SPECS
from .provided import CORE, Plugin, Provided, State
from .registry import Registry
from .switch import OFF_SWITCH, is_called, parse_switch
from .versions import PAGE, SERVED, mismatch

GROUP: Final = "surogate"
BUILTIN: Final = Plugin("builtin", CORE, __version__, "surogate_core.builtin")


def load_registry(environ: Mapping[str, str] | None = None, *, files: Sequence[str] = ()) -> Registry:
    """Return the registry of the installed plugins and those in `files`, the key `plugins` of a config.

    Built on the first call, and again for other files or another value of SUROGATE_PLUGINS. Raises PluginError for a
    file that does not load.
    """
    off, more = parse_switch((os.environ if environ is None else environ).get(OFF_SWITCH, ""))
    return _survey(off, tuple(dict.fromkeys(os.path.abspath(file) for file in (*more, *files))))


@lru_cache(maxsize=8)
def _survey(off: frozenset[str] = frozenset(), files: tuple[str, ...] = ()) -> Registry:
    loader = _Loader()
    loader.load(loader.imported(BUILTIN))
    if loader.plugins[0].error is not None:
        raise loader.plugins[0].error
    found = sorted([*_discover(), *map(plugin_of, files)], key=lambda plugin: (plugin.name, plugin.distribution))
    switched = [
        replace(plugin, state=State.BLOCKED, reason=f"switched off by {OFF_SWITCH}")
        if any(is_called(plugin.name, plugin.distribution, word) for word in off)
        else plugin
        for plugin in found
    ]
    # All are imported before any is checked: one of them may be the front end, whose keys options may not have, and
    # whose definitions stand before those of others, as core's do.
    imported = [loader.imported(plugin) for plugin in _refuse_duplicates(switched)]
    for plugin in sorted(imported, key=lambda plugin: plugin.distribution != front_end().distribution):
        loader.load(plugin)
        loaded = loader.plugins[-1]
        if loaded.file and loaded.state not in (State.LOADED, State.BLOCKED):  # the user has named it
            raise PluginError(f"{loaded.file}: {loaded.reason}") from loaded.error
    ops = {item.name for item in loader.provided if item.kind == "op"}
    remarks = loader.remarks + [
        f"plugin '{item.plugin.name}' of {item.plugin} has a kernel for op '{item.name}', which no plugin defines"
        for item in loader.provided
        if item.kind == "kernel" and item.name not in ops
    ]
    idle = sorted(
        word for word in off if not any(is_called(plugin.name, plugin.distribution, word) for plugin in found)
    )
    remarks += [f"{OFF_SWITCH}: no plugin or distribution is called '{word}'" for word in idle]
    return Registry(loader.plugins, loader.provided, loader.diagnose, remarks)


# ----------------------------------------------------------------------------------------------------------- discovery


def _discover() -> Iterator[Plugin]:
    """Yield every entry point of the group without importing it. A distribution that is found twice counts once."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        distribution = entry.dist
        name = distribution.name if distribution else "unknown"
        yield Plugin(entry.name, name, distribution.version if distribution else "unknown", entry.value)


def _refuse_duplicates(plugins: list[Plugin]) -> list[Plugin]:
    """Refuse all plugins that share an entry name: loading the first would make the order decide."""
    result = []
    for plugin in plugins:
        twins = [other for other in plugins if other is not plugin and other.name == plugin.name]
        other = next((twin for twin in twins if twin.state is State.LOADED), None)
        if plugin.state is State.LOADED and other is not None:
            switch = f"uninstall one or set {OFF_SWITCH}=-{other.distribution}"
            if plugin.file or other.file:
                switch = "rename the file"
            reason = f"{other} also has a plugin '{plugin.name}'; {switch}"
            result.append(replace(plugin, state=State.DUPLICATE, reason=reason))
        else:
            result.append(plugin)
    return result


# ------------------------------------------------------------------------------------------------------------- loading


class _Loader:
    """Imports plugins one by one and collects their definitions. A plugin contributes all definitions or none."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager("surogate")
        self._manager.add_hookspecs(SPECS)  # type: ignore[arg-type]  # it reads attributes
        self.plugins: list[Plugin] = []
        self.provided: list[Provided] = []
        self.remarks: list[str] = []
        self._modules: dict[str, ModuleType] = {}

    def imported(self, plugin: Plugin) -> Plugin:
        """Import the module of a plugin, and return the plugin with its state. Errors are recorded, not raised."""
        if plugin.state is not State.LOADED:
            return plugin
        before = set(sys.modules)
        try:
            self._modules[_id(plugin)] = import_file(plugin) if plugin.file else importlib.import_module(plugin.module)
        except (Exception, SystemExit) as error:
            hint = ". An entry point names a module, without :object" if ":" in plugin.module else ""
            missing = re.search(r"'([\w.]+)'", str(error)) if isinstance(error, ImportError) else None
            if missing and any(missing[1] in text for served in SERVED.values() for text in served.changes.values()):
                hint = f". {PAGE} says what changed in {CORE}"
            reason = f"import of {plugin.module} failed: {described_in(error, plugin.module)}{hint}"
            if plugin.file:
                reason = f"import failed: {described(error)} ({place_of(error, plugin.file)}){hint}"
            return replace(plugin, state=State.BROKEN, reason=reason, error=error)
        self._remark_torch(plugin, before)
        return plugin

    def load(self, plugin: Plugin) -> None:
        """Record the plugin with its state, and what it provides. Errors are recorded, not raised."""
        if plugin.state is not State.LOADED:
            self.plugins.append(plugin)
            return
        before, module = set(sys.modules), self._modules[_id(plugin)]
        hooks = [hook for hook in SERVED if inspect.isfunction(getattr(module, f"surogate_{hook}", None))]
        reason = "" if plugin is BUILTIN else mismatch(plugin, getattr(module, "SUROGATE_API", None), hooks)
        if reason:
            self.plugins.append(replace(plugin, state=State.WRONG_API, reason=reason))
            return
        try:
            self._register(plugin, module)
            provided = [item for hook, kind in HOOKS.items() for item in self._ask(plugin, hook, kind)]
            if plugin.file and not self._manager.get_hookcallers(module):
                hint = "a hook is such as surogate_ops = provides([...])"
                raise _failure(plugin, "registration", f"has no hook; {hint}")
        except PluginError as error:
            if self._manager.has_plugin(_id(plugin)):
                self._manager.unregister(name=_id(plugin))
            self.plugins.append(replace(plugin, state=State.BROKEN, reason=str(error), error=error))
            return
        self.plugins.append(plugin)
        self.provided += provided
        self._remark_torch(plugin, before)

    def _remark_torch(self, plugin: Plugin, before: Collection[str]) -> None:
        if "torch" in sys.modules and "torch" not in before:
            advice = "which makes every command start slower; import it in the functions that need it"
            self.remarks.append(f"plugin '{plugin.name}' of {plugin} imports torch when it is loaded, {advice}")

    def _register(self, plugin: Plugin, module: ModuleType) -> None:
        """Register a module's hooks. Raise PluginError for unknown hooks, wrong arguments, defaults and wrappers."""
        for name, function in inspect.getmembers(module, inspect.isfunction):
            _check_hook(plugin, name, function, self._manager.parse_hookimpl_opts(module, name))
        try:
            self._manager.register(module, name=_id(plugin))
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise _failure(plugin, "registration", " ".join(str(error).split())) from error

    def _ask(self, plugin: Plugin, hook: str, kind: str) -> list[Provided]:
        expected = KINDS[kind]
        items = []
        for definition in self._call(plugin, hook):
            if not isinstance(definition, expected):
                found = type(definition).__name__
                raise _failure(plugin, f"{hook}()", f"returned {found} in its list, expected {expected.__name__}")
            name = str(getattr(definition, {"op": "kind", "kernel": "op"}.get(kind, "name")))
            if plugin is not BUILTIN:
                for fault in faults(kind, name, definition):
                    raise _failure(plugin, f"{hook}()", fault)
            items.append(Provided(kind, name, definition, plugin))
        return items

    def _call(self, plugin: Plugin, hook: str, **arguments: Any) -> list[Any]:
        """Call a hook of one plugin; [] if it does not implement the hook. Raise PluginError that names the plugin."""
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            if implementation.plugin_name != _id(plugin):
                continue
            try:
                answer = implementation.function(*(arguments[name] for name in implementation.argnames))
                return list(answer)
            except (Exception, SystemExit) as error:
                raise _failure(plugin, f"{hook}()", described_in(error, plugin.module)) from error
        return []

    def diagnose(self, system: SystemInfo) -> list[tuple[Plugin, Finding]]:
        """Return the findings of every loaded plugin. A plugin that fails becomes a finding itself."""
        findings = []
        for plugin in self.plugins:
            try:
                answers = self._call(plugin, "surogate_diagnose", system=system)
                for answer in answers:
                    if not isinstance(answer, Finding) or answer.level not in ("ok", "warning", "error"):
                        what = f"returned {answer!r:.80} in its list, expected a Finding of level ok, warning or error"
                        raise _failure(plugin, "surogate_diagnose()", what)
            except PluginError as error:
                answers = [
                    Finding("error", plugin.name, str(error), f"report it to the author of {plugin.distribution}")
                ]
            findings += [(plugin, finding) for finding in answers]
        return findings


def _id(plugin: Plugin) -> str:
    return f"{plugin.name} of {plugin.distribution}"


def _check_hook(plugin: Plugin, name: str, function: Any, options: Any) -> None:
    """Refuse what pluggy accepts silently or treats differently in different versions."""
    if not name.startswith("surogate_"):
        if options is not None:
            raise _failure(plugin, f"{name}()", "is marked as a hook, but names of hooks start with surogate_")
        return
    known = sorted((*HOOKS, "surogate_diagnose"))
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean {near}?" if near else f"hooks: {', '.join(known)}"
        raise _failure(plugin, f"{name}()", f"is an unknown hook; {hint}")
    if options is None:
        raise _failure(
            plugin, f"{name}()", 'is not marked as a hook: decorate it with @pluggy.HookimplMarker("surogate")'
        )
    if options["wrapper"] or options["hookwrapper"]:
        raise _failure(plugin, f"{name}()", "is a wrapper; hooks only return lists")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not parameter.empty:
            raise _failure(plugin, f"{name}()", f"argument '{parameter.name}' has a default; hooks take none")


def _failure(plugin: Plugin, where: str, what: str) -> PluginError:
    return PluginError(f"plugin {plugin} failed in {where}: {what}")
