"""What doctor says of GPUs that runs would not use."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core import system
from surogate_core.api import Finding, SystemInfo

GPU: dict[str, Any] = {"index": 0, "name": "NVIDIA H200", "sm": 90}


def gpu_findings(*gpus: dict[str, Any]) -> list[Finding]:
    info = SystemInfo(
        python="3.11", platform="x", cpu_count=1, memory_bytes=2**34, gpus=gpus, versions={"torch": "2.13.0+cpu"}
    )
    return [finding for finding in system.diagnose(info) if finding.subject in ("gpu", "torch")]


@pytest.mark.parametrize("built", [True, False])
def test_a_torch_without_cuda_is_a_warning_beside_a_gpu_only(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(system, "torch_has_cuda", lambda: built)
    told = [finding.message for finding in gpu_findings(GPU)]
    assert told == ([] if built else ["2.13.0+cpu is built without CUDA: runs will use the CPU"])
    assert [finding.message for finding in gpu_findings()] == ["none found: runs use the CPU"]
    assert [finding.message for finding in gpu_findings({"error": "no driver"})] == ["no driver"]
