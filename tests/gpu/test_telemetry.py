"""NVML finds the GPUs of a run by the UUIDs that torch reports."""

from __future__ import annotations

import pytest

from surogate.reporting.gpu_telemetry import read_gpu

pytestmark = pytest.mark.gpu

nvml = pytest.importorskip("pynvml", reason="telemetry needs pynvml: pip install nvidia-ml-py")


def test_every_visible_gpu_is_found_and_its_figures_match_torch() -> None:
    import torch

    from surogate_core.runtime.device import gpu_uuids

    nvml.nvmlInit()
    indices = range(torch.cuda.device_count())
    held = [torch.ones(2**28, dtype=torch.uint8, device=index) for index in indices]
    torch.cuda.synchronize()
    for index, uuid in zip(indices, gpu_uuids(list(indices)), strict=True):
        report = read_gpu(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid), step=1, gpu=index)
        total = torch.cuda.get_device_properties(index).total_memory
        assert report.memory_total_bytes == pytest.approx(total, rel=0.05)
        assert report.memory_used_bytes >= held[index].nbytes
        assert 0 <= report.utilization <= 1 and report.temperature_celsius > 0 and report.power_watts > 0
        assert report.sm_clock_mhz > 0 and report.memory_clock_mhz > 0
