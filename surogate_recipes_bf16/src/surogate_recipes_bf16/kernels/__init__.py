"""Compiled kernels of the standard ops, one module per family. They import the compiled module only when binding."""

from __future__ import annotations

from surogate_core.api import KernelDef

from . import attention, elementwise, gemm, loss, norms, reductions

KERNELS: tuple[KernelDef, ...] = (
    *elementwise.KERNELS,
    *norms.KERNELS,
    *gemm.KERNELS,
    *loss.KERNELS,
    *attention.KERNELS,
    *reductions.KERNELS,
)
