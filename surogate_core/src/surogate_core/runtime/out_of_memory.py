"""The error of a GPU that runs out of memory: what the plan says, by segment, beside what is allocated.

All buffers of a run are allocated before its first step, and a run whose plan does not fit is refused before that. So
either others hold memory of the GPU, or CUDA and its libraries take more than the plan expects.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..api import Comm
from ..errors import RunStopped
from ..front_end import called
from ..machine.devices import GIB
from ..memory.plan import MemoryPlan
from ..program.value import Role

_SEGMENTS: dict[Role, str] = {"param": "weights", "grad": "gradients", "state": "states", "input": "inputs"}
"""In the order in which they are allocated."""


@contextmanager
def explaining_out_of_memory(plan: MemoryPlan, comm: Comm, runtime_bytes: int) -> Iterator[None]:
    """Turn "out of memory" into RunStopped with the plan and the memory of the device of `comm`.

    runtime_bytes: what CUDA and its libraries take, by the device table.
    """
    try:
        yield
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        if "out of memory" not in str(error).lower():
            raise
        device = comm.device
        free, total = torch.cuda.mem_get_info(device)
        allocated = torch.cuda.memory_allocated(device) + comm.allocated
        text = out_of_memory_text(plan, allocated, free, total, runtime_bytes)
        raise RunStopped(f"GPU {device} ({torch.cuda.get_device_name(device)}) is out of memory. {text}") from error


def out_of_memory_text(plan: MemoryPlan, allocated: int, free: int, total: int, runtime_bytes: int) -> str:
    """Return the plan by segment, what of it is `allocated`, what else holds the memory of the GPU, and what to do."""
    planned = {name: plan.segments[role].nbytes for role, name in _SEGMENTS.items()} | {"activations": plan.arena_bytes}
    reached, parts = 0, []
    for name, nbytes in planned.items():
        reached += nbytes
        parts.append(f"{name} {_gib(nbytes)}{'' if reached <= allocated else ' (not allocated)'}")
    others = max(0, total - free - allocated)
    excess = others - runtime_bytes
    reason = (
        f"Other processes hold about {_gib(excess)}: end them (nvidia-smi lists them), or set {called('memory_limit')}."
        if excess > runtime_bytes
        else "That is more than the plan expects of CUDA and its libraries. Please report it with this text, and set "
        f"{called('memory_limit')}: {max(0, total - 2 * runtime_bytes) / GIB:.2f}GiB."
    )
    return (
        f"Planned: {', '.join(parts)}, CUDA and libraries {_gib(runtime_bytes)}; in all "
        f"{_gib(plan.nbytes + runtime_bytes)} of {_gib(total)}. Held: {_gib(allocated)} by buffers of this run, "
        f"{_gib(others)} by CUDA, libraries and other processes; {_gib(free)} are free. {reason}"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
