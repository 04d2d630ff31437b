"""What `surogate doctor` says of NVIDIA's libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping

from surogate_core.api import Finding, SystemInfo


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
