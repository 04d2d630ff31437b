"""Groups of params whose updates are recorded together.

One group of all params gives the fewest launches. Groups of a block are what a pass can bring to the device before
their update and take away after it, or gather and scatter over GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..api import ParamGrad
from ..program.value import Value

Groups = Sequence[Sequence[ParamGrad]]
Grouping = Callable[[Sequence[ParamGrad]], Groups]
"""Splits the trained params into groups. Each param is in exactly one, and no group is empty."""


def one_group(params: Sequence[ParamGrad]) -> Groups:
    """Return all params in one group."""
    return (params,)


def by_block(params: Sequence[ParamGrad]) -> Groups:
    """Return one group for each block and for each param outside of blocks, in order of their first params.

    Params outside of blocks are few and large: an embedding of 8B models has three times the size of a block.
    """
    groups: dict[int | Value, list[ParamGrad]] = {}
    for p in params:
        groups.setdefault(p.param.block if p.param.block >= 0 else p.param, []).append(p)
    return tuple(groups.values())
