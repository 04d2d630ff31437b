"""The executor and buffers of a prepared run: made, filled with weights, watched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..api import Comm, KernelDef, Op
from ..checkpoint.adapter import load_adapter, load_base, trained_tensors
from ..errors import ConfigError
from ..planning.idle_kernels import idle_modules
from ..planning.prepare import Prepared

if TYPE_CHECKING:
    from ..runtime.arena import Buffers
    from ..runtime.team import Team
    from ..runtime.worker import Worker


def make_worker(prepared: Prepared, comms: Sequence[Comm] = (), notice: Callable[[str], None] = print) -> Worker | Team:
    """The executor and buffers of the device that the run was planned for; of all that `comms` connects, as a team.

    `notice` is called with lines for the user.
    """
    from ..runtime.autotune_cache import AutotuneCache
    from ..runtime.context import ExecutionContext
    from ..runtime.launch import SingleComm
    from ..runtime.team import Team
    from ..runtime.worker import Worker

    config, given, registry = prepared.loaded.config, prepared.inputs, prepared.registry
    target = prepared.target
    if target.device.sm is None:
        return Worker.on_cpu(prepared.assembly, given.ops, config.train_seed)
    cache = AutotuneCache(target.device.title, notice)
    idle = idle_modules(prepared)  # with kernels: allow_reference; else the run was refused

    def kernel_for(op: Op) -> KernelDef | None:
        kernel = registry.kernel_for(op, target, config.recipe).kernel
        return None if kernel is None or kernel.module in idle else kernel

    def on_gpu(comm: Comm) -> Worker:
        context = ExecutionContext(
            ops=given.ops,
            kernel_for=kernel_for,
            target=target,
            notice=notice if comm.rank == 0 else _unheard,
            autotune_cache=cache.attach,
            comm=comm,
            allow_reference=config.kernels == "allow_reference",
        )
        return Worker.on_gpu(prepared.assembly, context, config.train_seed)

    worker = Team(comms, on_gpu) if prepared.report.world_size > 1 else on_gpu(SingleComm())
    cache.save()
    return worker


def _unheard(line: str) -> None:
    """What the first rank has said already."""


def fill_weights(prepared: Prepared, worker: Worker | Team) -> None:
    """Random weights or the checkpoint's, and the optimizer's first state, straight into the planned buffers."""
    from ..runtime.initialise import initialise

    config, assembly = prepared.loaded.config, prepared.assembly
    view = worker.buffers.persistent
    stored = {weight.param for weight in assembly.weights}
    initialise(
        (v for v in assembly.declared if v.init and (config.from_scratch or v.name not in stored)),
        view,
        config.train_seed,
        config.init_projections_to_zero,
    )
    if not config.from_scratch:
        load_base(prepared, worker.params())
        refuse_nonfinite(prepared, worker)
    load_adapter(prepared, worker.params())
    if config.adapter_path is not None:
        _refuse_nonfinite_adapter(prepared, worker, config.adapter_path)


def refuse_nonfinite(prepared: Prepared, worker: Worker | Team) -> None:
    """Raise ConfigError naming file and tensor when the model's weights hold a number that is not finite."""
    from ..checkpoint.hf import file_of
    from ..runtime.finite_check import refuse_nonfinite_weights

    refuse_nonfinite_weights(worker.params(), prepared.assembly.weights, prepared.model_dir, file_of)


def _refuse_nonfinite_adapter(prepared: Prepared, worker: Worker | Team, path: str) -> None:
    from ..runtime.finite_check import contents

    for name, tensor in trained_tensors(prepared, worker.params()).items():
        held = contents(tensor)
        if not held.finite:
            raise ConfigError(f"adapter_path: {path}: {name} holds {held}. Go on from another adapter.")


def check_finite(prepared: Prepared, worker: Worker | Team, steps_done: int = 0) -> None:
    """Have `worker`, whose weights are in place, stop at the first op that writes a number which is not finite.

    Raises ConfigError when the weights hold one already.
    """
    refuse_nonfinite(prepared, worker)
    watch_finite(prepared, worker, steps_done)


def watch_finite(prepared: Prepared, worker: Worker | Team, steps_done: int) -> None:
    """Have `worker` raise NonFiniteError at such an op from now on, `steps_done` optimizer steps into the run."""
    from ..runtime.finite_check import FiniteCheck

    def make(buffers: Buffers) -> FiniteCheck:
        return FiniteCheck(prepared.assembly, buffers, lambda op: _served_by(prepared, op), steps_done)

    worker.watch(make)


def _served_by(prepared: Prepared, op: Op) -> str:
    """Who runs an op on the run's device, with the version."""
    registry, target = prepared.registry, prepared.target
    if target.device.sm is not None:
        found = registry.kernel_for(op, target, prepared.loaded.config.recipe)
        if found.kernel:
            versions = {plugin.distribution: str(plugin) for plugin in registry.plugins}
            return f"compiled kernel of {versions[found.provider]}"
    kind = op.attrs["of"] if op.kind == "reference_vjp" else op.kind
    return f"torch reference of {registry.source('op', kind).plugin}"
