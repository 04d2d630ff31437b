"""Compiled kernels of the standard ops, one module per family. They import the compiled module only when binding."""

from __future__ import annotations

from surogate_core.api import KernelDef

from . import attention, distillation, elementwise, gemm, loss, norms, pair, reductions, token_loss

KERNELS: tuple[KernelDef, ...] = (
    *elementwise.KERNELS,
    *norms.KERNELS,
    *gemm.KERNELS,
    *pair.KERNELS,
    *loss.KERNELS,
    *token_loss.KERNELS,
    *distillation.KERNELS,
    *attention.KERNELS,
    *reductions.KERNELS,
)
