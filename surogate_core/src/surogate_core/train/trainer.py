"""Trains a planned run: builds what the loop needs, runs it, writes the outputs, cleans up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api import Comm, RunInfo
from ..checkpoint import folders as checkpoint
from ..checkpoint import hf
from ..checkpoint.adapter import ADAPTER_FOLDER, MERGED_FOLDER, open_merge, write_adapter
from ..checkpoint.progress import Progress
from ..checkpoint.resume import Resumed
from ..config.load import resolved
from ..config.schema import TrainConfig
from ..data.checks import bits_per_byte
from ..data.corpora import Corpora, load_corpora
from ..data.loader import Loader, eval_batches
from ..errors import RunStopped
from ..machine.timing import FirstStep, mark
from ..memory.devices import GIB
from ..outputs.check import OutputCheck
from ..outputs.folder import open_output, records_file, set_aside
from ..outputs.load_commands import load_commands
from ..outputs.model_card import write_card
from ..outputs.push import push, reserve
from ..planning.plan import Plan
from ..planning.run import Run
from ..planning.versions import run_versions
from ..reporting.gpu_telemetry import open_telemetry
from ..reporting.loggers import Loggers, open_loggers
from ..reporting.picture import import_ahead
from ..reporting.text import devices_text, parameters_text
from .interrupt import Interrupt
from .loop import Job
from .loop import train as loop
from .packing_check import check_packing
from .result import TrainResult
from .schedule import Schedule
from .worker_setup import check_finite, fill_weights, make_worker, watch_finite

if TYPE_CHECKING:
    from torch import Tensor

    from ..checkpoint.saved_run import SavedRun
    from ..checkpoint.writer import View
    from ..runtime.team import Team
    from ..runtime.worker import Worker

Notice = Callable[[str], None]


SHORT_RUN_SECONDS = 60
"""Runs that the plan expects to be shorter start the process that checks their outputs early, others at their end."""


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What a run trains on and for how long. `total` counts optimizer steps."""

    data: Corpora
    loader: Loader
    schedule: Schedule
    total: int

    @classmethod
    def of(cls, run: Run, world_size: int, notice: Notice) -> TrainingPlan:
        config, formats = run.config, run.registry.dataset_formats()
        data = load_corpora(config, formats, run.model_dir, run.dims.vocab_size, notice)
        loader = Loader(
            data.train,
            config.per_device_train_batch_size,
            config.gradient_accumulation_steps * world_size,
            config.train_seed,
            data.tokenizer.padding_id,
        )
        total = config.max_steps if config.max_steps > 0 else config.num_epochs * loader.steps_per_epoch
        schedule = Schedule.build(
            config.lr_scheduler_type,
            config.learning_rate,
            total,
            config.warmup_steps,
            config.warmup_ratio,
            config.cooldown_steps,
            config.final_lr_fraction,
            config.wsd_decay_steps_fraction,
        )
        return cls(data=data, loader=loader, schedule=schedule, total=total)


def train_planned(
    run: Run, plan: Plan, resumed: Resumed | None, comms: Sequence[Comm], check: OutputCheck, notice: Notice
) -> TrainResult:
    """Train on the devices that `comms` connects, from the checkpoint `resumed` if there is one; see `run.train`."""
    from ..checkpoint.saved_run import SavedRun, facts
    from ..checkpoint.writer import open_saves

    config = run.config
    for line in run.loaded.notices:
        notice(line)
    notice(_headline(plan))
    course = TrainingPlan.of(run, plan.report.world_size, notice)
    notice(_data_line(course))
    mark("data")
    saved_run = SavedRun(
        run=run,
        plan=plan,
        facts=facts(run, plan, course.loader, course.total),
        versions=run_versions(run, plan) | {"device": devices_text(plan.report)},
        records=records_file(run.loaded),
    )
    if resumed:
        changes = saved_run.check(resumed)
        for line in (f"goes on from {resumed.directory}, after step {resumed.step:,} of {course.total:,}", *changes):
            notice(line)
    repo = reserve(config) if config.push_to_hub else ""
    _start_output_check(run, course.total * plan.report.step.seconds, check)
    with ExitStack() as stack:
        worker = make_worker(run, plan, comms, notice)
        stack.callback(worker.close)
        progress = _fill(saved_run, resumed, worker)
        mark("weights")
        if config.check_finite:
            check_finite(run, plan, worker, progress.step)
            notice("check_finite: runs op by op and looks at everything that an op writes, which is slow")
        wanted = config.save_in_background and 0 < config.save_steps < course.total
        saves = open_saves(worker, saved_run.values, _writer(config, saved_run), notice, wanted=wanted)
        stack.callback(saves.close)
        mark("memory for checkpoints")
        worker.start(graphs=config.use_cuda_graphs)
        mark("masters, CUDA graphs")
        if not config.check_finite:  # whose first batch is to be that of step one
            _check_packing(plan, course, worker, notice)
        set_aside(run.loaded, resumed, notice)
        open_output(run.loaded, notice)
        loggers = _open_loggers(run, _run_info(run, plan, course, progress), notice, stack)
        _open_telemetry(plan, config.log_gpu_util, comms, loggers, notice)
        loggers.opened.append(FirstStep())
        interrupt = stack.enter_context(Interrupt())
        mark("check of packing, loggers")

        def validation(limit: int | None) -> Iterable[Any]:
            rows, size = course.data.validation, config.per_device_train_batch_size
            most = None if limit is None else limit * worker.width
            return () if rows is None else eval_batches(rows, size, most, pad_id=course.data.tokenizer.padding_id)

        job = Job(
            worker=worker,
            loader=course.loader,
            schedule=course.schedule,
            loggers=loggers.opened,
            total_steps=course.total,
            eval_batches=validation,
            eval_steps=config.eval_steps,
            saves=saves,
            save_steps=config.save_steps,
            max_nonfinite_steps=config.max_nonfinite_steps,
            watch=lambda steps_done: watch_finite(run.registry, plan, worker, steps_done),
        )
        loop(job, interrupt, progress)
        mark("the other steps, evaluations")
        signal_exit = interrupt.exit_code  # of a signal from here on there is nothing to tell: the run is done
        if not signal_exit:
            _write_outputs(run, plan, worker, progress, check)
            write_card(run, plan, repo, progress, saved_run.versions)
        loggers.status = "interrupted" if signal_exit else "done"
    done = _result(run, course, progress, signal_exit)
    if not repo or signal_exit:
        return done
    return replace(done, pushed=push(done.adapter_dir or done.output_dir, repo, notice))


# -------------------------------------------------------------------------------------------------------- before a run


def _headline(plan: Plan) -> str:
    given, report = plan.inputs, plan.report
    some = plan.n_trainable < plan.n_params
    return (
        f"{given.model.name}, {parameters_text(plan.n_params)} parameters, "
        + (f"{parameters_text(plan.n_trainable)} trained, " if some else "")
        + f"{given.precision.model}, on {devices_text(report)}: {report.device_bytes['total'] / GIB:.2f} GiB planned"
        + (" on each" if report.world_size > 1 else "")
    )


def _data_line(course: TrainingPlan) -> str:
    data, loader = course.data, course.loader
    held = f", {data.validation.n_tokens:,} to validate" if data.validation else ""
    return (
        f"{data.train.n_tokens:,} tokens to train in {data.train.n_rows:,} rows{held}; "
        f"{loader.steps_per_epoch:,} steps an epoch, {course.total:,} in all"
    )


def _fill(saved_run: SavedRun, resumed: Resumed | None, worker: Worker | Team) -> Progress:
    """Fill params and states as the run begins. Return the progress to start from."""
    if resumed:
        return saved_run.restore(resumed, worker)
    fill_weights(saved_run.run, saved_run.plan.assembly, worker)
    return Progress()


def _writer(config: TrainConfig, saved_run: SavedRun) -> Callable[[int, Progress, View], Path]:
    """Return the function that writes the checkpoint of a step from views of its values and prunes old ones."""
    checkpoints = Path(config.resolved_checkpoint_dir)

    def write(step: int, progress: Progress, view: View) -> Path:
        _refuse_broken_weights((view(v) for v in saved_run.weights), step, checkpoints)
        path = checkpoint.save_checkpoint(
            checkpoints, step, lambda folder: saved_run.write(folder, view, step, progress)
        )
        checkpoint.prune_checkpoints(checkpoints, config.save_total_limit, newest=step)
        return path

    return write


def _check_packing(plan: Plan, course: TrainingPlan, worker: Worker | Team, notice: Notice) -> None:
    inputs, padding = plan.inputs, course.data.tokenizer.padding_id
    dtypes = (inputs.precision.model, inputs.precision.matmul)
    found = check_packing(worker, course.data.train, inputs.batch_size, padding, dtypes)
    if found:
        notice(str(found))


def _open_loggers(run: Run, info: RunInfo, notice: Notice, stack: ExitStack) -> Loggers:
    """Open the run's loggers. `stack` closes them."""
    loggers = Loggers()
    stack.callback(loggers.close)
    for logger in open_loggers(run.loaded, run.registry, info, notice):
        loggers.opened.append(logger)
    return loggers


def _open_telemetry(plan: Plan, every: int, comms: Sequence[Comm], loggers: Loggers, notice: Notice) -> None:
    """Report the state of the run's GPUs to `loggers` every `every` steps; 0: never."""
    from ..runtime.device import gpu_uuids

    if plan.target.device.sm is not None and every:
        uuids = gpu_uuids([comm.device for comm in comms] or [0])
        loggers.opened[:0] = open_telemetry(uuids, every, loggers.gpu, notice)


def _run_info(run: Run, plan: Plan, course: TrainingPlan, progress: Progress) -> RunInfo:
    config = run.config
    return RunInfo(
        run_name=config.resolved_run_name,
        output_dir=Path(config.output_dir),
        total_steps=course.total,
        steps_per_epoch=course.loader.steps_per_epoch,
        tokens_per_step=course.loader.tokens_per_step,
        config=resolved(run.loaded),
        versions=run_versions(run, plan),
        device=devices_text(plan.report),
        parameters=plan.n_params,
        trainable_parameters=plan.n_trainable,
        done_steps=progress.step,
    )


# -------------------------------------------------------------------------------------------------------- behind a run


def _refuse_broken_weights(weights: Iterable[Tensor], step: int, checkpoints: Path) -> None:
    """An update can overflow although its gradient was finite; what it leaves must not replace a good checkpoint."""
    from ..checkpoint.folders import list_checkpoints
    from ..runtime.finite_check import all_finite

    if all_finite(weights):
        return
    complete = list_checkpoints(checkpoints)
    raise RunStopped(
        f"step {step}: the weights hold numbers that are not finite: an update overflowed. They are not saved; "
        + (f"the newest complete checkpoint is {complete[-1]}. " if complete else "no checkpoint was complete yet. ")
        + "Lower learning_rate or weight_decay."
    )


def _is_checked(run: Run) -> bool:
    return run.config.verify_outputs and run.model.in_transformers


def _start_output_check(run: Run, seconds: float, check: OutputCheck) -> None:
    """Let the output check import its libraries during a short run. During a long one it would only hold memory."""
    if _is_checked(run) and seconds < SHORT_RUN_SECONDS:
        check.prepare(run)
    else:
        check.end()


def _write_outputs(run: Run, plan: Plan, worker: Worker | Team, progress: Progress, check: OutputCheck) -> None:
    """Write the trained model, or the adapter and perhaps the merged model. `check` then loads each once."""
    if _is_checked(run):
        check.prepare(run)
    config, assembly = run.config, plan.assembly
    output = Path(config.output_dir)
    worker.settle()
    params = worker.params()
    _refuse_broken_weights(params.values(), progress.step, Path(config.resolved_checkpoint_dir))
    if run.adapter is None:
        dtype = plan.inputs.precision.model
        hf.save_model(output, assembly.weights, params, run.model_config, run.model_dir, dtype)
    else:
        adapter, _ = run.adapter
        folder = output / ADAPTER_FOLDER
        hf.save_files(folder, lambda fresh: write_adapter(fresh, run, assembly, params), adapter.config_file)
        if config.merge_adapter:
            open_merge(adapter, folder, config.model).write(output / MERGED_FOLDER)
    mark("outputs written")
    if _is_checked(run):
        import_ahead()
        check.finish(run)
        mark("outputs loaded once")


def _result(run: Run, course: TrainingPlan, progress: Progress, signal_exit: int) -> TrainResult:
    config, data = run.config, course.data
    bits = None
    if progress.evaluations and data.validation_bytes:
        _, loss, labels = progress.evaluations[-1]
        bits = bits_per_byte(loss, labels, data.validation_bytes) if labels == data.validation_labels else None
    return TrainResult(
        run_name=config.resolved_run_name,
        output_dir=Path(config.output_dir),
        checkpoint_dir=Path(config.resolved_checkpoint_dir),
        steps=progress.step,
        total_steps=course.total,
        tokens=progress.tokens,
        seconds=progress.seconds,
        loss=progress.loss,
        evaluations=tuple(progress.evaluations),
        unigram_loss=data.unigram_loss,
        bits_per_byte=bits,
        signal_exit=signal_exit,
        adapter_dir=Path(config.output_dir) / ADAPTER_FOLDER if config.adapter is not None else None,
        merged_dir=Path(config.output_dir) / MERGED_FOLDER
        if config.adapter is not None and config.merge_adapter
        else None,
        commands=load_commands(run),
    )
