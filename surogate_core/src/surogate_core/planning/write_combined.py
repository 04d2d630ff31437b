"""Host memory that only devices read, which can be write-combined (`use_write_combined`).

The host reads write-combined memory so slowly that nothing a checkpoint holds may be in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from ..config.keys import HELD_FOR_DEVICES
from ..errors import ConfigError
from ..memory.plan import MemoryPlan, lay_out
from ..program.value import Value


def only_devices_read(values: Iterable[Value], trained: Collection[Value]) -> list[Value]:
    """Return those of `values` that the host holds and never reads: gradients, derived states and frozen params."""
    return [
        v
        for v in values
        if v.place == "host" and (v.derived or v.role == "grad" or (v.role == "param" and v not in trained))
    ]


def planned_apart(
    plan: Callable[[Iterable[Value]], MemoryPlan], values: Collection[Value], unread: Collection[Value]
) -> MemoryPlan:
    """Return the plan of `values`, with `unread` and the activations on the host apart from the rest of the host.

    Raises ConfigError if there is nothing that only devices read.
    """
    memory = plan(v for v in values if v not in unread)
    host = memory.host or MemoryPlan({}, {})
    segments = {role: lay_out(v for v in unread if v.role == role) for role in memory.segments}
    apart = MemoryPlan(segments, host.arenas)
    read = replace(host, arenas={})
    if not apart.nbytes:
        raise ConfigError(
            f"use_write_combined: true: the host holds nothing that only devices read. {HELD_FOR_DEVICES}, or remove "
            "the key."
        )
    return replace(memory, host=read if read.nbytes else None, unread=apart)
