"""The generated pages of docs/reference are those of the source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import surogate_core.api
from surogate_core.api import OpDef
from surogate_core.plugins.discovery import load_registry
from surogate_core.reference.ops import load
from surogate_core.testing.programs import STANDARD_OPS

REFERENCE = Path(__file__).parents[2] / "docs/reference"


@cache
def generator(name: str) -> ModuleType:
    """Import a script of docs/reference."""
    spec = importlib.util.spec_from_file_location(f"reference_{name}", REFERENCE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_listing_of_the_surface_is_that_of_the_source() -> None:
    assert (REFERENCE / "api.txt").read_text() == generator("api").listing(), (
        "what plugins import of core changed. Run `python docs/reference/api.py > docs/reference/api.txt`, review its "
        "diff, and raise the integers of the hooks whose plugins must change in plugins/versions.py"
    )


def test_the_page_of_docstrings_has_the_modules_of_the_listing() -> None:
    listed = re.findall(r"^surogate_core\.[\w.]+$", (REFERENCE / "api.txt").read_text(), re.M)
    shown = re.findall(r"^\.\. automodule:: (\S+)$", (REFERENCE / "plugin-api.md").read_text(), re.M)
    assert sorted(shown) == sorted(listed)


def test_the_page_of_the_keys_is_that_of_the_models_and_tables() -> None:
    assert (REFERENCE / "config.md").read_text() == generator("config").page(), (
        "run `python docs/reference/config.py > docs/reference/config.md`"
    )


def test_the_page_of_the_versions_of_hooks_is_that_of_the_table() -> None:
    assert (REFERENCE / "hooks.md").read_text() == generator("hooks").page(), (
        "run `python docs/reference/hooks.py > docs/reference/hooks.md`"
    )


def test_the_page_of_the_standard_ops_is_that_of_their_definitions() -> None:
    assert (REFERENCE / "ops.md").read_text() == generator("ops").page(), (
        "run `python docs/reference/ops.py > docs/reference/ops.md`"
    )


def test_the_page_of_what_is_supported_is_that_of_the_definitions_and_plans() -> None:
    assert (REFERENCE / "supported.md").read_text() == generator("supported").page(), (
        "run `python docs/reference/supported.py > docs/reference/supported.md`"
    )


def test_the_page_of_models_has_every_architecture() -> None:
    rows = re.findall(r"^\| (`\w+For[^|]*) \|", (REFERENCE.parent / "models.md").read_text(), re.M)
    provided = (p.definition.architectures for p in load_registry().provided if p.kind == "model")
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(name for names in provided for name in names)


@pytest.mark.parametrize("definition", STANDARD_OPS, ids=lambda definition: definition.kind)
def test_the_inputs_of_an_op_are_called_as_in_its_reference(definition: OpDef) -> None:
    shown = generator("ops").EXAMPLES[definition.kind]
    definition.check_attrs(shown.attrs)
    parameters = inspect.signature(load(definition.reference)).parameters.values()
    named = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    listed = [value.name for value in generator("ops").inputs(shown.ins, True)]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        assert len(listed) == 2 if definition.kind == "reference_vjp" else shown.ins.endswith(" ...")
        return
    assert listed == [p.name for p in named]
    assert shown.ins.count("?") == sum(p.default is None for p in named)


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
