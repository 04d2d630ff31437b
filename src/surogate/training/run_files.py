"""The files of a run: what its writer writes, and the twin of the other processes, which write nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from surogate_core.api import RunInfo
from surogate_core.errors import RunStopped
from surogate_core.machine.devices import GIB
from surogate_core.machine.timing import FirstStep, mark

from ..checkpoints import folders as checkpoint
from ..checkpoints import hf
from ..checkpoints.adapter import write_adapter
from ..checkpoints.base_files import kept_tensors, maps_in_files, moved_tensors, stored_names
from ..checkpoints.manifest import DamagedCheckpoint, read_manifest, verify_files
from ..checkpoints.model_ranges import join_files, model_files
from ..checkpoints.progress import Progress
from ..checkpoints.resume import Resumed
from ..checkpoints.tensor_file import nbytes
from ..checkpoints.writer import CheckpointWriter, open_writer
from ..config.load import published
from ..machine.system import available_memory_bytes
from ..outputs.check import OutputCheck
from ..outputs.folder import open_output, set_aside, write_plan
from ..outputs.model_card import write_card
from ..outputs.push import push, reserve
from ..reporting.alerts import open_alerts
from ..reporting.gpu_telemetry import open_telemetry
from ..reporting.loggers import Loggers, open_loggers
from ..reporting.picture import import_ahead
from ..reporting.text import group_text
from ..runs.saved_values import adapter_params
from ..runs.versions import run_versions
from ..world.processes import Processes
from .adapter_output import write_adapter_output
from .best_rule import BestRule, output_checkpoint
from .end_report import end_report
from .joint_write import refuse_unshared, write_together
from .result import TrainResult
from .steps import Steps

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.runtime.pieces import Pieces
    from surogate_core.runtime.team import AnyWorker

    from ..checkpoints.saved_run import SavedRun
    from ..checkpoints.writer import View
    from .samples import Samples

SHORT_RUN_SECONDS = 60
"""A run that is planned to be shorter starts the process that checks its outputs before its steps, a longer one
after them."""


class NoFiles:
    """The files of a process that writes none, and its `CheckpointWriter`. The methods are those of `RunFiles`."""

    def _nothing(self, *given: Any, **named: Any) -> None:
        """The writer does it."""

    prepare = write_outputs = finish = save = poll = wait = close = _nothing

    def open_checkpoints(self, worker: AnyWorker) -> CheckpointWriter:
        return self

    def open(self, worker: AnyWorker, resumed: Resumed | None, progress: Progress, stack: ExitStack) -> Loggers:
        return Loggers()

    def open_samples(self, worker: AnyWorker, stack: ExitStack) -> Samples | None:
        return None

    def push(self, result: TrainResult) -> TrainResult:
        return result


@dataclass
class PartFiles(NoFiles):
    """The files of a process that has parts of values: it writes them into checkpoints and models of the writer."""

    saved_run: SavedRun
    steps: Steps
    processes: Processes
    notice: Callable[[str], None]

    def __post_init__(self) -> None:
        self.run, self.plan, self.config = self.saved_run.run, self.saved_run.plan, self.saved_run.run.config
        self.output, self.checkpoints = Path(self.config.output_dir), Path(self.config.resolved_checkpoint_dir)

    def open_checkpoints(self, worker: AnyWorker) -> CheckpointWriter:
        """Return the writer of checkpoints. A run that saves only at its end needs none in the background."""
        steps, rule = self.steps, BestRule.of(self.config)
        between = steps.saves.within(steps.total) or steps.kept.within(steps.total) or (rule is not None and rule.saves)
        background = self.config.save_in_background and bool(between)
        world, free = self.processes.world, available_memory_bytes()
        if self.saved_run.divided and not self.processes.alone:
            refuse_unshared(self.processes, "checkpoint_dir", self.checkpoints)
            self.saved_run.refuse_ranges(world.processes)
            free //= world.processes // world.nodes  # all have looked before any of them allocates
        values = self.saved_run.values
        write, ranks = self._write_checkpoint, world.ranks
        return open_writer(worker, values, write, self.notice, background=background, free=free, ranks=ranks)

    def _write_checkpoint(self, step: int, progress: Progress, view: View) -> str:
        """Write what this process has of the checkpoint of a step. Return what notices call it."""
        path = checkpoint.step_folder(self.checkpoints, step)
        write_together(self.processes, None, lambda folder: self._write_own(folder, step, view))
        return f"its part of {path.name}"

    def _write_own(self, folder: Path, step: int, view: View) -> Mapping[str, str]:
        saved_run, world = self.saved_run, self.processes.world
        own = (v for v in saved_run.weights if v.shard or world.writer)
        self._refuse_nonfinite((tensor for v in own for tensor in view(v).tensors), step)
        path = checkpoint.step_folder(self.checkpoints, step)
        with checkpoint.stopping_when_disk_refuses(path, safe_in=self.checkpoints):
            return saved_run.write(folder, view, world.process, world.processes)

    def _refuse_nonfinite(self, weights: Iterable[Tensor], step: int) -> None:
        """Raise RunStopped for weights with NaN or inf, so that they never replace a good checkpoint.

        An update can overflow although its gradient was finite.
        """
        from surogate_core.runtime.finite_check import all_finite

        if all_finite(weights):
            return
        complete = checkpoint.list_checkpoints(self.checkpoints)
        raise RunStopped(
            f"step {step}: the weights hold NaN or inf: an update overflowed. They are not saved; "
            + (f"the newest complete checkpoint is {complete[-1]}. " if complete else "no checkpoint is complete yet. ")
            + "Lower learning_rate or weight_decay."
        )

    def write_outputs(self, worker: AnyWorker, progress: Progress, seconds: float) -> None:
        """Write the parts of the trained model that this process has, if no process has all of it."""
        if output_checkpoint(self.config, progress):
            return  # process 0 copies it
        if self.saved_run.in_ranges(self.processes.world.processes):
            self.processes.at("writing the outputs", seconds, saving=True)
            worker.settle()
            with checkpoint.stopping_when_disk_refuses(self.output, safe_in=self.checkpoints):
                write_together(self.processes, None, partial(self._write_ranges, self.pieces(worker), progress.step))

    def pieces(self, worker: AnyWorker) -> Mapping[str, Pieces]:
        """Return what this process has of the weights: parts, and of the writer also whole ones."""
        writer = self.processes.world.writer
        return {name: worker.pieces(v) for name, v in self.plan.assembly.params.items() if v.shard or writer}

    def _write_ranges(self, params: Mapping[str, Pieces], step: int, folder: Path) -> Mapping[str, str]:
        world = self.processes.world
        self._refuse_nonfinite((tensor for held in params.values() for tensor in held.tensors), step)
        return self.saved_run.write_model(folder, params, world.process, world.processes)


@dataclass
class RunFiles(PartFiles):
    """The files of the writer. A run calls the methods in their order, each once."""

    check: OutputCheck
    repo: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.checked = self.config.verify_outputs and self.run.model.in_transformers
        self.keeps = bool(self.run.model.kept_tensors(self.run.dims))

    def prepare(self) -> None:
        """Reserve the repository of the upload. Let the output check import its libraries during a short run.

        During a long one it would only hold memory. But it first looks whether the base has all tensors of which
        outputs have copies.
        """
        self.repo = reserve(self.config) if self.config.push_to_hub else ""
        self.short = self.steps.total * self.plan.report.step.seconds < SHORT_RUN_SECONDS
        if self.checked and (self.short or self.keeps):
            self.check.prepare(self.run, base=self.keeps)
        else:
            self.check.end()

    def _write_checkpoint(self, step: int, progress: Progress, view: View) -> str:
        """Write the checkpoint of a step with what the other processes have of it, and remove old ones."""
        saved_run = self.saved_run

        def write_own(folder: Path) -> Mapping[str, str]:
            return self._write_own(folder, step, view)

        def fill(folder: Path) -> None:
            together = saved_run.divided
            own, others = write_together(self.processes, folder, write_own) if together else (write_own(folder), {})
            saved_run.complete(folder, step, progress, own, others)

        path = checkpoint.save_checkpoint(self.checkpoints, step, fill)
        self.processes.checkpoint = path.name
        best = progress.best.step if progress.best and not progress.best.folder else None
        limit, kept = self.config.save_total_limit, self.config.save_keep_every
        checkpoint.prune_checkpoints(self.checkpoints, limit, newest=step, best=best, keep_every=kept)
        return path.name

    def open(self, worker: AnyWorker, resumed: Resumed | None, progress: Progress, stack: ExitStack) -> Loggers:
        """Make the folders, and return the loggers, the reports on GPUs first. `stack` closes them."""
        from surogate_core.runtime.device import gpu_uuids

        run = self.run
        if self.keeps:
            self._check_kept()
        set_aside(run.loaded, resumed, self.notice)
        open_output(run.loaded, run_versions(run, self.plan), self.notice)
        write_plan(run, self.plan)
        if run.adapter is not None:  # so that one that cannot be saved is found before the training
            with TemporaryDirectory(dir=self.output, prefix=checkpoint.SAVING) as rehearsal:
                saved = self.saved_run
                write_adapter(Path(rehearsal), run, self.plan.assembly, worker.params(), saved.facts, saved.turn_ends)
        loggers = Loggers()
        stack.enter_context(loggers.closing(lambda error: end_report(self.processes.cause(error), progress.step)))
        self.processes.on_hang(lambda failure: loggers.end(end_report(failure, progress.step)))
        for logger in open_loggers(run.loaded, run.registry, self._run_info(progress), self.notice):
            loggers.opened.append(logger)
        if self.config.alerts is not None:
            loggers.opened.append(open_alerts(self.config.alerts, self.config.resolved_run_name, self.notice))
        if self.plan.target.device.sm is not None and self.config.log_gpu_util:
            uuids = gpu_uuids([*dict.fromkeys(self.processes.world.devices)])
            loggers.opened[:0] = open_telemetry(uuids, self.config.log_gpu_util, loggers.report, self.notice)
        loggers.opened.append(FirstStep())
        return loggers

    def open_samples(self, worker: AnyWorker, stack: ExitStack) -> Samples | None:
        """Start the process that writes samples, if the run has any."""
        if not self.config.sample_prompts:
            return None
        from .samples import open_samples

        world, gpu = self.processes.world, ""
        if self.plan.target.device.sm is not None and self.config.sample_on == "device":
            from surogate_core.runtime.device import gpu_uuids

            gpu = gpu_uuids(world.devices[:1])[0]
        pieces = partial(self.pieces, worker)
        return open_samples(self.saved_run, self.steps, pieces, gpu, world.processes, stack)

    def _check_kept(self) -> None:
        """Refuse a base that lacks tensors of which outputs have copies. Say once that a full training does not train
        them."""
        if self.checked:
            self.check.refuse_incomplete_base(self.run)
            if not self.short:
                self.check.end()
        kept = kept_tensors(self.run, stored_names(self.run, self.plan.assembly.weights))
        if kept and self.run.adapter is None:
            patterns, size = self.run.model.kept_tensors(self.run.dims), sum(map(nbytes, kept)) / GIB
            self.notice(
                f"model: {', '.join(patterns)}: {len(kept):,} tensors, {size:.2f} GiB, are not trained; every output "
                "has those of the base"
            )

    def _run_info(self, progress: Progress) -> RunInfo:
        plan, loader, held = self.plan, self.steps.loader, self.steps.data.validation
        rows = min(held.n_rows, self.config.eval_samples or held.n_rows) if held else 0
        return RunInfo(
            run_name=self.config.resolved_run_name,
            output_dir=self.output,
            total_steps=self.steps.total,
            steps_per_epoch=loader.steps_per_epoch,
            tokens_per_step=loader.tokens_per_step,
            config=published(self.run.loaded),
            versions=run_versions(self.run, plan),
            device=self.saved_run.versions["device"],
            parameters=plan.assembly.n_params,
            trainable_parameters=plan.assembly.n_trainable,
            done_steps=progress.step,
            eval_time=plan.eval_seconds(rows) / plan.report.step.seconds,
            evaluated=self.steps.evaluated,
            planned={
                "tokens_per_second": plan.report.tokens_per_second,
                "device_bytes": plan.report.device_bytes["total"],
            },
            headlines=[figure.name for figure in plan.assembly.reported if figure.headline],
            group=group_text(plan.inputs.loss.group_size),
        )

    def write_outputs(self, worker: AnyWorker, progress: Progress, seconds: float) -> None:
        """Write the trained model, or the adapter and, if asked for, the merged model, which `check` begins to load.

        The weights are the last ones, or those of `output_checkpoint`. The other processes wait for it, `seconds` at
        most.
        """
        self.processes.at("writing the outputs", seconds, saving=True)
        run, step = self.run, progress.step
        if self.checked:
            self.check.prepare(run)
        if saved := output_checkpoint(self.config, progress):
            self._copy(saved)
        else:
            self._write_last(worker, step)
        mark("outputs written")
        if self.checked:
            import_ahead()
            self.check.load(run)

    def _write_last(self, worker: AnyWorker, step: int) -> None:
        """Write the weights as the last step has left them."""
        from ..checkpoints.saved_run import model_export

        run, plan = self.run, self.plan
        worker.settle()
        params = self.pieces(worker)

        def write_joined(fresh: Path) -> None:
            with TemporaryDirectory(dir=self.checkpoints, prefix=checkpoint.SAVING) as name:
                write_together(self.processes, Path(name), partial(self._write_ranges, params, step))
                moved = moved_tensors(maps_in_files(run, plan.assembly))
                join_files(Path(name), [path.name for path in Path(name).iterdir() if path.is_file()], fresh, moved)

        if self.saved_run.in_ranges(self.processes.world.processes):
            hf.save_files(self.output, write_joined, hf.CONFIG, safe_in=self.output)
        else:
            self._refuse_nonfinite((tensor for held in params.values() for tensor in held.tensors), step)
            if run.adapter is None:
                hf.save_model(self.output, model_export(run, plan, params, self.saved_run.turn_ends))
            else:
                trained = {v.name: params[v.name].tensor() for v in adapter_params(plan.assembly)}
                saved = self.saved_run
                write = partial(write_adapter, run=run, assembly=plan.assembly, params=trained, facts=saved.facts)
                write_adapter_output(run, partial(write, turn_ends=saved.turn_ends), self.notice)

    def _copy(self, saved: Path) -> None:
        """Write the weights of a checkpoint. Raises RunStopped if it is gone, or damaged."""
        try:
            manifest = read_manifest(saved)
            verify_files(saved, manifest)
        except DamagedCheckpoint as damage:
            last = checkpoint.list_checkpoints(self.checkpoints)[-1]
            raise RunStopped(
                f"load_best_model_at_end: the outputs are not written: the best checkpoint, {saved}, is gone or "
                f"damaged ({damage}). The last weights are in {last}. surogate export makes a model of it."
            ) from None
        moved = moved_tensors(maps_in_files(self.run, self.plan.assembly))

        def write(fresh: Path) -> None:
            join_files(saved, model_files(manifest), fresh, moved)

        if self.run.adapter is None:
            hf.save_files(self.output, write, hf.CONFIG, safe_in=self.checkpoints)
        else:
            write_adapter_output(self.run, write, self.notice)

    def finish(self, progress: Progress, stop_reason: str) -> None:
        """Wait for the check of the outputs and write the model card. stop_reason: see `TrainResult`."""
        if self.checked:
            self.check.finish(self.run)
            mark("outputs loaded once")
        write_card(self.run, self.plan, self.repo, progress, self.saved_run.versions, stop_reason)

    def push(self, result: TrainResult) -> TrainResult:
        """Upload the outputs if that was asked for, and return the result with where they are."""
        if not self.repo or result.signal_exit:
            return result
        return replace(result, pushed=push(result.adapter_dir or result.output_dir, self.repo, self.notice))
