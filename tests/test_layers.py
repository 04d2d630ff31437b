"""Who may import whom, what core requires, and what core and the program may name. Read from the source by ast."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from surogate.surface import private_imports
from surogate_core.plugins.hookspecs import HOOKS

ROOT = Path(__file__).parents[1]
CORE = ROOT / "surogate_core/src/surogate_core"
PLUGINS = [
    path
    for path in (*ROOT.glob("*/src/surogate_*"), *ROOT.glob("plugins/*/src/*"))
    if path.name not in ("surogate_core", "surogate") and path.is_dir() and (path / "plugin.py").exists()
]

PROGRAM = ROOT / "src/surogate"

REQUIRED_BY_CORE = {"torch", "numpy", "pydantic", "pluggy"}
"""All that `surogate-core` requires. `.api.required` imports others where they are called."""

LIBRARIES: Mapping[str, set[str]] = {
    "api/peft.py": {"safetensors", "transformers", "peft"},
    "testing/cases.py": {"pytest"},
}
"""Files of core that serve packages which require more, and name it."""

ALIASES = {"moved", "run", "cli", "__main__"}
"""Names of the program in core until 0.2: the only parts that import it, when they are called. They go with 0.4."""

CORE_PARTS: Mapping[str, set[str]] = {
    part: set(parts.split())
    for part, parts in {
        "version": "",
        "errors": "",
        "words": "",
        "batch": "errors",
        "dtypes": "",
        "front_end": "",
        "origin": "errors",
        "program": "dtypes errors origin",
        "api": "dtypes errors front_end origin program",
        "reference": "dtypes program",
        "standard_ops": "api dtypes errors program",
        "machine": "api errors front_end",
        "memory": "api machine program",
        "plugins": "api dtypes errors front_end origin program version words",
        "assembly": "api dtypes errors front_end machine memory origin plugins program",
        "planning": "api assembly machine memory program",
        "runtime": "api assembly batch dtypes errors front_end machine memory origin program reference",
        "train": "api batch runtime",
        "definitions": "api assembly batch errors machine planning plugins",
        "engine": "api assembly batch definitions errors planning runtime train",
        "__init__": "definitions engine machine version",
        "builtin": "api runtime standard_ops",
        "testing": "api dtypes machine memory plugins program reference runtime standard_ops",
        "moved": "errors",
        "run": "moved",
        "cli": "moved",
        "__main__": "cli",
    }.items()
}
"""Every part of core and the parts that it imports, from the bottom up: a part imports only what stands before it."""

PROGRAM_PARTS: Mapping[str, set[str]] = {
    part: set(parts.split())
    for part, parts in {
        "machine": "",
        "config": "",
        "hub": "",
        "surface": "",
        "front_end": "config",
        "world": "",
        "data": "config hub machine",
        "reporting": "config machine",
        "runs": "config data hub",
        "checkpoints": "config data hub machine reporting runs",
        "pages": "checkpoints config machine reporting runs",
        "fitting": "config runs",
        "outputs": "checkpoints config hub machine reporting runs",
        "generation": "checkpoints data hub outputs",
        "training": "checkpoints config data fitting generation hub machine outputs reporting runs world",
        "run": "checkpoints config data fitting hub machine outputs runs training",
        "python": "data pages run training",
        "__init__": "config data pages python run training",
        "plugin": "data front_end machine reporting world",
        "cli": "config data fitting generation machine pages reporting run runs surface training",
        "__main__": "cli",
    }.items()
}
"""The same of the program around core. All of them may import core."""

HOUSES = {"surogate_core": (CORE, CORE_PARTS), "surogate": (PROGRAM, PROGRAM_PARTS)}
houses = pytest.mark.parametrize(("name", "root", "table"), [(n, *house) for n, house in HOUSES.items()], ids=HOUSES)

HEAVY = {
    *("torch", "transformers", "datasets", "safetensors", "pyarrow", "tokenizers", "matplotlib", "pandas"),
    *("tensorboard", "wandb", "mlflow", "pynvml", "ray"),
}
MAY_IMPORT_TORCH = (
    *("runtime/", "reference/", "testing/", "data/", "engine.py"),
    *(f"checkpoints/{name}.py" for name in ("hf", "saved_tensors", "stored_weights", "tensor_file", "matrix_codec")),
    "checkpoints/moved_tensors.py",
    *(
        f"checkpoints/{name}.py"
        for name in (
            "quantize",
            "stored_base",
            "checked_form",
            "formed_weights",
            "weights_file",
            "model_tensors",
            "rewriting",
        )
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

MAY_NAME = {"config/keys.py", "config/memory.py", "config/schema.py", "front_end.py"}
"""Tables of YAML keys and defaults (`optimizer: adamw`, `lora: true`, keys of other trainers): data, not code."""


PACKAGES = sorted({path.parents[1] for path in (*ROOT.glob("*/src/*"), *ROOT.glob("plugins/*/src/*")) if path.is_dir()})
"""The folders of all packages."""

OPTIONAL_PARTS = {"surogate_conformance", "surogate_profile", "surogate_serving", "surogate_verify"}
"""Packages with parts of core that are optional: commands that plan and run what they test."""

LOOKS_INSIDE = {
    *("surogate_recipes_fp8/tests/test_recipe.py", "surogate_recipes_fp8/tests/test_numerics.py"),
    "surogate_recipes_fp8/tests/test_row_tiles.py",
    *("surogate_recipes_fp8/tests/gpu/test_training.py", "surogate_recipes_fp8/tests/gpu/test_numerics.py"),
    *("surogate_recipes_nvfp4/tests/test_training.py", "surogate_recipes_nvfp4/tests/test_row_tiles.py"),
    *("plugins/surogate_lora/tests/test_frozen.py", "plugins/surogate_new/tests/test_new.py"),
    "plugins/surogate_models_mistral/tests/test_mistral.py",
    "plugins/surogate_offload_residual/tests/test_residual.py",
    "plugins/surogate_offload_residual/tests/gpu/test_residual_gpu.py",
    "plugins/surogate_offload_states/tests/test_states.py",
    "plugins/surogate_offload_states/tests/gpu/test_states_gpu.py",
    "plugins/surogate_optim_normuon/tests/test_normuon.py",
}
"""Tests that ask core what it made of a definition: assemblies, plans, workers. None of them is installed."""


def parts(path: Path, root: Path) -> str:
    """The part that a file belongs to: its first folder, or its stem at the top."""
    return path.relative_to(root).parts[0].removesuffix(".py")


@cache
def imports(path: Path, package: str, root: Path) -> list[tuple[ast.stmt, str, bool]]:
    """(statement, absolute module, whether it runs at import time) for every import of a file."""
    folder = [package, *path.relative_to(root).parts[:-1]]
    found: list[tuple[ast.stmt, str, bool]] = []
    for node, runs in _statements(parsed(path), True):
        if isinstance(node, ast.Import):
            found += [(node, alias.name, runs) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = folder[: len(folder) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node, f"{module}.{alias.name}", runs) for alias in node.names]
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _statements(node: ast.AST, runs: bool) -> Iterator[tuple[ast.AST, bool]]:
    """(statement, whether it runs at import time) for every statement inside of `node`, at any depth."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            now = runs and not (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child))
            yield child, now
            yield from _statements(child, now)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def core_files() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def house_files() -> list[tuple[str, Path, Path]]:
    """(package, its folder, file) of core and of the program."""
    return [(name, root, path) for name, (root, _) in HOUSES.items() for path in sorted(root.rglob("*.py"))]


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


@houses
def test_a_house_is_layered(name: str, root: Path, table: Mapping[str, set[str]]) -> None:
    wrong = []
    for path in sorted(root.rglob("*.py")):
        part = parts(path, root)
        for node, module, _ in imports(path, name, root):
            names = module.split(".")
            if names[0] != name or len(names) < 2 or names[1] not in table or names[1] == part:
                continue
            if names[1] not in table[part]:
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {part} may not import {names[1]}")
    assert not wrong, "\n".join(sorted(set(wrong)))


@houses
def test_a_table_of_layers_has_every_part_and_no_arrow_that_runs_up(
    name: str, root: Path, table: Mapping[str, set[str]]
) -> None:
    assert set(table) == {parts(path, root) for path in root.rglob("*.py")}
    below: set[str] = set()
    for part, imported in table.items():
        assert imported <= below, f"{part} imports {sorted(imported - below)}, which are not below it"
        below.add(part)


@houses
def test_no_file_imports_itself_through_others(name: str, root: Path, table: Mapping[str, set[str]]) -> None:
    """Imports inside functions and under TYPE_CHECKING count too: two files that need each other are one idea."""
    modules = {_module(path, name, root): path for path in sorted(root.rglob("*.py"))}
    graph = {
        module: {found for _, target, _ in imports(path, name, root) if (found := _owner(target, modules))}
        for module, path in modules.items()
        if module != name  # it names what others offer
    }
    TopologicalSorter({name: targets - {name} for name, targets in graph.items()}).prepare()  # raises CycleError


def _module(path: Path, package: str, root: Path) -> str:
    """The dotted name of a file of a package."""
    return ".".join([package, *path.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")


def _owner(target: str, modules: Mapping[str, Path]) -> str | None:
    """The file that defines `target`, a module or a name in one."""
    return next((name for name in (target, target.rpartition(".")[0]) if name in modules), None)


# -------------------------------------------------------------------------------------------------------- requirements


def test_core_requires_four_packages_and_imports_no_other() -> None:
    required = tomllib.loads((ROOT / "surogate_core/pyproject.toml").read_text())["project"]
    assert {re.split(r"[<>=]", name)[0] for name in required["dependencies"]} == REQUIRED_BY_CORE
    assert not required.get("optional-dependencies")
    wrong = []
    for path in core_files():
        name = path.relative_to(CORE).as_posix()
        for node, module, at_import in imports(path, "surogate_core", CORE):
            top = module.split(".")[0]
            if top in sys.stdlib_module_names or top == "surogate_core" or top in REQUIRED_BY_CORE:
                continue
            if at_import or top not in LIBRARIES.get(name, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {module}")
    assert not wrong, "\n".join(wrong)


def test_all_of_core_is_imported_with_every_other_package_blocked() -> None:
    modules = [_module(path, "surogate_core", CORE) for path in core_files() if parts(path, CORE) not in ALIASES]
    code = f"""
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import PathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {{"surogate", "transformers", "safetensors", "datasets", "pyarrow", "yaml", "typer",
                                  "rich", "tokenizers", "jinja2", "huggingface_hub", "filelock", "matplotlib", "xxhash",
                                  "accelerate", "pynvml", "peft", "pytest"}}:
            raise ModuleNotFoundError(f"blocked: {{name}}", name=name)

sys.meta_path.insert(0, Blocked())
for module in {modules!r}:
    __import__(module)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


MODULES = {
    "pyyaml": "yaml",
    "nvidia_ml_py": "pynvml",
    "mlflow_skinny": "mlflow",
    "pydantic": "pydantic_core",
    "acme_surogate_example": "acme_surogate",
}
"""Module that a distribution brings under another name."""

TRIED: Mapping[str, set[str]] = {"surogate": {"peft"}, "surogate_serving": {"peft"}, "surogate_verify": {"peft"}}
"""Modules that a package uses if they are there."""


@pytest.mark.parametrize("folder", [*PACKAGES, ROOT], ids=lambda path: path.name)
def test_a_package_requires_what_it_imports(folder: Path) -> None:
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (package,) = (path for path in folder.glob("src/*") if (path / "__init__.py").exists())
    requirements = [project.get("dependencies", ()), *project.get("optional-dependencies", {}).values()]
    have = {re.split(r"[<>=\[]", name)[0].replace("-", "_").lower() for names in requirements for name in names}
    have |= REQUIRED_BY_CORE | TRIED.get(package.name, set()) | {package.name}
    have |= {MODULES[name] for name in have & MODULES.keys()}
    if package == CORE:
        have = have.union(*LIBRARIES.values())
    used = {
        module.split(".")[0]
        for path in sorted(package.rglob("*.py"))
        if "templates" not in path.parts
        for _, module, _ in imports(path, package.name, package)
    }
    others = {name for name in used if name not in sys.stdlib_module_names and not name.startswith("surogate")}
    assert others <= have, f"{package.name} imports {sorted(others - have)}, which its pyproject.toml does not name"


def test_torch_is_imported_only_where_it_runs() -> None:
    wrong = []
    for package, root, path in house_files():
        name = path.relative_to(root).as_posix()
        for node, module, at_import in imports(path, package, root):
            if module.split(".")[0] not in HEAVY or name.startswith(MAY_IMPORT_TORCH):
                continue
            if at_import or (package == "surogate_core" and parts(path, root) in NEVER_TORCH):
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


PUBLIC_OF_PLUGINS = ("surogate_models.api.", "surogate_models_moe.api.")
"""What packages of model families are built of."""


@pytest.mark.parametrize("package", PLUGINS, ids=lambda path: path.name)
def test_plugins_import_of_one_another_only_what_is_public(package: Path) -> None:
    others = {other.name for other in PLUGINS} - {package.name}
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {module}"
        for path in sorted(package.rglob("*.py"))
        for node, module, _ in imports(path, package.name, package)
        if module.split(".")[0] in others and not f"{module}.".startswith(PUBLIC_OF_PLUGINS)
    ]
    assert not wrong, "\n".join(wrong)


def test_packages_import_only_what_is_public() -> None:
    ours = [folder for folder in PACKAGES if folder.name not in {"surogate_core", "surogate", *OPTIONAL_PARTS}]
    assert len(ours) > 18
    found = [*private_imports(path for folder in ours for path in sorted(folder.rglob("*.py")))]
    wrong = [(path.relative_to(ROOT).as_posix(), line, module) for path, line, module in found]
    assert not [f"{path}:{line}: {module}" for path, line, module in wrong if path not in LOOKS_INSIDE]
    assert {path for path, _, _ in wrong} == LOOKS_INSIDE


def test_the_code_of_the_documentation_imports_only_what_is_public(tmp_path: Path) -> None:
    for page in (*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), ROOT / "README.md"):
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M)
        code = page.read_text() if page.suffix == ".py" else "\n".join(blocks)
        file = tmp_path / f"test_{page.stem}.py"
        file.write_text(code)
        assert not [f"{page.name}: {module}" for _, _, module in private_imports([file])]


def test_neither_core_nor_the_program_names_a_plugin() -> None:
    wrong = []
    for _, root, path in house_files():
        if path.relative_to(root).as_posix() in MAY_NAME:
            continue
        tree = parsed(path)
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


def test_no_file_of_core_and_program_is_longer_than_400_lines() -> None:
    long = [str(path.relative_to(ROOT)) for _, _, path in house_files() if len(path.read_text().splitlines()) > 400]
    assert not long, f"split by idea: {', '.join(long)}"


def test_a_docstring_begins_with_what_it_is_about() -> None:
    """ "Arguments of `assemble`.", not "What `assemble` is given."."""
    question = re.compile(r'"""(?:What|How|Where|Which|Why) .*')
    sources = [path for folder in ("src", "*/src", "plugins/*/src") for path in ROOT.glob(f"{folder}/**/*.py")]
    found = {path.relative_to(ROOT): match.group() for path in sources if (match := question.search(path.read_text()))}
    assert not found, found
