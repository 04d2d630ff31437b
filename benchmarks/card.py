"""Samples clock, power and memory of the GPU while another process works on it: by NVML, else by nvidia-smi."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from statistics import fmean
from threading import Event, Thread
from typing import Any

SECONDS = 0.1
"""Between two samples by NVML. nvidia-smi takes several tenths of a second itself."""


@dataclass(frozen=True)
class Sample:
    """time: as `time.time`. clock_mhz: of the multiprocessors. used_bytes: memory in use, by all processes."""

    time: float
    clock_mhz: float
    watts: float
    used_bytes: int


@dataclass
class Samples:
    """Samples in order."""

    taken: list[Sample] = field(default_factory=list)

    def during(self, start: float, end: float) -> dict[str, int | None]:
        """Return mean clock and power and the most memory from `start` to `end` (`time.time`); None without samples.

        Memory is what is in use less that of the first sample, which is taken before the process starts.
        """
        inside = [s for s in self.taken if start <= s.time <= end]
        if not inside:
            return {"clock_mhz": None, "watts": None, "process_bytes": None}
        return {
            "clock_mhz": round(fmean(s.clock_mhz for s in inside)),
            "watts": round(fmean(s.watts for s in inside)),
            "process_bytes": max(s.used_bytes for s in inside) - self.taken[0].used_bytes,
        }


def reader() -> Callable[[], Sample] | None:
    """Return what reads a sample of the first visible GPU; None where neither NVML nor nvidia-smi can be asked."""
    return _nvml_reader() or _smi_reader()


@contextmanager
def sampling(read: Callable[[], Sample] | None) -> Iterator[Samples]:
    """Take samples on a thread until the context ends."""
    samples, stop = Samples(), Event()
    if read is None:
        yield samples
        return

    def take() -> None:
        with suppress(RuntimeError, OSError, ValueError, subprocess.SubprocessError):  # one sample less
            samples.taken.append(read())

    def sample() -> None:
        while not stop.wait(SECONDS):
            take()

    take()
    thread = Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        stop.set()
        thread.join()


def _nvml_reader() -> Callable[[], Sample] | None:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        handle = _handle(nvml)

        def read() -> Sample:
            try:
                return Sample(
                    time.time(),
                    nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
                    nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                    nvml.nvmlDeviceGetMemoryInfo(handle).used,
                )
            except nvml.NVMLError as error:
                raise RuntimeError(str(error)) from None

        read()
    except Exception:  # not installed, no driver, or a driver that does not answer
        return None
    return read


def _handle(nvml: Any) -> Any:
    first = _first_visible()
    by_uuid = first.startswith("GPU-")
    return nvml.nvmlDeviceGetHandleByUUID(first) if by_uuid else nvml.nvmlDeviceGetHandleByIndex(int(first))


def _smi_reader() -> Callable[[], Sample] | None:
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", f"--id={_first_visible()}", "--query-gpu=clocks.sm,power.draw,memory.used"]

    def read() -> Sample:
        done = subprocess.run([*query, "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
        clock, watts, used = map(float, done.stdout.split(","))
        return Sample(time.time(), clock, watts, int(used) << 20)

    try:
        read()
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return read


def _first_visible() -> str:
    return os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip() or "0"
