"""`surogate profile`: times the steps of a run op by op, on the device that the run would use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from surogate import run
from surogate.config.adapter import Mode
from surogate.hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES
from surogate.runs.plan import plan_run
from surogate.runs.run import Run
from surogate.training import start as training
from surogate_core.errors import ConfigError
from surogate_core.machine.spinning import spin_shortly
from surogate_core.memory.cost import OpCosts, arithmetic_rate
from surogate_core.planning.plan import Plan

from .batches import Batches, from_data, random_tokens
from .step_profile import OpTime, StepProfile

if TYPE_CHECKING:
    from .measure import Times

DEFAULT_STEPS = 5


def profile(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    steps: int = DEFAULT_STEPS,
    use_random_tokens: bool = False,
    use_random_weights: bool = False,
    mode: Mode = "train",
    notice: Callable[[str], None] = print,
) -> StepProfile:
    """Time the steps of the run that a YAML file describes, whole and op by op, on one device of this machine.

    Measures `steps` steps on the first batches of the run's data, or on random tokens if the config names no data or
    `use_random_tokens` is set. `use_random_weights` draws the weights instead of reading the checkpoint. Writes
    nothing but the token cache. `mode` is the verb whose defaults the run takes. Raises ConfigError for a run that
    cannot start here.
    """
    spin_shortly()  # before torch is imported
    loaded = run.load(path, [*overrides, "gpus=1", "ranks_per_gpu=1"], mode)
    config = loaded.config
    reads_weights = not (config.from_scratch or use_random_weights)
    has_data = bool(config.datasets) and not use_random_tokens
    files = [*CONFIG_FILES, *(TOKENIZER_FILES if has_data else ()), *(WEIGHT_FILES if reads_weights else ())]
    device = training.device_of_torch(training.usable_device())
    opened = run.open_run(loaded, files)
    plan = plan_run(opened, device, 1)
    training.refuse_missing_kernels(config, plan.kernels, device, notice)
    training.refuse_unless_it_fits(opened, plan)
    batches = from_data(run.tokenize(loaded, notice), config, steps) if has_data else random_tokens(plan.inputs, steps)
    if not any(batch.valid_tokens for batch in batches.steps):
        raise ConfigError("datasets: no token of the profiled steps has a label. Use --random-tokens.")
    times, precision = _measure(opened, plan, batches, use_random_weights, notice), plan.inputs.precision
    return StepProfile(
        model=config.model,
        recipe=f"{config.recipe}, model {precision.model}, products {precision.matmul}, optimizer {config.optimizer}"
        + "".join(f", adapter {adapter.name}" for adapter, _ in plan.inputs.adapters),
        device=plan.report.device,
        weights="of the checkpoint" if reads_weights else "random",
        batches=batches.source,
        method=times.method,
        steps=times.steps,
        tokens=batches.tokens_per_step,
        planned_seconds=plan.report.step.seconds,
        event_seconds=times.event_seconds,
        ops=tuple(_op_times(plan, times)),
    )


def _measure(opened: Run, plan: Plan, batches: Batches, random_weights: bool, notice: Callable[[str], None]) -> Times:
    from surogate_core.runtime.worker import Worker

    from .batches import fill
    from .measure import measure

    worker = run.make_worker(opened, plan, notice=notice)
    assert isinstance(worker, Worker)  # one device
    try:
        fill(opened, plan.assembly, worker, random=random_weights)
        worker.start(graphs=opened.config.use_cuda_graphs and plan.gains_by_graphs)
        prepass = plan.inputs.loss.prepass
        return measure(worker, batches.steps, prepass.means if prepass else ())
    finally:
        worker.close()


def _op_times(plan: Plan, times: Times) -> list[OpTime]:
    """The ops that ran, by program and in its order."""
    device = plan.report.device
    cost_of = OpCosts(plan.inputs.ops, device, plan.kernels.kernel)
    found = []
    for name, program in plan.assembly.all_programs.items():
        for index, op in enumerate(program.ops):
            if (name, index) not in times.ops:
                continue
            calls = times.ops[name, index]
            share, rate = len(calls) / len(times.steps), arithmetic_rate(op, plan.inputs.ops[op.kind], device)
            found.append(OpTime(name, index, op, share, fmean(calls), cost_of(op), rate))
    return found
