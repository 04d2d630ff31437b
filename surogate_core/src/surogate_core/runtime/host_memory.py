"""Memory of the host that a GPU can copy from and to."""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from ..machine.local_device import DRIVER

_PORTABLE = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for all devices


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


def unpin(memory: Tensor) -> None:
    ctypes.CDLL(DRIVER).cuMemHostUnregister(ctypes.c_void_p(memory.data_ptr()))
