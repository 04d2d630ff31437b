"""Findings of `surogate doctor` about GPUs and memory."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from surogate.machine import system
from surogate_core.api import Finding, SystemInfo

GPU: dict[str, Any] = {"index": 0, "name": "NVIDIA H200", "sm": 90}


def findings(*gpus: dict[str, Any]) -> list[Finding]:
    info = SystemInfo(
        python="3.11", platform="x", cpu_count=1, memory_bytes=2**34, gpus=gpus, versions={"torch": "2.13.0+cpu"}
    )
    return system.diagnose(info)


def gpu_findings(*gpus: dict[str, Any]) -> list[Finding]:
    return [finding for finding in findings(*gpus) if finding.subject in ("gpu", "torch")]


@pytest.mark.parametrize("built", [True, False])
def test_a_torch_without_cuda_is_a_warning_only_if_there_is_a_gpu(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(system, "torch_has_cuda", lambda: built)
    messages = [finding.message for finding in gpu_findings(GPU)]
    assert messages == ([] if built else ["2.13.0+cpu is built without CUDA, so runs use the CPU"])
    assert [finding.message for finding in gpu_findings()] == ["none found: runs use the CPU"]
    assert [finding.message for finding in gpu_findings({"error": "no driver"})] == ["no driver"]


@pytest.mark.parametrize(("forbidden", "there"), [(True, True), (True, False), (False, False)])
def test_torch_without_bytecode_is_a_warning_if_python_may_not_write_it(
    forbidden: bool, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", forbidden)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "torch/__init__.py"))
    spec.cached = str(tmp_path / "torch.pyc")
    if there:
        Path(spec.cached).touch()
    monkeypatch.setattr(system, "find_spec", lambda name: spec)
    remedies = [finding.remedy for finding in findings() if finding.subject == "bytecode"]
    expected = f"unset it, or run once: {sys.executable} -m compileall -q -j 0 {tmp_path}"
    assert remedies == ([expected] if forbidden and not there else [])


def test_available_memory_is_the_least_that_the_system_and_the_container_allow(tmp_path: Path) -> None:
    assert 0 < system.available_memory_bytes() <= system.memory_bytes()
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  9000000 kB\nMemFree:  1 kB\nMemAvailable:   600000 kB\n")
    assert system.available_memory_bytes(tmp_path) == 600_000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("500000\n")
    (group / "memory.stat").write_text("anon 200000\ninactive_file 300000\n")
    (group / "memory.max").write_text("max\n")
    assert system.available_memory_bytes(tmp_path) == 600_000 * 1024
    (group / "memory.max").write_text("1000000\n")
    assert system.available_memory_bytes(tmp_path) == 1_000_000 - 500_000 + 300_000, "cached files can be dropped"
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/jobs/7\n")
    (group / "jobs/7").mkdir(parents=True)
    for name, text in (("current", "1000"), ("stat", "inactive_file 10"), ("max", "5000")):
        (group / "jobs/7" / f"memory.{name}").write_text(text)
    assert system.available_memory_bytes(tmp_path) == 5000 - 1000 + 10, "the group of the process has a limit as well"


@pytest.mark.parametrize("path", ["docker/12", ""], ids=["as the host names it", "as the container names it"])
def test_a_container_of_version_1_limits_available_memory(tmp_path: Path, path: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"5:cpu,cpuacct:/\n4:memory:/{path}\n")
    group = tmp_path / "sys/fs/cgroup/memory"
    group.mkdir(parents=True)
    for name, text in (("usage_in_bytes", "7000"), ("stat", "cache 9\ntotal_inactive_file 500")):
        (group / f"memory.{name}").write_text(text)
    (group / "memory.limit_in_bytes").write_text("9223372036854771712")
    assert system.available_memory_bytes(tmp_path) > 2**20
    (group / "memory.limit_in_bytes").write_text("8000")
    assert system.available_memory_bytes(tmp_path) == 8000 - 7000 + 500
