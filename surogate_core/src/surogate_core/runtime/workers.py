"""Makes the worker of an assembly: that of one rank, or a team of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..api import Comm, KernelDef, Op, OpDef, Target
from ..assembly.assembly import Assembly
from ..assembly.resolve import idle_modules
from .bind import ExecutionContext, UseAutotuneCache
from .comms.single import ALONE
from .team import AnyWorker, Team
from .worker import Worker


def make_worker(
    assembly: Assembly,
    ops: Mapping[str, OpDef],
    target: Target,
    seed: int,
    comms: Sequence[Comm] = (ALONE,),
    *,
    notice: Callable[[str], None] = print,
    autotune_cache: UseAutotuneCache = lambda name, load, dump: None,
    check: Callable[[], None] = lambda: None,
    allow_reference: bool = False,
) -> AnyWorker:
    """Return a worker for the device of `target`; a team of workers if the run has several ranks.

    comms   one for each rank of this process
    notice  called with lines for the user, by the first rank only
    check   raises if another process of the run has failed
    autotune_cache, allow_reference  see `ExecutionContext`. References run in place of modules that are not compiled
                                     for the device, too.
    """
    if target.device.sm is None:
        return _on_cpu(assembly, ops, seed, comms, check)
    idle = idle_modules(assembly.kernels) if allow_reference else {}

    def kernel_for(op: Op) -> KernelDef | None:
        kernel = assembly.kernels.kernel(op)
        return None if kernel is None or kernel.module in idle else kernel

    def on_gpu(comm: Comm) -> Worker:
        context = ExecutionContext(
            ops=ops,
            kernel_for=kernel_for,
            target=target,
            notice=notice if comm.rank == 0 else lambda line: None,  # the first rank has given the same one
            autotune_cache=autotune_cache,
            comm=comm,
            allow_reference=allow_reference,
        )
        return Worker.on_gpu(assembly, context, seed)

    return Team(comms, on_gpu, check) if comms[0].world_size > 1 else on_gpu(comms[0])


def _on_cpu(
    assembly: Assembly, ops: Mapping[str, OpDef], seed: int, comms: Sequence[Comm], check: Callable[[], None]
) -> AnyWorker:
    """Of several ranks, each has one thread: more would wait for each other on the same cores."""

    def make(comm: Comm) -> Worker:
        return Worker.on_cpu(assembly, ops, seed, comm)

    def one_of_several(comm: Comm) -> Worker:
        torch.set_num_threads(1)
        return make(comm)

    if comms[0].world_size == 1:
        return make(comms[0])
    threads = torch.get_num_threads()
    team = Team(comms, one_of_several, check)
    torch.set_num_threads(threads)  # what each rank has set is the default of other threads too
    return team
