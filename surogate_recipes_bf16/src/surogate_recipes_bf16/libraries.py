"""NVIDIA's libraries: their folders among the installed packages, and what `surogate doctor` says of them."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

from surogate_core.api import Finding, SystemInfo


def directories() -> list[str]:
    """Every `lib` folder of the `nvidia-*` wheels that this Python imports from. Imports none of them.

    nvidia/cu13/lib has the toolkit's libraries (cuBLAS, NVRTC, the runtime), nvidia/<library>/lib the others. `nvidia`
    is a namespace package: it has one location for each folder of sys.path that holds some of it.
    """
    spec = importlib.util.find_spec("nvidia")
    locations = spec.submodule_search_locations if spec is not None else None
    return [str(folder) for location in locations or () for folder in sorted(Path(location).glob("*/lib"))]


def diagnose(system: SystemInfo) -> list[Finding]:
    """Which cuBLASLt and cuDNN a run would load, and from where; nothing where no kernels are compiled in."""
    try:
        from . import _C
    except Exception:  # surogate_core.compiled says so
        return []
    on_gpu = any("error" not in gpu for gpu in system.gpus)
    return [_finding(row, on_gpu) for row in _C.library_info()]


def _finding(row: Mapping[str, str], on_gpu: bool) -> Finding:
    """A library that does not load is an error where a GPU waits for it; its message ends with the pip line."""
    if not row["error"]:
        return Finding("ok", row["name"], f"{row['version']}, {row['path']}")
    if not on_gpu:
        return Finding("ok", row["name"], f"does not load, and without a GPU need not: {row['error']}")
    split = re.fullmatch(r"(.*?)(?:\. [A-Z][a-z ]+)?: (pip install .*)", row["error"], re.S)
    return Finding("error", row["name"], *(split.groups() if split else (row["error"],)))
