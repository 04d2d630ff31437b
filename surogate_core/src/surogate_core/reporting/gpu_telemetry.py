"""Looks at the GPUs of a run by NVML every so many steps, on a thread of its own: no step waits for a driver."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any

from ..api import EvalReport, GpuReport, Logger, StepReport

Notice = Callable[[str], None]

PACKAGE = "nvidia-ml-py"
CLOSE_SECONDS = 2.0
"""How long the end of a run waits for a look that is under way. A driver that hangs must not hold a finished run."""


class GpuTelemetry:
    """A logger that looks at the GPUs after every `every`th step and passes what it saw on to `tell`.

    `step` only asks for a look, and hands over, from the loop's thread, the reports of those that are done by then.
    While one is under way no other is asked for. A driver that fails is told of once, and not asked again.
    """

    def __init__(
        self, nvml: ModuleType, gpus: Sequence[Any], every: int, tell: Callable[[GpuReport], None], notice: Notice
    ) -> None:
        self._nvml = nvml
        self._gpus = gpus
        self._every = every
        self._tell = tell
        self._notice = notice
        self._asked: SimpleQueue[int | None] = SimpleQueue()
        self._done: SimpleQueue[list[GpuReport] | Exception] = SimpleQueue()
        self._under_way = False
        self._thread = Thread(target=self._look_when_asked, name="gpu-telemetry", daemon=True)
        self._thread.start()

    def step(self, report: StepReport) -> None:
        self._hand_over()
        if report.step % self._every == 0 and not self._under_way:
            self._under_way = True
            self._asked.put(report.step)

    def eval(self, report: EvalReport) -> None:
        return

    def gpu(self, report: GpuReport) -> None:
        return

    def close(self, status: str) -> None:
        self._asked.put(None)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._nvml.nvmlShutdown()
        self._hand_over()

    def _hand_over(self) -> None:
        while not self._done.empty():
            seen = self._done.get()
            if isinstance(seen, Exception):  # `_under_way` stays: nothing is asked for any more
                self._notice(f"log_gpu_util: the driver does not answer, no more GPU telemetry: {seen}")
                return
            self._under_way = False
            for report in seen:
                self._tell(report)

    def _look_when_asked(self) -> None:
        while (step := self._asked.get()) is not None:
            try:
                self._done.put([look(self._nvml, handle, step, n) for n, handle in enumerate(self._gpus)])
            except self._nvml.NVMLError as error:
                self._done.put(error)
                return


def look(nvml: Any, handle: Any, step: int, gpu: int) -> GpuReport:
    """What NVML tells of a GPU now. None for what this GPU or driver does not have; other errors are raised."""

    def ask(question: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return question(handle, *arguments)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_NoPermission, nvml.NVMLError_FunctionNotFound):
            return None

    rates, memory = ask(nvml.nvmlDeviceGetUtilizationRates), ask(nvml.nvmlDeviceGetMemoryInfo)
    power, limit = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    return GpuReport(
        step=step,
        gpu=gpu,
        utilization=rates.gpu / 100 if rates else None,
        memory_utilization=rates.memory / 100 if rates else None,
        memory_used_bytes=memory.used if memory else None,
        memory_total_bytes=memory.total if memory else None,
        power_watts=None if power is None else power / 1000,
        power_limit_watts=None if limit is None else limit / 1000,
        temperature_celsius=ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        sm_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        memory_clock_mhz=ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_MEM),
        time=time.time(),
    )


def open_telemetry(uuids: Sequence[str], every: int, tell: Callable[[GpuReport], None], notice: Notice) -> list[Logger]:
    """Telemetry of the GPUs with these UUIDs, in the run's order; none, and a notice, where NVML cannot be asked."""
    without = "no GPU telemetry in this run. log_gpu_util: 0 says that none is wanted."
    try:
        import pynvml as nvml
    except ImportError:
        notice(f"log_gpu_util: needs NVML's Python module, which is not installed (pip install {PACKAGE}): {without}")
        return []
    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
    except nvml.NVMLError as error:
        notice(f"log_gpu_util: NVML cannot be asked ({error}): {without}")
        return []
    return [GpuTelemetry(nvml, gpus, every, tell, notice)]
