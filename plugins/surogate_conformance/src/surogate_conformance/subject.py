"""The plugins to test: of an installed distribution, of a folder with a pyproject.toml, or of one .py file."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surogate.surface import source_files
from surogate_core.errors import ConfigError
from surogate_core.plugins import discovery
from surogate_core.plugins.discovery import GROUP, load_registry
from surogate_core.plugins.provided import Plugin, Provided, State
from surogate_core.plugins.registry import Registry
from surogate_core.words import fold

EXAMPLES = "SUROGATE_EXAMPLES"
"""Name of the mapping of examples in a plugin's module: {"op acme_gate": [{...}, ...]}."""


@dataclass(frozen=True)
class Subject:
    """The plugins of one distribution, loaded or not. file: the one file that they are in; None: a package."""

    name: str
    registry: Registry
    plugins: Sequence[Plugin]
    file: Path | None = None

    @property
    def provided(self) -> list[Provided]:
        return [item for item in self.registry.provided if item.plugin in self.plugins]

    def examples(self, definition: Any) -> list[dict[str, Any]]:
        """Return the examples of a definition; [] if its plugin gives none. Raises ConfigError if they are none."""
        if definition.origin is None:
            return []
        given = getattr(sys.modules[definition.origin.module], EXAMPLES, {})
        name = f"{definition.origin.kind} {definition.origin.name}"
        examples = given.get(name, []) if isinstance(given, Mapping) else None
        if not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples):
            raise ConfigError(f"{EXAMPLES}[{name!r}] is {examples!r:.80}, expected a list of dicts")
        return examples

    def source_files(self) -> list[Path]:
        """Return the Python files of the packages that the entry points are in."""
        if self.file is not None:
            return [self.file]
        return list(dict.fromkeys(path for plugin in self.plugins for path in source_files(plugin)))


@contextmanager
def found(name: str) -> Iterator[Subject]:
    """Find what `name` names: a distribution, a plugin, a folder or a .py file. Raises ConfigError if nothing.

    A folder or file is importable, and has entry points, until the context ends.
    """
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield _find(name)
    finally:
        if sys.path != path:
            for module in set(sys.modules) - modules:
                if str(getattr(sys.modules[module], "__file__", None) or "").startswith(
                    tuple(set(sys.path) - set(path))
                ):
                    del sys.modules[module]
            sys.path[:] = path
            discovery._survey.cache_clear()


def _find(name: str) -> Subject:
    path = Path(name)
    if path.suffix == ".py" or path.is_dir():
        return _of_path(path.resolve())
    return _installed(name)


def _installed(name: str) -> Subject:
    registry = load_registry()
    plugins = [p for p in registry.plugins if fold(name) in (fold(p.distribution), fold(p.name))]
    if not plugins:
        known = ", ".join(sorted({plugin.distribution for plugin in registry.plugins}))
        raise ConfigError(f"{name}: is no installed distribution or plugin, no folder and no .py file. Known: {known}")
    return Subject(plugins[0].distribution, registry, plugins)


def _of_path(path: Path) -> Subject:
    """Return the plugins of a file or folder, after making it importable and giving it entry points in this process."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file")
    file = path if path.is_file() else None
    if file:
        folder = path.parent
        name, version, requires, entries = path.stem, "0", list[str](), {path.stem: path.stem}
        if not _has_hooks(path):
            raise ConfigError(
                f"{path}: has no hooks. A plugin assigns or defines surogate_ops, surogate_models or another"
            )
    else:
        name, version, requires, entries = _metadata(path)
        folder = path / "src" if (path / "src").is_dir() else path
    installed = [p for p in load_registry().plugins if fold(p.distribution) == fold(name)]
    if not installed:
        info = Path(tempfile.mkdtemp(prefix="surogate-subject-"))
        _write_metadata(info / f"{name.replace('-', '_')}-{version}.dist-info", name, version, requires, entries)
        sys.path[:0] = [str(folder), str(info)]
        importlib.invalidate_caches()
        discovery._survey.cache_clear()
    return replace(_installed(name), file=file)


def _has_hooks(path: Path) -> bool:
    """Return whether a file mentions a hook. One with an error in its syntax may: the check of its import says more."""
    try:
        nodes = list(ast.walk(ast.parse(path.read_bytes(), str(path))))
    except (SyntaxError, ValueError):
        return True
    names = (n.id for n in nodes if isinstance(n, ast.Name))
    functions = (n.name for n in nodes if isinstance(n, ast.FunctionDef))
    return any(name.startswith("surogate_") for name in (*names, *functions))


def _metadata(folder: Path) -> tuple[str, str, list[str], dict[str, str]]:
    """Return name, version, requirements and entry points of a folder's pyproject.toml."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        raise ConfigError(f"{folder}: has no pyproject.toml. Name the folder of a package, or a .py file")
    project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    entries = project.get("entry-points", {}).get(GROUP, {})
    if not entries:
        raise ConfigError(f'{file}: has no [project.entry-points.{GROUP}], so it is no plugin. Add: name = "module"')
    return project["name"], project.get("version", "0"), project.get("dependencies", []), entries


def _write_metadata(info: Path, name: str, version: str, requires: Sequence[str], entries: Mapping[str, str]) -> None:
    info.mkdir(parents=True)
    head = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join(head) + "\n", encoding="utf-8")
    points = "".join(f"{entry} = {module}\n" for entry, module in entries.items())
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{points}", encoding="utf-8")


def broken(subject: Subject) -> list[Plugin]:
    """Return the plugins that did not load."""
    return [plugin for plugin in subject.plugins if plugin.state is not State.LOADED]
