"""Compiled kernels of the ops of experts. They import the compiled module only when binding."""

from __future__ import annotations

from surogate_core.api import KernelDef

from . import biases, grouped, routes, rows

KERNELS: tuple[KernelDef, ...] = (*routes.KERNELS, *rows.KERNELS, *biases.KERNELS, *grouped.KERNELS)
