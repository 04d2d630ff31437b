"""The device that a run on this machine trains on, learnt without torch: what `surogate plan` plans for by itself.

The CUDA driver is asked through ctypes, since it alone counts GPUs as a run does: by CUDA_VISIBLE_DEVICES (indices,
UUIDs, MIG) and CUDA_DEVICE_ORDER. But for `open_contexts`, no context is made and no memory of the GPU taken.
"""

from __future__ import annotations

import ctypes
import os
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ..api import DeviceInfo
from ..memory.devices import cpu, gpu

DRIVER: Final = "libcuda.so.1"
USE_THE_CPU: Final = "train on the CPU all the same by CUDA_VISIBLE_DEVICES= (empty)"
HIDDEN: Final = ("", "-1")
"""What CUDA_VISIBLE_DEVICES is set to by those who want the CPU."""
_STUB_LIBRARY, _NO_DEVICE = 34, 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class NoGpuError(Exception):
    """Why a run would not use a GPU, in a few words."""


class UnusableGpuError(NoGpuError):
    """A GPU, or its driver, is here and cannot be used. remedy: what to do about it."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


@dataclass(frozen=True)
class LocalDevice:
    """What a run here trains on. count: GPUs that are visible, 1 for a CPU. chosen: in a few words why this device.

    idle: why a GPU that is here is not used, and what to do; empty without one, and where the user hides it.
    """

    device: DeviceInfo
    count: int
    chosen: str
    idle: str = ""


def local_device() -> LocalDevice:
    """The first visible GPU, else this machine's processors."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        found, count = visible_gpus()
        if not torch_has_cuda():
            raise UnusableGpuError(
                f"torch is built without CUDA, so {found.title} stays idle",
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
    return f"a GPU is asked for or here, but runs cannot use it: {why}. {why.remedy}, or {USE_THE_CPU}."


def open_contexts(count: int) -> None:
    """Make the CUDA contexts of the first `count` GPUs on a thread, while torch is imported, which takes them over.

    What fails is left to torch, which tries again and says why.
    """

    def retain() -> None:
        with suppress(Exception):
            driver = ctypes.CDLL(DRIVER)
            for number in range(count):
                device, context = ctypes.c_int(), ctypes.c_void_p()
                _call(driver, "cuDeviceGet", ctypes.byref(device), number)
                _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)

    threading.Thread(target=retain, name="cuda-context", daemon=True).start()


def visible_gpus() -> tuple[DeviceInfo, int]:
    """The GPU that CUDA numbers 0 for this process, with the memory that it has, and how many there are.

    Raises NoGpuError.
    """
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        raise NoGpuError("no NVIDIA driver here") from None
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
            raise NoGpuError("no GPU here" if visible is None else f"no GPU in CUDA_VISIBLE_DEVICES={visible}")
        raise UnusableGpuError(f"no GPU in CUDA_VISIBLE_DEVICES={visible}", "Name one that `nvidia-smi -L` lists")
    if code == _STUB_LIBRARY:
        raise NoGpuError("no NVIDIA driver here, only a toolkit's stub of it")
    if code:
        raise UnusableGpuError(
            f"no GPU: the CUDA driver's {function} fails with {code}",
            "See what `nvidia-smi` says; a driver that was updated needs a reboot",
        )


def torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, by its files; true where none is installed: a plan needs none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return (Path(spec.origin).parent / "lib/libtorch_cuda.so").exists()
