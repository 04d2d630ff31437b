"""Compiled kernels of the FP8 ops, one module per family. They import the compiled module only when binding."""

from __future__ import annotations

from dataclasses import replace

from surogate_core.api import KernelDef

from . import groups, head, norms, numerics, products, quantizers, scales

KERNELS: tuple[KernelDef, ...] = tuple(
    replace(kernel, sm=89)  # the first that converts to FP8
    for family in (products, groups, head, quantizers, norms, scales, numerics)
    for kernel in family.KERNELS
)
