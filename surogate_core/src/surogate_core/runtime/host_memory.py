"""Memory of the host that a GPU can copy from and to."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress

import torch
from torch import Tensor

from ..machine.local_device import DRIVER

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE and CU_MEMHOSTALLOC_PORTABLE: pinned for all devices
_MAPPED, _WRITE_COMBINED = 2, 4  # CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_WRITECOMBINED


class NoHostMemory(Exception):
    """Host memory is not available. The message completes "copies would take 3 GiB, and ..."."""


def allocate(nbytes: int) -> Tensor:
    """Allocate anonymous memory, in huge pages if the system has them, because pinning takes time per page.

    torch's pinned allocator is not used because it rounds up to a power of two: 128 GiB for 65.
    """
    try:
        memory = mmap.mmap(-1, max(nbytes, 1))
    except OSError as error:
        raise NoHostMemory(f"the system refuses them ({error.strerror or error})") from None
    with suppress(OSError):  # the kernel does not support huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def pin(memory: Tensor, device: torch.device) -> None:
    """Pin by the driver API: its failures, unlike those of the runtime API, do not reappear at the next CUDA call."""
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context current on this thread
        register = ctypes.CDLL(DRIVER).cuMemHostRegister_v2
        register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        code = register(memory.data_ptr(), memory.numel(), _PORTABLE)
    if code:
        raise NoHostMemory(f"they cannot be pinned (the driver's cuMemHostRegister fails with {code})")


def allocate_write_combined(nbytes: int, device: torch.device) -> Tensor:
    """Allocate pinned memory that the caches of the host bypass.

    A device reads it without asking the host's caches. The host writes it fast in order, and reads it very slowly:
    nothing but devices should read it. Freed with its last view.
    """
    address = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # makes the device's context current on this thread
        driver = ctypes.CDLL(DRIVER)
        driver.cuMemHostAlloc.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_size_t, ctypes.c_uint]
        code = driver.cuMemHostAlloc(ctypes.byref(address), nbytes, _PORTABLE | _MAPPED | _WRITE_COMBINED)
    if code or address.value is None:
        raise NoHostMemory(f"they cannot be pinned (the driver's cuMemHostAlloc fails with {code})")
    memory = (ctypes.c_uint8 * nbytes).from_address(address.value)
    weakref.finalize(memory, driver.cuMemFreeHost, ctypes.c_void_p(address.value))
    return torch.frombuffer(memory, dtype=torch.uint8)


def unpin(memory: Tensor) -> None:
    """Unpin what `pin` has pinned."""
    ctypes.CDLL(DRIVER).cuMemHostUnregister(ctypes.c_void_p(memory.data_ptr()))
