"""Checks of a package: what it declares, and what it imports."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys

from surogate.surface import private_imports
from surogate_core.plugins.provided import CORE

from ..bench import Bench
from ..check import NotApplicable, proves
from ..subject import Subject, broken

HEAVY = (
    "torch",
    "transformers",
    "datasets",
    "pyarrow",
    "tokenizers",
    "matplotlib",
    "pandas",
    "tensorboard",
    "wandb",
    "ray",
)
"""Libraries that make every command slower to start if the module of an entry point imports them."""


@proves("package", remedy="Mend it; `surogate plugins` shows it with its traceback if SUROGATE_TRACEBACK=1 is set.")
def its_plugins_load(subject: Subject, bench: Bench) -> None:
    faults = [f"plugin {plugin.name} is {plugin.state}: {plugin.reason}" for plugin in broken(subject)]
    assert not faults, "; ".join(faults)


@proves("package", remedy="Rename one of the two, or say in your documentation that they exclude each other.")
def nothing_that_it_provides_is_provided_twice(subject: Subject, bench: Bench) -> None:
    names = {str(plugin) for plugin in subject.plugins}
    clashes = [text for text in subject.registry.conflicts if any(name in text for name in names)]
    assert not clashes, "; ".join(clashes)


def _needs_its_plugins(subject: Subject) -> None:
    if broken(subject):
        raise NotApplicable("its plugins do not load")


@proves("package", remedy="Provide that op, or correct KernelDef.op; return definitions from hooks.")
def nothing_that_it_provides_is_left_over(subject: Subject, bench: Bench) -> None:
    _needs_its_plugins(subject)
    names = {plugin.name for plugin in subject.plugins}
    ops = subject.registry.ops
    idle = sorted({i.name for i in subject.provided if i.kind == "kernel" and i.name not in ops})
    assert not idle, f"it has kernels for {', '.join(idle)}, which no installed plugin defines"
    assert subject.provided or not names - {"builtin"}, "its hooks return nothing"


@proves(
    "package",
    remedy="Import it in the functions that need it: a reference is named as text, other functions import inside.",
)
def its_module_imports_nothing_that_is_slow(subject: Subject, bench: Bench) -> None:
    _needs_its_plugins(subject)
    modules = [plugin.module for plugin in subject.plugins]
    code = (
        f"import importlib, sys; sys.path[:0] = {sys.path!r}\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"print(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip().rpartition("\n")[2]
    assert not done.stdout.strip(), f"importing {', '.join(modules)} imports {done.stdout.strip()}"


@proves("package", remedy="")
def it_imports_only_what_is_public(subject: Subject, bench: Bench) -> list[str]:
    """Other imports are warnings: they work until core moves what they name."""
    if any(isinstance(plugin.error, SyntaxError) for plugin in broken(subject)):
        raise NotApplicable("a file of it has an error in its syntax")
    return [
        f"{path.name}:{line} imports {module}, which is not public and may move"
        for path, line, module in private_imports(subject.source_files())
    ]


@proves("package", remedy='Add to its dependencies: "surogate-core>=0.2,<0.3".')
def it_requires_a_range_of_versions_of_surogate_core(subject: Subject, bench: Bench) -> None:
    if subject.file is not None or subject.name == CORE:
        raise NotApplicable("it is surogate-core" if subject.name == CORE else "a single file has no metadata")
    required = [r for r in importlib.metadata.requires(subject.name) or [] if re.match(r"surogate[-_.]core\b", r, re.I)]
    assert required, "it does not require surogate-core"
    for requirement in required:
        assert "==" not in requirement, f"it requires {requirement}, one version, which excludes all later ones"
        assert "<" in requirement, f"it requires {requirement}, which later versions with another API fit too"


@proves("package", remedy="Add an empty file py.typed beside __init__.py, so that mypy reads the annotations.")
def it_ships_py_typed(subject: Subject, bench: Bench) -> list[str]:
    files = subject.source_files()
    if subject.file is not None or not any(path.name == "__init__.py" for path in files):
        raise NotApplicable("a single file has no place for py.typed")
    tops = {
        path.parent for path in files if path.name == "__init__.py" and not (path.parent.parent / path.name).exists()
    }
    missing = [folder.name for folder in tops if not (folder / "py.typed").is_file()]
    return [f"{name} has no py.typed, so mypy ignores its annotations" for name in missing]
