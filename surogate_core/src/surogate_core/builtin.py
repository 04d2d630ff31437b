"""Core's own plugin: provides standard ops, their loss, collectives and copies through the usual hooks.

Imports are inside the hooks, so that listing plugins stays cheap.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pluggy

from .api import KernelDef, LossDef, OpDef

hookimpl = pluggy.HookimplMarker("surogate")


@hookimpl
def surogate_ops() -> Iterable[OpDef]:
    from .standard_ops import OPS

    return OPS


@hookimpl
def surogate_losses() -> Iterable[LossDef[Any]]:
    from .standard_ops.next_token import LOSSES

    return LOSSES


@hookimpl
def surogate_kernels() -> Iterable[KernelDef]:
    from .runtime import collectives, copies

    return (*collectives.KERNELS, *copies.KERNELS)
