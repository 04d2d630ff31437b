"""Finds the device that a run on this machine trains on, without torch. `surogate plan` plans for it by default.

It calls the CUDA driver through ctypes, because only the driver counts GPUs as a run does: by CUDA_VISIBLE_DEVICES
(indices, UUIDs, MIG) and CUDA_DEVICE_ORDER. Only `open_contexts` creates contexts and uses memory of the GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..api import DeviceInfo
from .devices import cpu, gpu

DRIVER: Final = "libcuda.so.1"
USE_THE_CPU: Final = "train on the CPU with CUDA_VISIBLE_DEVICES= (empty)"
HIDDEN: Final = ("", "-1")
"""Values of CUDA_VISIBLE_DEVICES that ask for the CPU."""
_STUB_LIBRARY, _NO_DEVICE = 34, 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class NoGpuError(Exception):
    """A run would not use a GPU. The message says why, in a few words."""


class UnusableGpuError(NoGpuError):
    """This machine has a GPU or a driver that cannot be used. `remedy` is what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class LocalDevice:
    """The device that a run on this machine trains on.

    count   visible GPUs; 1 for a CPU
    chosen  why this device, in a few words
    idle    why a GPU of this machine is not used, and what to do; "" if there is none or the user hides it
    """

    device: DeviceInfo
    count: int
    chosen: str
    idle: str = ""


def local_device() -> LocalDevice:
    """Return the first visible GPU, or the CPU if there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        found, count = visible_gpus()
        if not torch_has_cuda():
            raise UnusableGpuError(
                f"torch is built without CUDA and cannot use {found.title}",
                "Install a torch for CUDA 13: https://pytorch.org/get-started/locally",
            )
    except NoGpuError as why:
        return LocalDevice(cpu(), 1, str(why), _idle(why))
    if visible is not None:
        return LocalDevice(found, count, f"first of CUDA_VISIBLE_DEVICES={visible}")
    return LocalDevice(found, count, "this machine's GPU" if count == 1 else f"first of this machine's {count} GPUs")


def _idle(why: NoGpuError) -> str:
    if not isinstance(why, UnusableGpuError) or os.environ.get("CUDA_VISIBLE_DEVICES") in HIDDEN:
        return ""
    return f"runs cannot use the GPU: {why}. {why.remedy}, or {USE_THE_CPU}."


def open_contexts(devices: Sequence[int]) -> None:
    """Create the CUDA contexts of GPUs, given by their indices, on a thread, while torch is imported.

    torch then uses them. Errors are ignored: torch tries again and reports them.
    """

    def retain() -> None:
        with suppress(Exception):
            driver = ctypes.CDLL(DRIVER)
            for number in devices:
                device, context = ctypes.c_int(), ctypes.c_void_p()
                _call(driver, "cuDeviceGet", ctypes.byref(device), number)
                _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)

    threading.Thread(target=retain, name="cuda-context", daemon=True).start()


def visible_gpus() -> tuple[DeviceInfo, int]:
    """Return the GPU with CUDA index 0 in this process, and the number of GPUs. Raises NoGpuError."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        raise NoGpuError("no NVIDIA driver found") from None
    _call(driver, "cuInit", 0)
    device, count, major, minor = (ctypes.c_int() for _ in range(4))
    total, name = ctypes.c_size_t(), ctypes.create_string_buffer(256)
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    _call(driver, "cuDeviceGet", ctypes.byref(device), 0)
    _call(driver, "cuDeviceGetName", name, len(name), device)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    for number, value in ((_MAJOR, major), (_MINOR, minor)):
        _call(driver, "cuDeviceGetAttribute", ctypes.byref(value), number, device)
    return gpu(name.value.decode(), major.value * 10 + minor.value, total.value), count.value


def _call(driver: Any, function: str, *arguments: Any) -> None:
    code = getattr(driver, function)(*arguments)
    if code == _NO_DEVICE:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None or visible in HIDDEN:
            raise NoGpuError("no GPU found" if visible is None else f"no GPU in CUDA_VISIBLE_DEVICES={visible}")
        raise UnusableGpuError(f"no GPU in CUDA_VISIBLE_DEVICES={visible}", "Use one that `nvidia-smi -L` lists")
    if code == _STUB_LIBRARY:
        raise NoGpuError("no NVIDIA driver found, only a toolkit's stub of it")
    if code:
        raise UnusableGpuError(
            f"no GPU: the CUDA driver's {function} fails with {code}",
            "Run `nvidia-smi`; after an update of the driver, reboot",
        )


def torch_has_cuda() -> bool:
    """Return whether the installed torch is built for CUDA, judged by its files. True if torch is not installed."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return (Path(spec.origin).parent / "lib/libtorch_cuda.so").exists()
