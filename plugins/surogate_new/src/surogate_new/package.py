"""The files of a new package: those of the templates, with their names replaced by the package's.

A template is a package that works, called acme-plugin: its files are read and checked as they are. Those of `shared/`
are in every package. A kind's own come on top of them, and its `keys.yaml` is added to the run of the example.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Final

from surogate_core.api import ConfigError, refuse_checkpoint

TEMPLATES: Final = Path(__file__).parent / "templates"

LAYERS: Final[Mapping[str, tuple[str, ...]]] = {
    "adapter": ("shared", "on_base", "adapter"),
    "checkpoint-form": ("shared", "checkpoint-form"),
    "dataset": ("shared", "dataset"),
    "export-format": ("shared", "export-format"),
    "kernel": ("shared", "in_model", "kernel"),
    "launcher": ("shared", "launcher"),
    "logger": ("shared", "logger"),
    "loss": ("shared", "loss"),
    "lowering": ("shared", "lowering"),
    "model": ("shared", "model"),
    "offload": ("shared", "offload"),
    "op": ("shared", "in_model", "op"),
    "optimizer": ("shared", "optimizer"),
    "recipe": ("shared", "recipe"),
    "weight-format": ("shared", "on_base", "weight-format"),
}
"""Kinds of packages, and the folders of templates that make one: a later one replaces files of those before it."""

KEYS: Final = "keys.yaml"
_RUN: Final = Path("example/run.yaml")
_PLUGIN: Final = Path("src/acme_plugin/plugin.py")
_DOT: Final = "dot_"
"""Begins the names of files that are hidden in a package, but would have an effect in this repository."""

_PATTERN = re.compile(r"^surogate_((model|recipe|optim|offload|launch|log|loss)_)?")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class Package:
    """A package to write.

    distribution  its name on an index, such as surogate-optim-lion; `module` is the same as an import name
    """

    kind: str
    distribution: str

    @property
    def module(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def entry(self) -> str:
        """The name of its entry point."""
        return self.module.removeprefix("surogate_")

    @property
    def name(self) -> str:
        """The name of its definition: lion of surogate-optim-lion."""
        return _PATTERN.sub("", self.module)

    def check(self) -> None:
        """Raise ConfigError for a name that no package can have, or that an installed one has."""
        if not _NAME.fullmatch(self.distribution) or not self.name.isidentifier() or iskeyword(self.name):
            raise ConfigError(
                f"{self.distribution}: is no name for a package: lower-case letters, digits and hyphens, "
                "a letter first, such as acme-lion. Give another one by --name."
            )
        if importlib.util.find_spec(self.module) is not None:
            raise ConfigError(f"{self.distribution}: a module {self.module} is installed already. Use --name.")

    def files(self) -> Iterator[tuple[Path, str]]:
        """Yield the files, as paths within the package, and their texts."""
        found: dict[Path, Path] = {}
        for layer in LAYERS[self.kind]:
            folder = TEMPLATES / layer
            found |= {file.relative_to(folder): file for file in sorted(folder.rglob("*")) if _is_source(file)}
        keys = found.pop(Path(KEYS), None)
        runs = [path for path in found if path.match("example/*.yaml")]
        words = self._words(ast.get_docstring(ast.parse(found[_PLUGIN].read_text())) or "", sorted(runs))
        for path, file in found.items():
            text = file.read_text()
            if path == _RUN and keys is not None:
                text += keys.read_text()
            name = str(path).replace(_DOT, ".").replace("acme_plugin", self.module)
            yield Path(name), _replaced(text, words)

    def _words(self, description: str, runs: list[Path]) -> Mapping[str, str]:
        """Return the words of the templates, and what takes their places."""
        return {
            "acme-plugin": self.distribution,
            "acme_plugin": self.module,
            "acme_entry": self.entry,
            "acme_toy": self.name,
            "ACME_TOY": self.name.upper(),
            "A plugin of Surogate": description,
            ">=0.2,<0.3": _range(importlib.metadata.version("surogate-core")),
            "surogate train example/run.yaml": "\n".join(f"surogate train {run}" for run in runs),
        }


def write(package: Package, directory: Path) -> list[Path]:
    """Write a package into a new or empty directory and return its files. Raises ConfigError if it cannot."""
    package.check()
    refuse_checkpoint(directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory}: exists and is not an empty folder. Name another one.")
    written = []
    for path, text in package.files():
        target = directory / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        except OSError as error:
            raise ConfigError(f"{error.filename or target}: cannot be written: {error.strerror}.") from error
        written.append(target)
    return written


def _is_source(file: Path) -> bool:
    return file.is_file() and "__pycache__" not in file.parts


def _replaced(text: str, words: Mapping[str, str]) -> str:
    return re.sub("|".join(map(re.escape, words)), lambda match: words[match[0]], text)


def _range(version: str) -> str:
    """Return the versions of surogate-core that a package written for this one works with."""
    major, minor = map(int, version.split(".")[:2])
    return f">={major}.{minor},<{major}.{minor + 1}"
