"""The device that a run on this machine trains on, learnt without torch: what `surogate plan` plans for by itself.

The CUDA driver is asked through ctypes, since it alone counts GPUs as a run does: by CUDA_VISIBLE_DEVICES (indices,
UUIDs, MIG) and CUDA_DEVICE_ORDER. No context is made and no memory of the GPU taken.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from .api import DeviceInfo
from .memory.devices import cpu, gpu

DRIVER: Final = "libcuda.so.1"
_NO_DEVICE: Final = 100
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


class NoGpuError(Exception):
    """Why a run would not use a GPU, in a few words."""


@dataclass(frozen=True)
class LocalDevice:
    """What a run here trains on. count: GPUs that are visible, 1 for a CPU. chosen: in a few words why this device."""

    device: DeviceInfo
    count: int
    chosen: str


def local_device() -> LocalDevice:
    """The first visible GPU, else this machine's processors."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        found, count = visible_gpus()
        if not torch_has_cuda():
            raise NoGpuError(f"torch is built without CUDA, so {found.title} stays idle")
    except NoGpuError as why:
        return LocalDevice(cpu(), 1, str(why))
    if visible is not None:
        return LocalDevice(found, count, f"first of CUDA_VISIBLE_DEVICES={visible}")
    return LocalDevice(found, count, "this machine's GPU" if count == 1 else f"first of this machine's {count} GPUs")


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
        raise NoGpuError("no GPU here" if visible is None else f"no GPU in CUDA_VISIBLE_DEVICES={visible}")
    if code:
        raise NoGpuError(f"no GPU: the CUDA driver's {function} fails with {code}")


def torch_has_cuda() -> bool:
    """Whether the installed torch is built for CUDA, by its files; true where none is installed: a plan needs none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    return (Path(spec.origin).parent / "lib/libtorch_cuda.so").exists()
