"""Gathers of NCCL by the copy engines of GPUs, which leave every multiprocessor to the kernels of a step.

NCCL copies by them if the communicator allows it (`NCCL_CTA_POLICY_ZERO`), and if both what is given and what is
written lie in memory that all ranks have registered with it, at equal places ("symmetric windows"; user guide of NCCL
2.28, "Zero-CTA optimization"). Sums are as before: they need multiprocessors. So gathers have a communicator of their
own.

In such a gather a stream waits for the other ranks without a kernel that an abort could end. If a rank is lost
meanwhile, the stream ends with the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

Library = Callable[..., None]
"""Called with the name of a function of NCCL and its arguments. Raises NcclError if that fails."""

_UNDEFINED = -(1 << 31)
_POLICY_ZERO, _SYMMETRIC = 2, 1
_MAGIC, _VERSION = 0xCAFEBEEF, 22809


class _Config(ctypes.Structure):
    """`ncclConfig_t` of version 2.28, which later versions read too: they know its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_void_p),
        ("splitShare", ctypes.c_int),
        ("trafficClass", ctypes.c_int),
        ("commName", ctypes.c_void_p),
        ("collnetEnable", ctypes.c_int),
        ("CTAPolicy", ctypes.c_int),
        ("shrinkShare", ctypes.c_int),
        ("nvlsCTAs", ctypes.c_int),
        ("nChannelsPerNetPeer", ctypes.c_int),
        ("nvlinkCentricSched", ctypes.c_int),
    )

    @classmethod
    def with_policy(cls, policy: int) -> _Config:
        """Return a configuration in which everything else is left to NCCL."""
        config = cls(ctypes.sizeof(cls), _MAGIC, _VERSION)
        for name, *_ in cls._fields_[3:]:
            setattr(config, name, None if name in ("netName", "commName") else _UNDEFINED)
        config.CTAPolicy = policy
        return config


class CopyEngines:
    """A second communicator of a rank, for gathers, and the memory that they read and write.

    All ranks construct it, and call `allocate` in the same order with equal sizes: each waits for the others.
    """

    def __init__(self, nccl: Library, parent: int, rank: int, device: int) -> None:
        """Raises NcclError if NCCL fails."""
        self._nccl = nccl
        self._device = device
        self._windows: list[int] = []
        self.allocated = 0
        handle, config = ctypes.c_void_p(), _Config.with_policy(_POLICY_ZERO)
        with torch.cuda.device(device):
            nccl("ncclCommSplit", parent, 0, rank, ctypes.byref(handle), ctypes.byref(config))
        self.handle = handle.value or 0

    @property
    def reach_memory(self) -> bool:
        """Whether NCCL has registered memory: it does not where GPUs cannot read and write each other's."""
        return bool(self._windows)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return zeros, uint8 [nbytes], on the device of the rank. They are freed when no view is left.

        Raises torch.OutOfMemoryError.
        """
        if nbytes == 0:
            return torch.zeros(0, dtype=torch.uint8, device=f"cuda:{self._device}")
        with torch.cuda.device(self._device):
            memory = _Memory(self._nccl, nbytes)
            window = ctypes.c_void_p()
            at = ctypes.byref(window)
            self._nccl("ncclCommWindowRegister", self.handle, memory.address, nbytes, at, _SYMMETRIC)
            self._windows += [window.value] if window.value else []
            self.allocated += nbytes
            return torch.as_tensor(memory, device=f"cuda:{self._device}").zero_()

    def abort(self) -> None:
        """Give the memory up and end the communicator. May take for ever while a rank is lost."""
        for window in self._windows:
            self._nccl("ncclCommWindowDeregister", self.handle, window)
        self._nccl("ncclCommAbort", self.handle)


class _Memory:
    """Memory of the current device from NCCL, as torch takes memory of other libraries."""

    def __init__(self, nccl: Library, nbytes: int) -> None:
        self._nccl = nccl
        pointer = ctypes.c_void_p()
        try:
            nccl("ncclMemAlloc", ctypes.byref(pointer), nbytes)
        except RuntimeError as error:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {nbytes / 2**30:.2f} GiB. {error}") from error
        self.address = pointer.value or 0
        self.__cuda_array_interface__: dict[str, Any] = {
            **{"shape": (nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None},
        }

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._nccl("ncclMemFree", self.address)
