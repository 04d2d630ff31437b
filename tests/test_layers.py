"""Who may import whom, what core may name, and how large the program layer may grow. Read from the source by ast."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from surogate_core.plugins.hookspecs import HOOKS
from surogate_core.plugins.surface import private_imports

ROOT = Path(__file__).parents[1]
CORE = ROOT / "surogate_core/src/surogate_core"
PLUGINS = [
    path
    for path in (*ROOT.glob("*/src/surogate_*"), *ROOT.glob("plugins/*/src/*"))
    if path.name != "surogate_core" and path.is_dir() and (path / "plugin.py").exists()
]

MAY_IMPORT: Mapping[str, set[str]] = {
    part: set(parts.split())
    for part, parts in {
        "__init__": "",
        "errors": "",
        "dtypes": "",
        "origin": "errors",
        "program": "dtypes errors origin",
        "api": "dtypes errors origin program",
        "standard_ops": "api dtypes errors program",
        "world": "api errors",
        "machine": "api errors",
        "memory": "api machine program",
        "hub": "api errors",
        "config": "api errors",
        "plugins": "api config dtypes errors origin program",
        "data": "api config errors hub machine",
        "reference": "dtypes program",
        "assembly": "api config dtypes errors machine memory origin plugins program",
        "planning": "api assembly config data errors hub machine memory plugins program",
        "fitting": "api assembly config errors machine memory planning program",
        "runtime": "api assembly data dtypes errors machine memory origin program reference world",
        "testing": "api dtypes machine memory plugins program reference runtime standard_ops",
        "reporting": "api config errors machine memory origin plugins program",
        "builtin": "api data machine reporting runtime standard_ops world",
        "checkpoint": (
            "api assembly config data dtypes errors hub machine memory planning plugins program reference "
            "reporting runtime"
        ),
        "outputs": "api checkpoint config errors hub machine planning plugins reporting",
        "train": (
            "api assembly checkpoint config data dtypes errors machine memory outputs planning plugins reference "
            "reporting runtime world"
        ),
        "training": (
            "api assembly checkpoint config errors fitting hub machine outputs planning plugins runtime train world"
        ),
        "run": (
            "api assembly checkpoint config data errors fitting hub machine memory outputs planning plugins "
            "runtime train training"
        ),
        "cli": (
            "api assembly config data errors fitting machine memory origin planning plugins program "
            "reporting run runtime training"
        ),
        "__main__": "cli",
    }.items()
}
"""Every part of core and the parts that it imports, from the bottom up: a part imports only what stands before it."""

HEAVY = {
    *("torch", "transformers", "datasets", "safetensors", "pyarrow", "tokenizers", "matplotlib", "pandas"),
    *("tensorboard", "wandb", "pynvml", "ray"),
}
MAY_IMPORT_TORCH = (
    *(
        "runtime/",
        "reference/",
        "data/",
        "testing/",
    ),
    *("checkpoint/hf.py", "checkpoint/saved_tensors.py", "checkpoint/stored_weights.py", "checkpoint/tensor_file.py"),
    *(
        "checkpoint/matrix_codec.py",
        "checkpoint/quantize.py",
        "checkpoint/stored_base.py",
        "checkpoint/checked_form.py",
    ),
)
NEVER_TORCH = {"program", "memory"}

FOREIGN_NAMES = re.compile(
    r"qwen|llama|adamw|normuon|nvfp4|fp8.?hybrid|surogate[_-](models|recipes?[_-]\w|optim[_-]\w|offload[_-]\w)"
    r"|(?<![a-z])q?lora",
    re.I,
)
EXAMPLE = "Qwen/Qwen3-0.6B"
"""What messages give as an example of a checkpoint's name on the hub."""

MAY_NAME = {"config/keys.py", "config/schema.py"}
"""Tables of YAML keys and defaults (`optimizer: adamw`, `lora: true`, keys of other trainers): data, not code."""


PACKAGES = sorted({path.parents[1] for path in (*ROOT.glob("*/src/*"), *ROOT.glob("plugins/*/src/*")) if path.is_dir()})
"""The folders of all packages."""

OPTIONAL_PARTS = {"surogate_conformance", "surogate_profile", "surogate_verify"}
"""Packages with parts of core that are optional: commands that plan and run what they test."""

LOOKS_INSIDE = {
    *("surogate_recipes_fp8/tests/test_recipe.py", "surogate_recipes_fp8/tests/test_numerics.py"),
    *("surogate_recipes_fp8/tests/gpu/test_training.py", "surogate_recipes_fp8/tests/gpu/test_numerics.py"),
    "surogate_recipes_nvfp4/tests/test_training.py",
    *("plugins/surogate_lora/tests/test_frozen.py", "plugins/surogate_new/tests/test_new.py"),
    "plugins/surogate_models_mistral/tests/test_mistral.py",
    "plugins/surogate_offload_residual/tests/test_residual.py",
    "plugins/surogate_offload_residual/tests/gpu/test_residual_gpu.py",
    "plugins/surogate_offload_states/tests/test_states.py",
    "plugins/surogate_offload_states/tests/gpu/test_states_gpu.py",
    "plugins/surogate_optim_normuon/tests/test_normuon.py",
}
"""Tests that ask core what it made of a definition: assemblies, plans, workers. None of them is installed."""


def parts(path: Path) -> str:
    """The part of core that a file belongs to: its first folder, or its stem at the top."""
    relative = path.relative_to(CORE)
    return relative.parts[0].removesuffix(".py")


@cache
def imports(path: Path, package: str, root: Path) -> list[tuple[ast.stmt, str, bool]]:
    """(statement, absolute module, whether it runs at import time) for every import of a file."""
    tree = ast.parse(path.read_text(), str(path))
    deferred = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
        for child in ast.walk(node)
    }
    folder = [package, *path.relative_to(root).parts[:-1]]
    found: list[tuple[ast.stmt, str, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node, alias.name, id(node) not in deferred) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node, f"{module}.{alias.name}", id(node) not in deferred) for alias in node.names]
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def core_files() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def test_there_is_something_to_check() -> None:
    assert len(core_files()) > 20
    assert {path.name for path in PLUGINS} >= {"surogate_models", "surogate_recipes_bf16", "surogate_optim_adamw"}


def test_core_imports_no_plugin() -> None:
    packages = {path.name for path in PLUGINS}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {module}"
        for path in core_files()
        for node, module, _ in imports(path, "surogate_core", CORE)
        if module.split(".")[0] in packages
    ]
    assert not wrong, "\n".join(wrong)


def test_what_packages_are_built_with_knows_no_package_and_core_does_not_know_it() -> None:
    build = ROOT / "surogate_build"
    imported = {
        module.split(".")[0]
        for path in build.rglob("*.py")
        for _, module, _ in imports(path, "surogate_build", build / "src/surogate_build")
    }
    assert imported - sys.stdlib_module_names == {"scikit_build_core"}
    required = tomllib.loads((build / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {re.split(r"[<>=]", name)[0] for name in required} == {"scikit-build-core", "nanobind"}
    core = [*core_files(), ROOT / "surogate_core/pyproject.toml"]
    assert not [
        str(path) for path in core if re.search(r"(from|import) surogate_build|\"surogate-build", path.read_text())
    ]


def test_core_is_layered() -> None:
    wrong = []
    for path in core_files():
        part = parts(path)
        for node, module, _ in imports(path, "surogate_core", CORE):
            names = module.split(".")
            if names[0] != "surogate_core" or len(names) < 2 or not _is_part(names[1]) or names[1] == part:
                continue
            if names[1] not in MAY_IMPORT[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {part} may not import {names[1]}")
    assert not wrong, "\n".join(sorted(set(wrong)))


def test_the_table_of_layers_has_every_part_and_no_arrow_that_runs_up() -> None:
    assert set(MAY_IMPORT) == {parts(path) for path in core_files()}
    below: set[str] = set()
    for part, imported in MAY_IMPORT.items():
        assert imported <= below, f"{part} imports {sorted(imported - below)}, which are not below it"
        below.add(part)


def test_no_file_of_core_imports_itself_through_others() -> None:
    """Imports inside functions and under TYPE_CHECKING count too: two files that need each other are one idea."""
    modules = {_module(path): path for path in core_files()}
    graph = {
        name: {found for _, target, _ in imports(path, "surogate_core", CORE) if (found := _owner(target, modules))}
        for name, path in modules.items()
    }
    TopologicalSorter({name: targets - {name} for name, targets in graph.items()}).prepare()  # raises CycleError


def _module(path: Path) -> str:
    """The dotted name of a file of core."""
    return ".".join(["surogate_core", *path.relative_to(CORE).with_suffix("").parts]).removesuffix(".__init__")


def _owner(target: str, modules: Mapping[str, Path]) -> str | None:
    """The file that defines `target`, a module or a name in one."""
    return next((name for name in (target, target.rpartition(".")[0]) if name in modules), None)


def _is_part(name: str) -> bool:
    return (CORE / name).is_dir() or (CORE / f"{name}.py").exists()


def test_torch_is_imported_only_where_it_runs() -> None:
    wrong = []
    for path in core_files():
        part = parts(path)
        name = path.relative_to(CORE).as_posix()
        for node, module, at_import in imports(path, "surogate_core", CORE):
            if module.split(".")[0] not in HEAVY or name.startswith(MAY_IMPORT_TORCH):
                continue
            if at_import or part in NEVER_TORCH:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: imports {module.split('.')[0]}")
    assert not wrong, "\n".join(wrong)


def test_only_discovery_knows_pluggy() -> None:
    knows = {
        path.relative_to(CORE).as_posix()
        for path in core_files()
        for _, module, _ in imports(path, "surogate_core", CORE)
        if module.split(".")[0] == "pluggy"
    }
    assert knows == {"api/hooks.py", "plugins/discovery.py", "plugins/hookspecs.py", "builtin.py"}


PUBLIC_OF_PLUGINS = "surogate_models.api"
"""What packages of model families are built of."""


@pytest.mark.parametrize("package", PLUGINS, ids=lambda path: path.name)
def test_plugins_import_of_one_another_only_what_is_public(package: Path) -> None:
    others = {other.name for other in PLUGINS} - {package.name}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {module}"
        for path in sorted(package.rglob("*.py"))
        for node, module, _ in imports(path, package.name, package)
        if module.split(".")[0] in others and not f"{module}.".startswith(f"{PUBLIC_OF_PLUGINS}.")
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_import_only_what_is_public() -> None:
    ours = [folder for folder in PACKAGES if folder.name not in {"surogate_core", *OPTIONAL_PARTS}]
    assert len(ours) > 18
    found = [*private_imports(path for folder in ours for path in sorted(folder.rglob("*.py")))]
    wrong = [(path.relative_to(ROOT).as_posix(), line, module) for path, line, module in found]
    assert not [f"{path}:{line}: {module}" for path, line, module in wrong if path not in LOOKS_INSIDE]
    assert {path for path, _, _ in wrong} == LOOKS_INSIDE


def test_the_python_api_is_built_on_what_is_public_and_on_run(tmp_path: Path) -> None:
    for path in ROOT.glob("src/surogate/*.py"):
        file = tmp_path / f"test_{path.name}"  # tests may import `run` too
        file.write_text(path.read_text())
        assert not [module for _, _, module in private_imports([file]) if module != "surogate_core.__version__"]


def test_the_code_of_the_documentation_imports_only_what_is_public(tmp_path: Path) -> None:
    for page in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), ROOT / "README.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
        code = page.read_text() if page.suffix == ".py" else "\n".join(blocks)
        file = tmp_path / f"test_{page.stem}.py"
        file.write_text(code)
        assert not [f"{page.name}: {module}" for _, _, module in private_imports([file])]


def test_nothing_in_core_names_a_plugin() -> None:
    wrong = []
    for path in core_files():
        if path.relative_to(CORE).as_posix() in MAY_NAME:
            continue
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            for text in _words(node, docstrings):
                if text not in HOOKS and FOREIGN_NAMES.search(text.replace(EXAMPLE, "")):
                    wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {text!r}")
    assert not wrong, "\n".join(wrong)


def _words(node: ast.AST, docstrings: set[int]) -> Iterator[str]:
    """Identifiers and strings of a node. Docstrings may give examples."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
        yield node.value
    for field in ("id", "attr", "arg", "name", "module"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def test_no_file_of_core_is_longer_than_400_lines() -> None:
    long = [path.relative_to(CORE).as_posix() for path in core_files() if len(path.read_text().splitlines()) > 400]
    assert not long, f"split by idea: {', '.join(long)}"


def test_a_docstring_begins_with_what_it_is_about() -> None:
    """ "Arguments of `assemble`.", not "What `assemble` is given."."""
    question = re.compile(r'"""(?:What|How|Where|Which|Why) .*')
    sources = [path for folder in ("*/src", "plugins/*/src") for path in ROOT.glob(f"{folder}/**/*.py")]
    found = {path.relative_to(ROOT): match.group() for path in sources if (match := question.search(path.read_text()))}
    assert not found, found
