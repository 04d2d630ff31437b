"""Trains a planned run: builds what the loop needs, runs it, writes the outputs, cleans up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.api import Comm, Report
from surogate_core.batch import MicroBatch
from surogate_core.machine.devices import GIB
from surogate_core.machine.timing import mark
from surogate_core.planning.plan import Plan

from ..checkpoints.facts import DATA, THREADS, fact_text, value_text
from ..checkpoints.progress import Progress
from ..checkpoints.resume import FOLDERS, Resumed, saved_tokens
from ..config.load import published
from ..data.loader import eval_batches
from ..data.old_caches import caches_before
from ..data.saved_tokens import SavedTokens
from ..outputs.check import OutputCheck
from ..reporting.loggers import Loggers
from ..reporting.metrics import metrics_path
from ..reporting.text import counted, devices_text, parameters_text
from ..reporting.utilization import utilization
from ..runs.published_form import reading_line
from ..runs.run import Run
from ..runs.versions import run_versions
from ..world.log import ProcessLog
from ..world.processes import LOAD_SECONDS, SAVE_SECONDS, SLOWEST_WRITES, START_SECONDS, Processes
from .best_rule import BestRule, refuse_lost_best
from .callback_calls import Call
from .callback_tools import open_tools
from .callbacks import Callbacks
from .doubts import Doubts
from .end_report import end_report
from .ending import output_report, result_of, why_ended, write_outputs
from .interrupt import Interrupt, Listener
from .job import Job
from .loop import train
from .packing_check import PackingCheck, check_packing
from .result import TrainResult
from .run_files import NoFiles, PartFiles, RunFiles
from .steps import Steps, load_steps
from .template_date import date_line, dated
from .worker_setup import check_finite, fill_weights, make_worker, receive_staged, watch_finite

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker

    from ..checkpoints.saved_run import SavedRun
    from ..checkpoints.writer import CheckpointWriter
    from .samples import Samples

Notice = Callable[[str], None]


def train_planned(
    run: Run,
    plan: Plan,
    resumed: Resumed | None,
    processes: Processes,
    comms: Sequence[Comm],
    check: OutputCheck,
    notice: Notice,
    listen: Callable[[Report], bool | None] | None,
    callbacks: Callbacks,
) -> TrainResult:
    """Train on the ranks of this process, which `comms` connects, from the checkpoint `resumed` if there is one.

    See `run.train`. Only the writer of `processes` knows `resumed`. It writes all but the parts of values that ranks
    of others have.
    """
    run = dated(run, resumed, processes)
    config, world = run.config, processes.world
    processes.positions = [comm.position for comm in comms]
    for comm in comms:
        processes.on_failure(comm.abort)
    steps, saved_run = _load_data(run, plan, resumed, processes, notice)
    files = NoFiles()
    if world.writer:
        files = RunFiles(saved_run, steps, processes, notice, check)
    elif saved_run.divided:
        files = PartFiles(saved_run, steps, processes, notice)
    files.prepare()
    with ExitStack() as stack:
        processes.at("the selection of algorithms", START_SECONDS)
        worker = make_worker(run, plan, comms, notice, processes)
        stack.callback(worker.close)
        processes.at("loading the weights", LOAD_SECONDS)
        progress = _fill(saved_run, resumed, worker, processes)
        mark("weights")
        rule = BestRule.of(config)
        progress.best = rule.begun(progress.best, notice, progress.step) if rule else None
        if config.check_finite:
            check_finite(run, plan, worker, progress.step)
            notice("check_finite: runs op by op and checks every value that an op writes, which is slow")
        processes.at("preparing the first step", START_SECONDS)
        checkpoints = files.open_checkpoints(worker)
        stack.callback(checkpoints.close)
        mark("memory for checkpoints")
        worker.start(graphs=config.use_cuda_graphs and plan.gains_by_graphs)
        mark("masters, CUDA graphs")
        if plan.inputs.loss.cached_reference:
            from .cached_reference import fill_reference

            fill_reference(saved_run, steps, worker, processes, bool(progress.step), notice)
        packing = None
        if not config.check_finite:  # a checked run runs nothing before step 1
            packing = _check_packing(plan, steps, worker, processes, notice)
        samples = files.open_samples(worker, stack)
        loggers = files.open(worker, resumed, progress, stack)
        processes.barrier("the first step")
        if isinstance(notice, ProcessLog):
            notice.open()
        interrupt = stack.enter_context(Interrupt(processes))
        if listen is not None:
            loggers.opened.append(Listener(listen, interrupt))
        if callbacks.given:
            loggers.opened.append(callbacks.logger(interrupt.stop))
        tools = open_tools(files, worker, samples, interrupt, stack) if callbacks.between else None
        mark("check of packing, loggers")
        if used := utilization(plan, _devices(plan)):
            notice(str(used))
        job = _job(saved_run, steps, worker, processes, interrupt, progress, checkpoints, loggers, notice, samples)
        train(job, [Call(job, callback, tools) for callback in callbacks.between if tools])
        mark("the other steps, evaluations")
        if stop_reason := why_ended(job):
            notice(f"{stop_reason}: the run ends after step {progress.step:,} of {steps.total:,}")
        signal_exit = interrupt.exit_code
        if not signal_exit:
            if not write_outputs(job, files, notice):
                signal_exit = interrupt.exit_code
            mark("last evaluation")
        processes.at("the end of the run", inf)  # a large model may be loaded for minutes and uploaded for hours
        if not signal_exit:
            files.finish(progress, stop_reason)
            if rule is not None or stop_reason:
                loggers.report(output_report(job, stop_reason))
        if signal_exit:
            loggers.end(end_report(SystemExit(signal_exit), progress.step))
        else:
            loggers.status = "done"
    result = result_of(run, plan, steps, job, signal_exit, world.writer)
    result = replace(result, stop_reason=stop_reason)
    return files.push(replace(result, packing=packing))


def _load_data(
    run: Run, plan: Plan, resumed: Resumed | None, processes: Processes, notice: Notice
) -> tuple[Steps, SavedRun]:
    """Return the steps and what is saved of them. Raises ConfigError if processes differ, or are of another run."""
    processes.compare("versions and settings", _compared(run, plan))
    read = [reading_line(run.form, plan.inputs.precision.model)] if run.form else []
    for line in (*plan.overridden, *read, _headline(plan)):
        notice(line)
    if plan.chosen:
        notice(str(plan.chosen))
    if plan.tiles_line:
        notice(plan.tiles_line)
    if plan.decoded_line:
        notice(plan.decoded_line)
    kept = asdict(saved_tokens(resumed)) if resumed and run.config.resume_with_saved_tokens else None
    kept = processes.share(kept, "the tokens of the checkpoint") if run.config.resume_with_saved_tokens else None
    saved = SavedTokens(**kept) if kept else None
    steps = load_steps(run, processes.world, notice, lambda what: processes.at(what, START_SECONDS), saved)
    for line in _data_lines(steps):
        notice(line)
    if line := date_line(run):
        notice(line)
    mark("data")
    from ..checkpoints.untrained_tokens import untrained_tokens

    if processes.world.writer and (untrained := untrained_tokens(run, plan.assembly, steps.data)):
        notice(untrained)
    saved_run = _saved_run(run, plan, steps)
    data = value_text(DATA, saved_run.facts[DATA])
    processes.compare("data", {fact_text(DATA): data, "steps": str(steps.total)})
    if resumed:
        changes = saved_run.check(resumed)
        refuse_lost_best(run.config, run.loaded.source, saved_run.progress(resumed).best)
        for line in (f"resuming from {resumed.directory} after step {resumed.step:,} of {steps.total:,}", *changes):
            notice(line)
    return steps, saved_run


def _headline(plan: Plan) -> str:
    inputs, report = plan.inputs, plan.report
    partly = plan.assembly.n_trainable < plan.assembly.n_params
    devices, planned = _devices(plan), report.device_bytes["total"] / GIB
    return (
        f"{inputs.model.name}, {parameters_text(plan.assembly.n_params)} parameters, "
        + (f"{parameters_text(plan.assembly.n_trainable)} trained, " if partly else "")
        + f"{inputs.precision.model}, on {devices}: {planned:.2f} GiB planned"
        + (" on each" if report.devices > 1 else "")
    )


def _devices(plan: Plan) -> str:
    return devices_text(plan.report.device, plan.report.devices, plan.report.nodes)


def _data_lines(steps: Steps) -> Iterator[str]:
    data, loader = steps.data, steps.loader
    yield (
        f"{counted(data.train.n_tokens, 'token')} in {counted(data.train.n_rows, 'row')}; "
        f"{counted(loader.steps_per_epoch, 'step')} per epoch, {steps.total:,} in total"
    )
    if held := data.validation:
        yield f"held out to validate, not trained: {counted(held.n_tokens, 'token')} in {counted(held.n_rows, 'row')}"


def _saved_run(run: Run, plan: Plan, steps: Steps) -> SavedRun:
    from ..checkpoints.saved_run import SavedRun, facts

    return SavedRun(
        run=run,
        plan=plan,
        extends=steps.schedule.extends,
        facts=facts(run, plan, steps.loader, steps.total),
        before=partial(caches_before, steps.loader.rows),
        versions=run_versions(run, plan) | {"device": _devices(plan)} | _threads(plan),
        metrics=metrics_path(Path(run.config.output_dir), run.config.log_file),
        turn_ends=steps.data.turn_ends,
    )


def _threads(plan: Plan) -> dict[str, str]:
    """Return the CPU threads of torch if it computes on the CPU: they decide how sums are split, and so their bits."""
    import torch

    if plan.report.device.sm is not None:
        return {}
    return {THREADS: str(torch.get_num_threads() if plan.report.world_size == 1 else 1)}  # several have one each


def _compared(run: Run, plan: Plan) -> dict[str, str]:
    """Return what has to be equal in all processes before they load data."""
    config = {key: value for key, value in published(run.loaded).items() if key not in FOLDERS}
    served = sorted(f"{op}: {provider}" for op, provider in plan.kernels.providers.items())
    return {
        **run_versions(run, plan),
        "device": plan.report.device.title,
        "config.json": json.dumps(run.model_config, sort_keys=True, default=str),
        "kernels": ", ".join(served),
        **{key: json.dumps(value) for key, value in config.items()},
    }


def _fill(saved_run: SavedRun, resumed: Resumed | None, worker: AnyWorker, processes: Processes) -> Progress:
    """Fill params and states of the writer, and parts of all, as the run begins.

    Return the progress to start from, in every process.
    """
    from ..checkpoints.base import stored_params

    run, assembly, what = saved_run.run, saved_run.plan.assembly, "the loaded weights"
    given = str(resumed.directory.resolve()) if resumed else ""
    stored = sorted(stored_params(run, assembly)) if processes.world.writer and not run.config.from_scratch else []
    directory, stored = processes.share([given, stored], "what the run begins from")
    progress = Progress()
    if processes.world.writer:
        if resumed:
            progress = saved_run.restore(resumed, worker)
        else:
            fill_weights(run, assembly, worker)
        processes.share(asdict(progress), what)
        return progress
    if run.adapter or not directory:  # a checkpoint of an adapter does not hold the base
        receive_staged(assembly, worker, stored)
    if directory:
        saved_run.restore_parts(Path(directory), worker)
    progress = Progress.of(processes.share(None, what))
    if directory:
        worker.restored(lr=progress.lr, step=progress.step, skipped=progress.nonfinite)
    return progress


def _check_packing(
    plan: Plan, steps: Steps, worker: AnyWorker, processes: Processes, notice: Notice
) -> PackingCheck | None:
    inputs, padding = plan.inputs, steps.data.tokenizer.padding_id
    dtypes = (inputs.precision.model, inputs.precision.matmul)
    per = plan.assembly.reported[0].per
    found = check_packing(worker, steps.data.train, inputs.batch_size, padding, dtypes, processes, per)
    if found:
        notice(str(found))
    return found


def _job(
    saved_run: SavedRun,
    steps: Steps,
    worker: AnyWorker,
    processes: Processes,
    interrupt: Interrupt,
    progress: Progress,
    checkpoints: CheckpointWriter,
    loggers: Loggers,
    notice: Notice,
    samples: Samples | None,
) -> Job:
    run, plan = saved_run.run, saved_run.plan
    config, data, world = run.config, steps.data, processes.world
    if samples is not None:
        samples.sampler.cut = lambda: interrupt.received

    def validation() -> Iterable[Sequence[MicroBatch]]:
        if data.validation is None:
            return ()
        rows, padding = config.eval_samples or None, data.tokenizer.padding_id
        given = data.validation, config.per_device_train_batch_size, rows
        return eval_batches(*given, pad_id=padding, ranks=world.ranks, world_size=world.size)

    return Job(
        worker=worker,
        processes=processes,
        interrupt=interrupt,
        progress=progress,
        loader=steps.loader,
        schedule=steps.schedule,
        loggers=loggers.opened,
        doubts=Doubts(plan.assembly.reported, notice),
        total_steps=steps.total,
        eval_batches=validation,
        evaluations=steps.evaluations,
        eval_on_start=config.eval_on_start,
        best_rule=BestRule.of(config),
        checkpoints=checkpoints,
        saves=steps.saves,
        kept=steps.kept,
        save_seconds=SAVE_SECONDS + sum(value.nbytes for value in saved_run.values) / SLOWEST_WRITES,
        saves_jointly=saved_run.divided and not processes.alone,
        max_nonfinite_steps=config.max_nonfinite_steps,
        means=plan.inputs.loss.prepass.means if plan.inputs.loss.prepass else (),
        reported=plan.assembly.reported,
        in_nats=plan.inputs.loss.in_nats,
        sample_steps=config.sample_every if config.sample_prompts else None,
        samples=samples,
        numerics=plan.assembly.numerics,
        numerics_steps=config.numerics_report_steps,
        watch=lambda steps_done: watch_finite(run.registry, plan, worker, steps_done),
        utilization=utilization(plan, _devices(plan)),
    )
