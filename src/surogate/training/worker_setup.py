"""Creates the worker of a run, fills its buffers with weights, and has it check what ops write for NaN and inf."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from surogate_core.api import Comm, Op, World
from surogate_core.assembly.assembly import Assembly
from surogate_core.assembly.resolve import KernelTable
from surogate_core.assembly.staging import Staged
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_core.plugins.registry import Registry

from ..checkpoints.adapter import load_adapter, trained_tensors
from ..runs.run import Run
from ..world.processes import Processes

if TYPE_CHECKING:
    from surogate_core.runtime.arena import Buffers
    from surogate_core.runtime.team import AnyWorker


SELECTED = "the selection of algorithms"

DRAWN_TOGETHER = 4 << 30
"""Bytes on the host of the params that are drawn at a time before ranks divide them."""


def make_worker(
    run: Run,
    plan: Plan,
    comms: Sequence[Comm] = (),
    notice: Callable[[str], None] = print,
    processes: Processes | None = None,
) -> AnyWorker:
    """Return a worker for the device that the run is planned for; a team of workers if it is planned for several ranks.

    `comms`: one for each rank of this process. `notice` is called with lines for the user, by the first rank only.
    `processes`: those of the run, which all call this. They use the algorithms that the writer selects, because sums in
    another order would make bits depend on the rank.
    """
    from surogate_core.runtime import workers
    from surogate_core.runtime.comms.single import ALONE

    from ..machine.autotune_cache import AutotuneCache

    target, together = plan.target, processes or Processes(World())
    on_gpu = target.device.sm is not None
    cache = AutotuneCache(target.device.title, notice)
    if on_gpu and not together.world.writer:
        cache.use(together.share(None, SELECTED))
    worker = workers.make_worker(
        plan.assembly,
        plan.inputs.ops,
        target,
        run.config.train_seed,
        comms or (ALONE,),
        notice=notice,
        autotune_cache=cache.attach,
        check=together.check,
        allow_reference=run.config.allows_references,
    )
    cache.save()
    if on_gpu and together.world.writer:
        together.share(cache.selected(), SELECTED)
    return worker


def fill_weights(run: Run, assembly: Assembly, worker: AnyWorker) -> None:
    """Fill the worker's params with random weights or the model's, and its states with their initial values.

    Derived states of staged params are made here, because these params do not stay in memory.
    """
    from surogate_core.runtime.finite_check import contents
    from surogate_core.runtime.initialize import initialize

    from ..checkpoints.base import load_base, refuse_nonfinite
    from ..checkpoints.reference_model import fill_reference_model

    config = run.config
    view = worker.buffers.persistent
    stored = {weight.param for weight in assembly.weights if not weight.new}
    initialize(
        (v for v in assembly.declared if v.init and (config.from_scratch or v.name not in stored)),
        view,
        config.train_seed,
        config.init_projections_to_zero,
    )
    if config.from_scratch:
        _draw_staged(assembly, worker, config.train_seed, config.init_projections_to_zero)
    else:
        load_base(run, assembly, worker)
        refuse_nonfinite(run, assembly, worker.params())
    if config.reference_model is not None:
        fill_reference_model(run, assembly, worker)
    load_adapter(run, assembly, worker.params())
    if config.adapter_path is not None:
        for name, tensor in trained_tensors(assembly, worker.params()).items():
            held = contents(tensor)
            if not held.finite:
                raise ConfigError(f"adapter_path: {config.adapter_path}: {name} holds {held}. Use another adapter.")


def _draw_staged(assembly: Assembly, worker: AnyWorker, seed: int, zero_projections: bool) -> None:
    """Draw the params of which ranks keep their parts.

    Several blocks are drawn at a time, on the host: the largest matrix of a block takes one core as long as all others
    take many, so block by block most cores would wait.
    """
    import torch

    from surogate_core.reference.rounding import TORCH_DTYPES
    from surogate_core.runtime.filling import upload
    from surogate_core.runtime.initialize import initialize

    for parts in _together(assembly.staging, DRAWN_TOGETHER):
        wholes = [{v.name: replace(place, name=v.name, role="param") for v, place in p.places.items()} for p in parts]
        params = [param for whole in wholes for param in whole.values()]
        drawn = {v: torch.empty(v.stored_shape, dtype=TORCH_DTYPES[v.dtype]) for v in params}
        initialize(params, drawn.__getitem__, seed, zero_projections)
        for part, whole in zip(parts, wholes, strict=True):
            views = worker.staged(part)
            upload((views[name], drawn.pop(param)) for name, param in whole.items())
            worker.derive(part)


def _together(staging: Sequence[Staged], most: int) -> Iterator[list[Staged]]:
    """Yield the parts in order, as many at a time as have `most` bytes of params together, or one that has more."""
    parts, nbytes = list[Staged](), 0
    for part in staging:
        size = sum(place.nbytes for place in part.places.values())
        if parts and nbytes + size > most:
            yield parts
            parts, nbytes = [], 0
        parts.append(part)
        nbytes += size
    if parts:
        yield parts


def receive_staged(assembly: Assembly, worker: AnyWorker, stored: Collection[str]) -> None:
    """Take the parts of what the process of rank 0 loads or draws at the same time.

    `stored`: the params that the model's files hold in the run's weight format.
    """
    for part in assembly.staging:
        if part.divides and part.makes(stored):
            worker.derive(part)
        if states := worker.staged_states(part).keys() & stored:
            worker.divide(part, states)


def check_finite(run: Run, plan: Plan, worker: AnyWorker, steps_done: int = 0) -> None:
    """Make `worker`, whose weights are loaded, raise NonFiniteError at the first op that writes NaN or inf.

    `steps_done`: optimizer steps before this call, for the error. Raises ConfigError if the weights hold NaN or inf.
    """
    from ..checkpoints.base import refuse_nonfinite

    refuse_nonfinite(run, plan.assembly, worker.params())
    watch_finite(run.registry, plan, worker, steps_done)


def watch_finite(registry: Registry, plan: Plan, worker: AnyWorker, steps_done: int) -> None:
    """`check_finite` without the check of the weights."""
    from surogate_core.runtime.finite_check import FiniteCheck

    def make(buffers: Buffers) -> FiniteCheck:
        return FiniteCheck(plan.assembly, buffers, lambda op: _served_by(registry, plan.kernels, op), steps_done)

    worker.watch(make)


def _served_by(registry: Registry, kernels: KernelTable, op: Op) -> str:
    """Return the package that runs an op, with its version."""
    found = kernels[op]
    if found.kernel:
        versions = {plugin.distribution: str(plugin) for plugin in registry.plugins}
        return f"compiled kernel of {versions[found.provider]}"
    kind = op.attrs["of"] if op.kind == "reference_vjp" else op.kind
    return f"torch reference of {registry.source('op', kind).plugin}"
