"""Findings of `surogate doctor` about NVIDIA's libraries, with a fake compiled module."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import surogate_recipes_bf16
from surogate_core.api import Finding, SystemInfo
from surogate_recipes_bf16.diagnosis import diagnose

GPU = {"index": 0, "name": "NVIDIA H200", "sm": 90}
CUBLAS = {"name": "cublasLt", "path": "/lib/libcublasLt.so.13", "version": "13.1.0", "error": ""}


def machine(*gpus: dict[str, Any]) -> SystemInfo:
    return SystemInfo(python="3.11", platform="x", cpu_count=1, memory_bytes=2**34, gpus=gpus)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The result of the fake `_C.library_info()`, which the test fills."""
    answer: list[dict[str, str]] = []
    module = SimpleNamespace(library_info=lambda: answer)
    monkeypatch.setattr(surogate_recipes_bf16, "_C", module, raising=False)
    return answer


def test_a_library_is_shown_with_its_version_and_path(rows: list[dict[str, str]]) -> None:
    rows.append(CUBLAS)
    for gpus in ((), (GPU,)):
        assert diagnose(machine(*gpus)) == [Finding("ok", "cublasLt", "13.1.0, /lib/libcublasLt.so.13")]


@pytest.mark.parametrize(
    ("error", "message", "remedy"),
    [
        (
            "x was not found (no file). Searched SUROGATE_LIBRARY_PATH: none. To install it: pip install 'a>=1'",
            "x was not found (no file). Searched SUROGATE_LIBRARY_PATH: none",
            "pip install 'a>=1'",
        ),
        (
            "x does not load: no file. Reinstall it: pip install --force-reinstall a",
            "x does not load: no file",
            "pip install --force-reinstall a",
        ),
        (
            "x has version 9.1.0, but 9.18.0 or later is needed: pip install --upgrade a",
            "x has version 9.1.0, but 9.18.0 or later is needed",
            "pip install --upgrade a",
        ),
        ("x has no function f", "x has no function f", ""),
    ],
)
def test_on_a_gpu_a_library_that_does_not_load_is_an_error_with_a_remedy(
    rows: list[dict[str, str]], error: str, message: str, remedy: str
) -> None:
    """Covers the four kinds of errors of the shared source library.cpp."""
    rows.extend([CUBLAS, CUBLAS | {"name": "cudnn", "error": error}])
    assert diagnose(machine(GPU))[1] == Finding("error", "cudnn", message, remedy)
    unneeded = diagnose(machine())[1]
    assert unneeded.level == "ok" and unneeded.message.endswith(error)


def test_without_compiled_kernels_there_are_no_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(surogate_recipes_bf16, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "surogate_recipes_bf16._C", None)
    assert diagnose(machine(GPU)) == []
