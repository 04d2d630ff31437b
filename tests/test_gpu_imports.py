"""Tests that need a GPU are collected where there is one alone. What they import exists all the same."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """The names that a file imports from packages of this project when it is imported: (module, name)."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("surogate") and not node.level:
            yield from ((node.module, alias.name) for alias in node.names if alias.name != "_C")


def exists(module: str, name: str) -> bool:
    found = import_module(module)
    if not hasattr(found, name) and hasattr(found, "__path__"):
        import_module(f"{module}.{name}")  # becomes an attribute
    return hasattr(found, name)


def test_names_that_gpu_tests_import_exist() -> None:
    files = sorted(
        path for folder in ("tests", "*/tests", "plugins/*/tests") for path in ROOT.glob(f"{folder}/gpu/*.py")
    )
    assert len(files) > 70
    missing = [
        f"{path.relative_to(ROOT)}: {module} has no {name}"
        for path in files
        for module, name in imported(path)
        if not exists(module, name)
    ]
    assert not missing
