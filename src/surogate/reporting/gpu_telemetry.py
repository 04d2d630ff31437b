"""Reads the state of a run's GPUs from NVML every few steps, on a thread of its own: no step waits for a driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any

from surogate_core.api import GpuReport, Logger, Report, StepReport

Notice = Callable[[str], None]

PACKAGE = "nvidia-ml-py"
CLOSE_SECONDS = 2.0
"""Seconds that the end of a run waits for a reading in progress. A driver that hangs must not hold up the end."""


class GpuTelemetry(Logger):
    """A logger that reads the GPUs after every `every`th step and passes a report of each GPU to `deliver`.

    `step` only requests a reading. It also delivers, on the loop's thread, the reports of readings that are done. While
    a reading is in progress, no other is requested. If the driver fails, `notice` is called and no more are requested.
    """

    def __init__(
        self, nvml: ModuleType, gpus: Sequence[Any], every: int, deliver: Callable[[GpuReport], None], notice: Notice
    ) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._every = every
        self._deliver = deliver
        self._notice = notice
        self._requested: SimpleQueue[int | None] = SimpleQueue()
        self._done: SimpleQueue[list[GpuReport] | Exception] = SimpleQueue()
        self._in_progress = False
        self._thread = Thread(target=self._read_on_request, name="gpu-telemetry", daemon=True)
        self._thread.start()

    def report(self, report: Report) -> None:
        if not isinstance(report, StepReport):
            return
        self._deliver_done()
        if report.step % self._every == 0 and not self._in_progress:
            self._in_progress = True
            self._requested.put(report.step)

    def close(self, status: str) -> None:
        self._requested.put(None)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._nvml.nvmlShutdown()
        self._deliver_done()

    def _deliver_done(self) -> None:
        while not self._done.empty():
            reading = self._done.get()
            if isinstance(reading, Exception):  # `_in_progress` stays True: no more readings are requested
                self._notice(f"log_gpu_util: the driver does not answer, no more GPU telemetry: {reading}")
                return
            self._in_progress = False
            for report in reading:
                self._deliver(report)

    def _read_on_request(self) -> None:
        while (step := self._requested.get()) is not None:
            try:
                self._done.put([read_gpu(self._nvml, handle, step, n) for n, handle in enumerate(self._gpus)])
            except self._nvml.NVMLError as error:
                self._done.put(error)
                return


def read_gpu(nvml: Any, handle: Any, step: int, gpu: int) -> GpuReport:
    """Return the state of a GPU. Fields that this GPU or driver does not support are None; other errors are raised."""

    def query(function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(handle, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
            return None

    rates, memory = query(nvml.nvmlDeviceGetUtilizationRates), query(nvml.nvmlDeviceGetMemoryInfo)
    power, limit = query(nvml.nvmlDeviceGetPowerUsage), query(nvml.nvmlDeviceGetEnforcedPowerLimit)
    return GpuReport(
        step=step,
        gpu=gpu,
        utilization=rates.gpu / 100 if rates else None,
        memory_utilization=rates.memory / 100 if rates else None,
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else None,
        power_watts=None if power is None else power / 1000,
        power_limit_watts=None if limit is None else limit / 1000,
        temperature_celsius=query(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=query(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        time=time.time(),
    )


def open_telemetry(
    uuids: Sequence[str], every: int, deliver: Callable[[GpuReport], None], notice: Notice
) -> list[Logger]:
    """Return a logger for the GPUs with these UUIDs, in the run's order. Without NVML: a notice and no logger."""
    without = "no GPU telemetry in this run. log_gpu_util: 0 turns this message off."
    try:
        import pynvml as nvml
    except ImportError:
        notice(f"log_gpu_util: needs NVML's Python module, which is not installed (pip install {PACKAGE}): {without}")
        return []
    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    except nvml.NVMLError as error:
        notice(f"log_gpu_util: NVML does not answer ({error}): {without}")
        return []
    return [GpuTelemetry(nvml, gpus, every, deliver, notice)]
