"""What doctor says of NVIDIA's libraries, with a compiled module made up for each test."""

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
    """What `_C.library_info()` answers; the test fills it."""
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
            "x was not found (no file). Looked in: none. To install it: pip install 'a>=1'",
            "x was not found (no file). Looked in: none",
            "pip install 'a>=1'",
        ),
        (
            "x does not load: no file. Reinstall it: pip install --force-reinstall a",
            "x does not load: no file",
            "pip install --force-reinstall a",
        ),
        (
            "x has version 9.1.0, needed is 9.18.0 or later: pip install --upgrade a",
            "x has version 9.1.0, needed is 9.18.0 or later",
            "pip install --upgrade a",
        ),
        ("x has no function f", "x has no function f", ""),
    ],
)
def test_one_that_does_not_load_is_an_error_with_its_remedy_on_a_gpu(
    rows: list[dict[str, str]], error: str, message: str, remedy: str
) -> None:
    """The four ways in which csrc/library.cpp refuses."""
    rows.extend([CUBLAS, CUBLAS | {"name": "cudnn", "error": error}])
    assert diagnose(machine(GPU))[1] == Finding("error", "cudnn", message, remedy)
    unneeded = diagnose(machine())[1]
    assert unneeded.level == "ok" and unneeded.message.endswith(error)


def test_without_compiled_kernels_there_is_nothing_to_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(surogate_recipes_bf16, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "surogate_recipes_bf16._C", None)
    assert diagnose(machine(GPU)) == []
