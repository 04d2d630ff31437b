"""The kernels of `move`, which copies between the device and pinned memory of the host, and of `wait`.

Copies are made by the driver's `cuMemcpyAsync`, which CUDA graphs can capture. `ctypes.CDLL` releases the GIL.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ..api import KernelDef
from ..machine.local_device import DRIVER


class CopyError(RuntimeError):
    """The driver refused a copy."""


@cache
def _driver() -> Any:
    library = ctypes.CDLL(DRIVER)
    library.cuMemcpyAsync.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
    library.cuMemcpyAsync.restype = ctypes.c_int
    return library


def copy(source: int, target: int, nbytes: int, stream: int) -> None:
    """Enqueue a copy of `nbytes` between two addresses, one of which is pinned memory of the host."""
    result = _driver().cuMemcpyAsync(target, source, nbytes, stream)
    if result:
        raise CopyError(f"cuMemcpyAsync of {nbytes} bytes failed with CUDA error {result}")


KERNELS = (
    KernelDef(op="move", dtypes=("*", "*"), bind=lambda op, ctx: ctx.call(copy, *op.ins, *op.outs, op.outs[0].nbytes)),
    # The order of the streams is all that the op asks for.
    KernelDef(op="wait", dtypes=("*", "..."), bind=lambda op, ctx: ()),
)
