"""Compiled kernels of the NVFP4 ops. They import the compiled module only when binding."""

from __future__ import annotations

from surogate_core.api import KernelDef

from . import numerics, products, quantizer

KERNELS: tuple[KernelDef, ...] = (*quantizer.KERNELS, *products.KERNELS, *numerics.KERNELS)
