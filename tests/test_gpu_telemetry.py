"""GPU telemetry with a fake NVML: what is recorded, and that no step waits."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from test_metrics import info, step

from surogate.reporting.gpu_telemetry import open_telemetry, read_gpu
from surogate.reporting.metrics import JsonLinesLogger, read_metrics
from surogate_core.api import GpuReport, Logger


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


def fake_nvml(**changes: Any) -> Any:
    """Return a module with two GPUs, "GPU-a" and "GPU-b". A handle is an index."""

    def memory_info(handle: int) -> Any:
        return SimpleNamespace(used=(handle + 1) * 2**30, total=4 * 2**30)

    def no_limit(handle: int) -> Any:
        raise NotSupported("Not Supported")

    def by_uuid(uuid: str) -> int:
        if uuid not in ("GPU-a", "GPU-b"):
            raise NVMLError("Not Found")
        return "ab".index(uuid[-1])

    known = {
        "NVMLError": NVMLError,
        "NVMLError_NotSupported": NotSupported,
        "NVMLError_NoPermission": NotSupported,
        "NVMLError_FunctionNotFound": NotSupported,
        "NVML_TEMPERATURE_GPU": 0,
        "NVML_CLOCK_SM": 1,
        "NVML_CLOCK_MEM": 2,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByUUID": by_uuid,
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=40),
        "nvmlDeviceGetMemoryInfo": memory_info,
        "nvmlDeviceGetPowerUsage": lambda handle: 345_600,
        "nvmlDeviceGetEnforcedPowerLimit": no_limit,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 61,
        "nvmlDeviceGetClockInfo": lambda handle, clock: {1: 1980, 2: 3201}[clock],
    }
    return SimpleNamespace(**{**known, **changes})


class Watched:
    """Return telemetry of both GPUs at every other step, with the given module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nvml: Any, uuids: tuple[str, ...] = ("GPU-b", "GPU-a")) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        self.seen: list[GpuReport] = []
        self.notices: list[str] = []
        self.loggers: list[Logger] = open_telemetry(uuids, 2, self.seen.append, self.notices.append)

    def step(self, number: int) -> None:
        self.loggers[0].report(step(number))

    def close(self) -> None:
        self.loggers[0].close("done")


def test_a_reading_has_the_units_of_the_record_and_none_for_what_is_not_supported() -> None:
    report = read_gpu(fake_nvml(), 1, step=20, gpu=0)
    assert report == GpuReport(
        step=20, gpu=0, utilization=0.97, memory_utilization=0.4, memory_used_bytes=2 * 2**30, power_watts=345.6,
        memory_total_bytes=4 * 2**30, power_limit_watts=None, temperature_celsius=61, sm_clock_mhz=1980,
        memory_clock_mhz=3201, time=report.time,
    )  # fmt: skip


def test_a_reading_is_a_line_of_the_metrics_file(tmp_path: Path) -> None:
    logger = JsonLinesLogger(info(tmp_path))
    logger.report(read_gpu(fake_nvml(), 0, step=20, gpu=3))
    logger.close("done")
    *_, record = read_metrics(tmp_path / "metrics.jsonl")
    assert list(record)[:4] == ["log", "step", "gpu", "utilization"]
    assert (record["log"], record["gpu"], record["power_limit_watts"]) == ("gpu", 3, None)


def test_every_gpu_is_read_every_few_steps_in_the_order_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, fake_nvml())
    for number in (1, 2, 3, 4, 5):
        watched.step(number)
        time.sleep(0.05)
    watched.close()
    assert [(report.step, report.gpu) for report in watched.seen] == [(2, 0), (2, 1), (4, 0), (4, 1)]
    assert [report.memory_used_bytes for report in watched.seen[:2]] == [2 * 2**30, 2**30]
    assert not watched.notices


def test_no_step_waits_for_a_slow_driver_and_readings_do_not_queue_up(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Event()

    def slow(handle: int) -> Any:
        answers.wait(10)
        return SimpleNamespace(gpu=1, memory=1)

    watched = Watched(monkeypatch, fake_nvml(nvmlDeviceGetUtilizationRates=slow), ("GPU-a",))
    for number in range(1, 101):
        watched.step(number)
    assert not watched.seen, "a step waited for the driver, which answers by itself after ten seconds"
    answers.set()
    watched.close()
    assert [report.step for report in watched.seen] == [2]


def test_a_driver_that_fails_is_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(handle: int) -> Any:
        raise NVMLError("GPU is lost")

    watched = Watched(monkeypatch, fake_nvml(nvmlDeviceGetMemoryInfo=lost))
    for number in range(1, 9):
        watched.step(number)
        time.sleep(0.02)
    watched.close()
    (notice,) = watched.notices
    assert "GPU is lost" in notice and not watched.seen


def test_without_nvml_there_is_a_notice_and_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, None)
    assert not watched.loggers
    assert "pip install nvidia-ml-py" in watched.notices[0]


def test_a_gpu_that_nvml_does_not_know_is_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, fake_nvml(), ("GPU-c",))
    assert not watched.loggers
    assert "Not Found" in watched.notices[0] and "log_gpu_util: 0" in watched.notices[0]
