"""The generated pages of docs/reference are those of the source."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import sys
import warnings
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import surogate_core.api
import surogate_models.api
from surogate_core import __version__
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


def test_the_docstrings_of_pages_are_those_of_the_source() -> None:
    docstrings = generator("docstrings")
    stale = [str(path) for path in docstrings.pages() if docstrings.filled(path.read_text()) != path.read_text()]
    assert not stale, "run `python docs/reference/docstrings.py`"


def test_the_page_of_docstrings_has_the_modules_of_the_listing() -> None:
    listed = re.findall(r"^surogate_\w+\.[\w.]+$", (REFERENCE / "api.txt").read_text(), re.M)
    shown = re.findall(r"^<!-- docstrings: (\S+) -->$", (REFERENCE / "plugin-api.md").read_text(), re.M)
    assert sorted(shown) == sorted(listed)


PAGE = """## A thing

<!-- docstrings: surogate_core.api.models.Metric -->
stale
<!-- end of docstrings -->
"""


def test_a_definition_is_shown_with_its_fields_and_its_docstring_as_markdown() -> None:
    lines = generator("docstrings").filled(PAGE).split("\n")
    assert lines[:5] == ["## A thing", "", PAGE.split("\n")[2], "", "### `Metric`"] and "stale" not in lines
    assert "    per: Unit = 'token'" in lines
    assert any(line.startswith("| `of` | (value, a float or a numpy array) -> the number") for line in lines)
    assert lines[-2] == "<!-- end of docstrings -->"


@pytest.mark.parametrize(
    ("docstring", "lines"),
    [
        ("A sum.\n\nRaises x * y <z>.", ["A sum.", "", r"Raises x \* y \<z>.", ""]),
        ("As here:\n\n    f(1)\n\n    g(2)\n\nThen.",
         ["As here:", "", "```text", "f(1)", "", "g(2)", "```", "", "Then.", ""]),
        ("Sizes.\n\nx, y    both\n        of them\nlong_name\n        a|b\n",
         ["Sizes.", "", "| name | meaning |", "|---|---|", "| `x, y` | both of them |", r"| `long_name` | a\|b |", ""]),
    ],
)  # fmt: skip
def test_a_docstring_is_markdown(docstring: str, lines: list[str]) -> None:
    assert list(generator("docstrings")._text(docstring, ())) == lines


def test_a_page_that_names_nothing_is_told() -> None:
    with pytest.raises(LookupError, match=r"^surogate_core\.nothing: no such module or definition in surogate_core"):
        generator("docstrings").filled(
            "## A\n\n<!-- docstrings: surogate_core.nothing -->\n<!-- end of docstrings -->\n"
        )


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


def test_the_page_of_the_ops_of_packages_is_that_of_their_definitions() -> None:
    assert (REFERENCE / "package-ops.md").read_text() == generator("package_ops").page(), (
        "run `python docs/reference/package_ops.py > docs/reference/package-ops.md`"
    )


def test_ops_that_others_may_emit_are_named_by_the_api_of_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of a package without such a module; and no name that the package has no op for."""
    page = generator("package_ops")
    may = {package: page.emitted(ops) for package, ops in page.packages().items()}
    assert {package for package, kinds in may.items() if kinds} == {"surogate-models", "surogate-models-moe"}
    assert "route" in may["surogate-models-moe"] and "route_bwd" not in may["surogate-models-moe"]
    monkeypatch.setattr(surogate_models.api, "__doc__", f"{page.BEGINS} `rope` and `gone`.")
    with pytest.raises(ValueError, match=r"surogate_models\.api names gone, no op of its package"):
        page.emitted(page.packages()["surogate-models"])


def test_the_page_of_what_is_supported_is_that_of_the_definitions_and_plans() -> None:
    assert (REFERENCE / "supported.md").read_text() == generator("supported").page(), (
        "run `python docs/reference/supported.py > docs/reference/supported.md`"
    )


def test_the_page_of_the_fifty_models_is_that_of_the_packages_and_of_transformers() -> None:
    assert (REFERENCE / "fifty.md").read_text() == generator("fifty").page(), (
        "run `python docs/reference/fifty.py > docs/reference/fifty.md`"
    )


def test_transformers_has_the_class_of_each_of_the_fifty_models_and_it_takes_the_config() -> None:
    page = generator("fifty")
    every = page.models()
    assert len({model.id for model in every}) == 50
    of_class = {model.architecture: model for model in every}  # one of each: they are built in full
    assert all(page.tensors(model.config_json) for model in of_class.values())


def test_a_tensor_that_the_package_has_not_is_named() -> None:
    page = generator("fifty")
    model = next(model for model in page.models() if model.architecture == "Qwen3ForCausalLM")
    held = dict(page.tensors(model.config_json))
    assert not list(page.mismatches(page.opened(model.config_json), held))
    name = "model.layers.3.self_attn.q_norm.weight"
    other = {"model.visual.w": (1,), "model.visual.b": (1,), name: (1,)}
    del held["model.norm.weight"]
    assert list(page.mismatches(page.opened(model.config_json), held | other)) == [
        "a checkpoint lacks `model.norm.weight`",
        "it holds besides `model.visual.b` and 1 more",
        f"another shape has `{name}`",
    ]


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


LISTING = """What plugins may import.


acme.api

def scale(x: int) -> int

@dataclass(frozen=True, kw_only=True)
class Thing(Definition)
    name: str
    size: int = 1
    @property
    def whole(self) -> bool

LIMIT = 8
"""


@pytest.mark.parametrize(
    ("old", "new", "differences"),
    [
        ("", "", []),
        ("    size: int = 1\n", "    size: int = 1\n    place: str = ''\n", []),
        ("    @property\n", "    @property\n    def part(self) -> int\n    @property\n", []),
        ("    size: int = 1\n", "    size: int = 1\n    place: str\n", ["acme.api.Thing needs place: str"]),
        ("    size: int = 1\n", "", ["acme.api.Thing: size: int = 1"]),
        ("    name: str\n    size: int = 1\n", "    size: int = 1\n    name: str\n",
         ["acme.api.Thing: its lines have another order"]),
        ("    @property\n", "", ["acme.api.Thing: @property def whole(self) -> bool"]),
        ("x: int)", "y: int)", ["acme.api.scale: def scale(x: int) -> int"]),
        (", kw_only=True", "", ["acme.api.Thing: @dataclass(frozen=True, kw_only=True) class Thing(Definition)"]),
        ("LIMIT = 8\n", "", ["acme.api.LIMIT has gone"]),
        ("LIMIT = 8", "LEAST = 8", ["acme.api.LIMIT has gone"]),
        ("def scale(x: int) -> int\n\n", "", []),
        ("acme.api\n", "acme.api.deep\n", ["acme.api.Thing has gone", "acme.api.LIMIT has gone"]),
    ],
)  # fmt: skip
def test_a_listing_keeps_every_line_of_an_earlier_one_or_warns(
    old: str, new: str, differences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deprecated(name: str) -> object:
        if name != "scale":
            raise AttributeError(name)
        warnings.warn("acme.api.scale is gone: use resize", DeprecationWarning, stacklevel=2)
        return len

    module = ModuleType("acme.api")
    module.__getattr__ = deprecated  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "acme", ModuleType("acme"))
    monkeypatch.setitem(sys.modules, "acme.api", module)
    assert list(generator("released").differences(LISTING, LISTING.replace(old, new))) == differences


def test_the_listing_has_what_the_last_release_had() -> None:
    page = generator("released")
    released = page.RELEASED.read_text()
    assert released.startswith(f"Release {__version__}\n"), "write it: see Release in CONTRIBUTING.md"
    assert set(page.differences(released, (REFERENCE / "api.txt").read_text())) == set(page.ACCEPTED), (
        "plugins of the last release miss these. Keep the names, with a warning, or say in released.py why not"
    )


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
