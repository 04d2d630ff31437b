"""Findings of `surogate doctor` about NVIDIA's libraries."""

from __future__ import annotations

import re
from collections.abc import Mapping

from surogate_core.api import Finding, SystemInfo


def diagnose(system: SystemInfo) -> list[Finding]:
    """Report version and path of the cuBLASLt and cuDNN that a run would load. Empty without compiled kernels."""
    try:
        from . import _C
    except Exception:  # reported by surogate_core.api.compiled
        return []
    on_gpu = any("error" not in gpu for gpu in system.gpus)
    return [_finding(row, on_gpu) for row in _C.library_info()]


def _finding(row: Mapping[str, str], on_gpu: bool) -> Finding:
    """Return the finding for a library. A library that does not load is an error if there is a GPU.

    The error message of the shared source library.cpp ends with the pip command, which becomes the remedy.
    """
    if not row["error"]:
        return Finding("ok", row["name"], f"{row['version']}, {row['path']}")
    if not on_gpu:
        return Finding("ok", row["name"], f"does not load, but is not needed without a GPU: {row['error']}")
    split = re.fullmatch(r"(.*?)(?:\. [A-Z][a-z ]+)?: (pip install .*)", row["error"], re.S)
    return Finding("error", row["name"], *(split.groups() if split else (row["error"],)))
