"""Compiled kernels of the FP8 ops, one module per family. They import the compiled module only when binding."""

from __future__ import annotations

from surogate_core.api import KernelDef

from . import groups, norms, numerics, products, quantizers, scales

KERNELS: tuple[KernelDef, ...] = (
    *products.KERNELS,
    *groups.KERNELS,
    *quantizers.KERNELS,
    *norms.KERNELS,
    *scales.KERNELS,
    *numerics.KERNELS,
)
