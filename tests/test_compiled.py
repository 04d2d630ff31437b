"""Findings of `surogate doctor` about compiled modules, with a generated package in each test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surogate_core.api import Finding, KernelDef, Support, SystemInfo
from surogate_core.api.compiled import HEADERS, INSTALL, compiled_hooks, diagnose, problem, serves
from surogate_core.plugins.discovery import load_registry

H200 = {"index": 0, "name": "NVIDIA H200", "sm": 90}
BROKEN_DRIVER = {"error": "nvidia-smi: no driver"}
DEFAULT = ["80-real", "86-real", "89-real", "90-real", "100-real", "120-real", "90-virtual", "120-virtual"]


def machine(*gpus: dict[str, Any]) -> SystemInfo:
    return SystemInfo(python="3.11", platform="x", cpu_count=1, memory_bytes=2**34, gpus=gpus)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Return a function that writes an importable package with this source of `_C`, or without `_C` for None."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(source: str | None) -> str:
        (tmp_path / "acme_kernels").mkdir()
        (tmp_path / "acme_kernels/__init__.py").touch()
        if source is not None:
            (tmp_path / "acme_kernels/_C.py").write_text(source)
        return "acme_kernels"

    yield write
    for name in [name for name in sys.modules if name.startswith("acme_kernels")]:
        del sys.modules[name]


def compiled(*targets: str) -> str:
    info = {"cuda": "13.0.88", "architectures": list(targets), "headers": HEADERS}
    return f"def build_info():\n    return {info!r}\n"


@pytest.mark.parametrize(("headers", "remedy"), [(0, ""), (HEADERS + 1, "; update surogate-core")])
def test_a_module_of_other_headers_is_refused(package: Any, headers: int, remedy: str) -> None:
    source = compiled(*DEFAULT).replace(f"'headers': {HEADERS}", f"'headers': {headers}" if headers else "")
    name = package(source)
    other = f"has version {headers} of the headers of surogate-build, surogate-core needs {HEADERS}{remedy}"
    assert problem(f"{name}._C", 90) == other
    assert diagnose(name, machine(H200)) == [Finding("error", name, f"the compiled module {other}", INSTALL)]
    assert diagnose(name, machine())[0].level == "warning"


@pytest.mark.parametrize(("gpus", "level"), [((), "ok"), ((BROKEN_DRIVER,), "ok"), ((H200,), "warning")])
def test_missing_kernels_are_a_warning_only_with_a_gpu(
    package: Any, gpus: tuple[dict[str, Any], ...], level: str
) -> None:
    (finding,) = diagnose(package(None), machine(*gpus))
    assert (finding.level, finding.subject) == (level, "acme_kernels")
    assert "not compiled" in finding.message and ("SUROGATE_CUDA=on" in finding.remedy) == (level != "ok")


@pytest.mark.parametrize(("gpus", "level"), [((), "warning"), ((H200,), "error")])
def test_a_module_that_does_not_load_is_reported_with_the_reason(
    package: Any, gpus: tuple[dict[str, Any], ...], level: str
) -> None:
    (finding,) = diagnose(package("raise ImportError('undefined symbol: cuLaunch')"), machine(*gpus))
    assert (finding.level, finding.message) == (
        level,
        "the compiled module does not load: ImportError: undefined symbol: cuLaunch",
    )
    assert "SUROGATE_CUDA=on" in finding.remedy


def test_targets_are_listed_and_supported_gpus_give_no_finding(package: Any) -> None:
    message = "kernels compiled by CUDA 13.0.88 for SM80, SM86, SM89, SM90, SM100, SM120, PTX 90, PTX 120"
    assert diagnose(package(compiled(*DEFAULT)), machine(H200)) == [Finding("ok", "acme_kernels", message)]


@pytest.mark.parametrize(
    ("present", "level", "names"),
    [([75], "error", "SM75"), ([75, 90], "warning", "SM75"), ([75, 70], "error", "SM70, SM75")],
)
def test_an_unsupported_gpu_is_reported(package: Any, present: list[int], level: str, names: str) -> None:
    gpus = [{"index": i, "sm": sm} for i, sm in enumerate(present)]
    _, finding = diagnose(package(compiled(*DEFAULT)), machine(*gpus, {"index": 9, "sm": None}))
    assert (finding.level, finding.message) == (level, f"no kernel runs on the {names} of this machine")
    assert f"CUDAARCHS='{names.replace('SM', '').replace(', ', '-real;')}-real'" in finding.remedy


@pytest.mark.parametrize(
    ("target", "yes", "no"),
    [
        ("80-real", [80, 86, 89], [75, 90, 100]),
        ("86-real", [86, 89], [80, 90]),
        ("90-real", [90], [80, 100]),
        ("90a-real", [90], [80, 100]),
        ("100-real", [100, 103], [90, 110, 120]),
        ("90a-virtual", [90], [100]),
        ("100f-real", [100, 103], [90, 110, 120]),
        ("120f-real", [120, 121], [100, 103]),
        ("90-virtual", [90, 100, 120, 121], [80, 89]),
        ("80", [80, 86, 90, 120], [75]),
        ("native", [75, 90], []),
    ],
)
def test_targets_run_where_cuda_documents_it(target: str, yes: list[int], no: list[int]) -> None:
    """CUDA C++ Programming Guide, "Binary Compatibility", "PTX Compatibility" and "Family-Specific Targets"."""
    assert [sm for sm in yes + no if serves(target, sm)] == yes


def test_every_plugin_with_kernels_reports_whether_they_are_compiled() -> None:
    registry = load_registry()
    packages = {item.plugin.module.split(".")[0] for item in registry.provided if item.kind == "kernel"}
    packages.remove("surogate_core")  # its kernels call libraries
    assert len(packages) >= 3
    assert packages <= {finding.subject for _, finding in registry.diagnose(machine())}


def test_the_hooks_of_a_compiled_module_name_it_and_diagnose_it(package: Callable[..., str]) -> None:
    name = package(None)
    kernel = KernelDef(
        op="acme_op", dtypes=("*",), supports=lambda op, target: Support(True), bind=lambda op, context: (print, ())
    )
    kernels, findings = compiled_hooks(name, [kernel])
    assert [k.module for k in kernels()] == ["acme_kernels._C"]
    assert findings(machine(H200)) == diagnose(name, machine(H200))
