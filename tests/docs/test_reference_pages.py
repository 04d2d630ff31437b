"""The generated pages of docs/reference are those of the source."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

import surogate_core.api

REFERENCE = Path(__file__).parents[2] / "docs/reference"


def generator(name: str) -> ModuleType:
    """Import a script of docs/reference."""
    spec = importlib.util.spec_from_file_location(f"reference_{name}", REFERENCE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_listing_of_the_surface_is_that_of_the_source() -> None:
    assert (REFERENCE / "api.txt").read_text() == generator("api").listing(), (
        "what plugins import of core changed. Run `python docs/reference/api.py > docs/reference/api.txt`, review its "
        "diff, and raise the integers of the hooks whose plugins must change in plugins/versions.py"
    )


def test_the_page_of_the_versions_of_hooks_is_that_of_the_table() -> None:
    assert (REFERENCE / "hooks.md").read_text() == generator("hooks").page(), (
        "run `python docs/reference/hooks.py > docs/reference/hooks.md`"
    )


def test_the_listing_has_every_public_name_of_the_api() -> None:
    listed = (REFERENCE / "api.txt").read_text().partition("surogate_core.api.")[0]
    missing = [
        name
        for name in surogate_core.api.__all__
        if not any(f"\n{start}{name}" in listed for start in ("", "def ", "class "))
    ]
    assert not missing


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(a: int, *, b: str = 'x') -> None: ...", ["def f(a: int, *, b: str='x') -> None"]),
        ("@dataclass(frozen=True)\nclass C(B):\n    'Doc.'\n    x: int = 3\n    _y: int = 4\n    def _z(self): ...",
         ["@dataclass(frozen=True)", "class C(B)", "    x: int = 3"]),
        ("WIDTHS: tuple[int, ...] = (1, 2)", ["WIDTHS: tuple[int, ...] = (1, 2)"]),
    ],
)  # fmt: skip
def test_a_signature_a_field_or_a_value_is_a_line(source: str, lines: list[str], tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(source)
    node = ast.parse(source).body[0]
    name = node.target.id if isinstance(node, ast.AnnAssign) else node.name  # type: ignore[union-attr,attr-defined]
    assert list(generator("api").described(name, (file, name))) == lines
