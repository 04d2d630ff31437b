"""The plan of a run, with what its user should know of keys that have no effect. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from surogate_core.api import DeviceInfo
from surogate_core.assembly.draft import Draft
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import limited
from surogate_core.planning.plan import Plan, recomputed, sketched

from ..config.schema import DTYPE_KEYS, TrainConfig
from .inputs import run_inputs
from .ranks import count_ranks
from .run import Run
from .unstored import refuse_unstored

Revise = Callable[[PlanInputs], PlanInputs]


def plan_run(
    run: Run,
    device: DeviceInfo,
    world_size: int | None = None,
    revise: Revise = lambda inputs: inputs,
    host_memory: int | None = None,
    nodes: int = 1,
) -> Plan:
    """Plan `run` for `world_size` ranks on devices like `device`, on `nodes` machines; None: as its keys ask.

    The device has no more memory than `device_memory_limit`. `host_memory` is what the run may pin on each machine,
    unless `host_memory_limit` sets it. `revise` changes the inputs before they are planned. Raises ConfigError or
    PluginError if config, model, recipe and device do not fit together.
    """
    plan = recomputed(sketch_run(run, device, world_size, revise, host_memory, nodes=nodes))
    plan.verify()
    return replace(plan, overridden=tuple(_remarks(run, plan)))


def sketch_run(
    run: Run,
    device: DeviceInfo,
    world_size: int | None = None,
    revise: Revise = lambda inputs: inputs,
    host_memory: int | None = None,
    recording: Draft | None = None,
    nodes: int = 1,
) -> Plan:
    """Return the plan of `plan_run` as `sketched` makes it, from the `recording` of another plan if there is one."""
    device = limited(device, run.config.device_memory_limit)
    ranks = count_ranks(run.config, device, None, nodes) if world_size is None else world_size
    given = run_inputs(run, device, ranks, nodes)
    inputs = revise(replace(given, host_memory=run.config.host_memory_limit or host_memory, tiles_stand_in=True))
    plan = sketched(inputs, recording)
    refuse_unstored(run, plan.assembly)
    _refuse_undrawn(run)
    refuse_unmeasured(run.config, ["loss", *(figure.name for figure in plan.assembly.reported[1:])])
    return plan


def refuse_unmeasured(config: TrainConfig, measured: Sequence[str]) -> None:
    """Raise ConfigError unless evaluations measure what says which one is the best."""
    if config.best_metric not in measured:
        raise ConfigError(
            f"metric_for_best_model: the evaluations of this run do not measure {config.best_metric}. "
            + (f"Use one of {', '.join(measured)}." if len(measured) > 1 else f"Use {measured[0]}, which they do.")
        )


def _refuse_undrawn(run: Run) -> None:
    """Raise ConfigError if a run draws its weights and its model has tensors that no run draws, but that files may be
    without."""
    optional = {*run.model.may_lack(run.dims)}
    kept = [pattern for pattern in run.model.kept_tensors(run.dims) if pattern not in optional]
    if run.config.from_scratch and kept:
        raise ConfigError(
            f"from_scratch: true draws new weights, but {run.model.architectures[0]} also has {', '.join(kept)}, which "
            "no run trains. Train a model without them from scratch: name a config.json of the keys in text_config."
        )


def _remarks(run: Run, plan: Plan) -> Iterator[str]:
    """Yield the lines of `Plan.overridden`, also about an optimizer whose states every rank holds whole."""
    yield from run.loaded.notices
    if choice := run.model.row_choice(run.model_config, run.config.sequence_len):
        yield choice.says
    for name, key in DTYPE_KEYS.items():
        asked, used = getattr(run.config.precision_request, f"{name}_dtype"), getattr(plan.inputs.precision, name)
        if asked is not None and asked != used:
            yield f"{key}: {asked} is overridden: recipe {run.config.recipe} uses {used}"
    optimizer = plan.inputs.optimizer
    if plan.inputs.sharding.states and optimizer.granularity is None:
        yield f"optimizer {optimizer.name} declares no granularity: every rank holds all of its states"
    for kind in sorted(run.config.kernel_choices.keys() - plan.kernels.providers.keys()):
        yield f"kernels: {kind}: has no effect, because this run has no such op"
