"""Stands in for the compiled kernels of SGLang, of which no package for CPUs exists, in `check_sglang.py`.

SGLang imports names of them wherever it runs, and on a CPU with its own ops of torch calls none. One that is called
raises.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class Absent:
    """What any name stands for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, part: str) -> Absent:
        return _absent(f"{self._name}.{part}", part)

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise RuntimeError(f"{self._name} is compiled code, which this check does not have")


def _absent(name: str, part: str) -> Absent:
    if part.startswith("__"):
        raise AttributeError(name)
    return Absent(name)


class Modules:
    """Finds every module below this one."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda part: _absent(f"{spec.name}.{part}", part)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def __getattr__(part: str) -> Absent:
    return _absent(f"{__name__}.{part}", part)


__version__ = "0.4.10"
sys.meta_path.append(Modules())  # type: ignore[arg-type]
