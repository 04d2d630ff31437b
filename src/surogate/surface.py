"""The modules that plugins may import: PUBLIC, and those in them. Everything else of core and of the program may change
without notice."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from surogate_core.plugins.provided import Plugin

PUBLIC: Final = ("surogate_core.api", "surogate_core.reference", "surogate_core.testing")

FOR_TESTS: Final = ("surogate.run", "surogate_core.run")
"""The Python API of users: tests train with it. The second is its name until 0.2."""

FOR_SCRIPTS: Final = tuple(
    f"surogate_core.{name}" for name in ("Definitions", "Trained", "train_from", "batch", "train")
)
"""Names by which scripts train without the program (docs/research.md). Tests and pages may use them too."""

_PERHAPS: Final = re.compile(rb"surogate_core\.(?!api\b|reference\b|testing\b)|surogate(_core)?\s+import|surogate\.")


def private_imports(files: Iterable[Path]) -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and module of every import of core or the program that is not public.

    Most files need not be parsed.
    """
    for path in files:
        source = path.read_bytes()
        if not _PERHAPS.search(source):
            continue
        try:
            tree = ast.parse(source, str(path))
        except (SyntaxError, ValueError):  # a file that no module imports
            continue
        public = (
            (*PUBLIC, *FOR_TESTS, *FOR_SCRIPTS) if "tests" in path.parts or path.name.startswith("test_") else PUBLIC
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                package = node.module in ("surogate_core", "surogate")
                names = [f"{node.module}.{alias.name}" for alias in node.names] if package else [node.module]
            else:
                continue
            for name in names:
                owned = name.startswith(("surogate_core.", "surogate."))
                if owned and not f"{name}.".startswith(tuple(f"{p}." for p in public)):
                    yield path, node.lineno, name


def source_files(plugin: Plugin) -> list[Path]:
    """Return the Python files of a plugin: its one file, or those of the package that its entry point names."""
    if plugin.file:
        return [Path(plugin.file)]
    spec = importlib.util.find_spec(plugin.module.partition(".")[0])
    folders = list(spec.submodule_search_locations or []) if spec else []
    alone = [Path(spec.origin)] if spec and spec.origin and not folders else []
    return [path for folder in folders for path in sorted(Path(folder).rglob("*.py"))] + alone
