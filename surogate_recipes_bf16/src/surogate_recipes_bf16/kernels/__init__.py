"""The compiled kernels of the standard vocabulary, by family. No module here imports the compiled one before a bind."""

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
