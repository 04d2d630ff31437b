"""The Python API, which the command line is written on.

from surogate_core import run

loaded = run.load("run.yaml", ["max_steps=100"])
print(run.plan(loaded, device="h200").report.device_bytes["total"])
result = run.train(loaded)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapted import ADAPTER_FOLDER, MERGED_FOLDER, adapter_of, load_adapter, load_base, merge_adapter, write_adapter
from .api import Comm, DeviceInfo, Op, RunInfo, Topology
from .config import (
    ADAPTER,
    LoadedConfig,
    Mode,
    TrainConfig,
    apply_overrides,
    dump_yaml,
    load_config,
    read_yaml,
    resolved,
)
from .errors import ConfigError, RunStopped
from .gpu_telemetry import open_telemetry
from .hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir
from .hub_push import Pushed, push, reserve
from .interrupt import Interrupt
from .load_commands import load_commands
from .local_device import LocalDevice, local_device
from .loggers import Loggers, open_loggers
from .memory.devices import GIB
from .memory.devices import device as known_device
from .memory.report import Report
from .metrics import METRICS_FILE, cut_metrics
from .model_card import write_card
from .model_config import read_config
from .output_check import check_outputs
from .plugins import load_registry
from .prepare import Prepared, prepare
from .resume import Resumed, choose, is_of, refuse_to_mix
from .schedule import Schedule
from .summary import parameters_text
from .train import Job, Progress
from .used_plugins import plugin_versions

if TYPE_CHECKING:
    from torch import Tensor

    from .data.corpora import Corpora
    from .runtime.arena import Buffers
    from .runtime.team import Team
    from .runtime.worker import Worker
    from .saving import View

__all__ = [
    "LoadedConfig",
    "Prepared",
    "TrainResult",
    "fill_weights",
    "load",
    "make_worker",
    "merge",
    "plan",
    "tokenize",
    "train",
]

Notice = Callable[[str], None]

OPENMP_SPINS = "1000"
"""How long torch's CPU threads spin at a barrier before they sleep. Spinning without end, the default, makes a step
10 to 70 times slower as soon as another process computes on the same cores (dev/LOG.md)."""


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. Losses are means over labels, in nats; None when there was nothing to take them from.

    loss: of the last step. evaluations: (step, loss, labels), in order. unigram_loss: of a model that knows only how
    often each token occurs, on the validation set. bits_per_byte: of the last evaluation, if it saw the whole set.
    signal_exit: 0, or 130 or 143 when a signal ended the run. adapter_dir, merged_dir: None where there is none.
    commands: (program, the line that loads the result there). pushed: None where nothing was to be pushed.
    """

    run_name: str
    output_dir: Path
    checkpoint_dir: Path
    steps: int
    total_steps: int
    tokens: int
    seconds: float
    loss: float | None
    evaluations: tuple[tuple[int, float, int], ...]
    unigram_loss: float | None
    bits_per_byte: float | None
    signal_exit: int
    adapter_dir: Path | None = None
    merged_dir: Path | None = None
    commands: tuple[tuple[str, str], ...] = ()
    pushed: Pushed | None = None


def load(path: str | Path, overrides: Sequence[str] = (), mode: Mode = "train") -> LoadedConfig:
    """Read and validate a YAML file; `overrides` are "key=value". Raises ConfigError naming file and key."""
    raw = apply_overrides(read_yaml(Path(path)), list(overrides))
    return load_config(raw, registry=load_registry(), mode=mode, source=str(path))


def plan(loaded: LoadedConfig, device: str | DeviceInfo | LocalDevice | None = None) -> Prepared:
    """Plan a run from the model's config.json alone.

    `device`: one to plan for, or its name in the device table; None: what a run here would train on, all visible GPUs
    where the config has `gpus: 0`.
    """
    given = local_device() if device is None else device
    if isinstance(given, LocalDevice):
        count = loaded.config.gpus or given.count
        return prepare(loaded, load_registry(), given.device, world_size=count if given.device.sm else None)
    return prepare(loaded, load_registry(), known_device(given) if isinstance(given, str) else given)


def tokenize(loaded: LoadedConfig, notice: Notice = print) -> Corpora:
    """Tokenise the data of a run into the cache, pack and check it, as `train` begins; without torch or a device.

    Raises ConfigError naming key, file and line for data that cannot be trained on.
    """
    from .data.corpora import load_corpora

    loaded.require_datasets()
    model_dir = resolve_model_dir(loaded.config.model, TOKENIZER_FILES)
    vocab_size = read_config(model_dir).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(f"model: {model_dir / 'config.json'}: vocab_size is {vocab_size!r}, not a number. Fetch it.")
    for line in loaded.notices:
        notice(line)
    return load_corpora(loaded.config, load_registry().dataset_formats(), model_dir, vocab_size, notice)


def train(loaded: LoadedConfig, notice: Notice = print) -> TrainResult:
    """Train as the config says and leave a Hugging Face checkpoint in `output_dir`; of an adapter, in its `adapter`.

    `notice` is called with lines for the user. Raises ConfigError for input that cannot be used, before anything is
    written; RunStopped when the run stopped itself, after saving what is complete.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read when torch is imported, which is below
    config = loaded.config
    registry = load_registry()
    launcher = registry.get("launcher", "local")
    loaded.require_datasets()
    checkpoints = Path(config.resolved_checkpoint_dir)
    resumed = choose(checkpoints, config.resume_from_checkpoint, loaded.source, notice)
    if not config.overwrite_output_dir:
        refuse_to_mix(checkpoints, resumed, "checkpoint_dir" if config.checkpoint_dir else "output_dir", loaded.source)
    files = [*CONFIG_FILES, *TOKENIZER_FILES, *(WEIGHT_FILES if _reads_weights(config, resumed) else ())]
    from .runtime.device import devices_to_use, training_device

    devices = devices_to_use(config.gpus)
    prepared = prepare(loaded, registry, training_device(), files, devices)
    _refuse_to_overwrite(prepared)
    _refuse_unless_it_fits(prepared)
    result: TrainResult = launcher.run(
        lambda comms: _train(prepared, resumed, comms, notice), Topology(devices=devices)
    )
    return result


def merge(folder: str | Path, output: str | Path, base: str | None = None) -> Path:
    """Write the model that the adapter in `folder` makes of its base into `output`; returns the base's folder.

    `base`: directory or hub id, if not what the adapter's files name. Raises ConfigError for files that cannot be used.
    """
    return merge_adapter(load_registry().get("adapter", ADAPTER), Path(folder), Path(output), base)


def _reads_weights(config: TrainConfig, resumed: Resumed | None) -> bool:
    """Whether the model's own weights are needed: a checkpoint has them, but for those that an adapter leaves alone."""
    return config.lora if resumed else not config.from_scratch


def _refuse_to_overwrite(prepared: Prepared) -> None:
    config = prepared.loaded.config
    output = Path(config.output_dir)
    if config.merge_adapter and config.lora:
        output = output / MERGED_FOLDER
    if output.exists() and output.samefile(prepared.model_dir):
        raise ConfigError(
            f"{prepared.loaded.source}: output_dir: {output} is the directory of the model that is trained; its "
            "weights would be replaced. Name another directory."
        )


def _refuse_unless_it_fits(prepared: Prepared) -> None:
    report = prepared.report
    if report.fits:
        return
    from .knobs import cheapest_knobs

    knobs = "; ".join(f"{k.change} (saves {k.saves / GIB:.1f} GiB)" for k in cheapest_knobs(prepared))
    raise ConfigError(
        f"{prepared.loaded.source}: the run needs {report.device_bytes['total'] / GIB:.1f} GiB, more than the "
        f"{report.device.memory_bytes / GIB:.1f} of {report.device.title}. "
        + (f"Cheapest changes: {knobs}." if knobs else "Use a smaller model or a shorter sequence_len.")
    )


def _train(prepared: Prepared, resumed: Resumed | None, comms: Sequence[Comm], notice: Notice) -> TrainResult:
    from . import checkpoint, hf
    from .data.corpora import load_corpora
    from .data.loader import Loader, eval_batches
    from .packing_proof import prove_packing
    from .runtime.device import gpu_uuids
    from .saved_run import SavedRun, facts
    from .saving import open_saves
    from .train import train as loop

    config = prepared.loaded.config
    for line in prepared.loaded.notices:
        notice(line)
    notice(_headline(prepared))
    formats, vocab_size = prepared.registry.dataset_formats(), prepared.ingredients.dims.vocab_size
    data = load_corpora(config, formats, prepared.model_dir, vocab_size, notice)
    loader = Loader(
        data.train,
        config.per_device_train_batch_size,
        config.gradient_accumulation_steps * prepared.report.world_size,
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
    notice(_data_line(data, loader, total))
    made_by = versions() | plugin_versions(prepared) | {"device": devices_text(prepared.report)}
    output = Path(config.output_dir)
    checkpoints = Path(config.resolved_checkpoint_dir)
    records = output / METRICS_FILE if config.log_file is None else Path(config.log_file)
    saved_run = SavedRun(prepared=prepared, facts=facts(prepared, loader, total), versions=made_by, records=records)
    if resumed:
        changes = saved_run.check(resumed)
        for line in (f"goes on from {resumed.directory}, after step {resumed.step:,} of {total:,}", *changes):
            notice(line)
    repo = reserve(config) if config.push_to_hub else ""

    def write(step: int, progress: Progress, view: View) -> Path:
        _refuse_broken_weights((view(v) for v in saved_run.weights), step, checkpoints)
        path = checkpoint.save_checkpoint(
            checkpoints, step, lambda folder: saved_run.write(folder, view, step, progress)
        )
        checkpoint.prune_checkpoints(checkpoints, config.save_total_limit, newest=step)
        return path

    with ExitStack() as stack:
        worker = make_worker(prepared, comms, notice)
        stack.callback(worker.close)
        if resumed:
            progress = saved_run.restore(resumed, worker)
        else:
            progress = Progress()
            fill_weights(prepared, worker)
        if config.check_finite:
            check_finite(prepared, worker, resumed.step if resumed else 0)
            notice("check_finite: runs op by op and looks at everything that an op writes, which is slow")
        periodic = 0 < config.save_steps < total
        saves = open_saves(worker, saved_run.values, write, notice, wanted=periodic and config.save_in_background)
        stack.callback(saves.close)
        worker.start(graphs=config.use_cuda_graphs)
        if not config.check_finite:  # whose first batch is to be that of step one
            precision = prepared.ingredients.precision
            proof = prove_packing(
                *(worker, data.train, config.per_device_train_batch_size, data.tokenizer.padding_id),
                (precision.model, precision.matmul),
            )
            if proof:
                notice(str(proof))
        _open_output(output, checkpoints, prepared.loaded, notice)
        _set_aside(resumed, checkpoints, records, notice, anew=config.overwrite_output_dir)

        adapter = adapter_of(prepared)
        model = (
            *(prepared.assembly.weights, worker.params(), prepared.model_config, prepared.model_dir),
            prepared.ingredients.precision.model,
        )

        def validation(limit: int | None) -> Iterable[Any]:
            rows, size = data.validation, config.per_device_train_batch_size
            most = None if limit is None else limit * worker.width
            return () if rows is None else eval_batches(rows, size, most, pad_id=data.tokenizer.padding_id)

        loggers = Loggers()
        stack.callback(loggers.close)
        info = _run_info(prepared, loader, total, resumed)
        for logger in open_loggers(prepared.loaded, prepared.registry, info, notice):
            loggers.opened.append(logger)
        if prepared.target.device.sm is not None and config.log_gpu_util:
            uuids = gpu_uuids([comm.device for comm in comms] or [0])
            loggers.opened[:0] = open_telemetry(uuids, config.log_gpu_util, loggers.gpu, notice)
        interrupt = stack.enter_context(Interrupt())
        job = Job(
            worker=worker,
            loader=loader,
            schedule=schedule,
            loggers=loggers.opened,
            total_steps=total,
            eval_batches=validation,
            eval_steps=config.eval_steps,
            saves=saves,
            save_steps=config.save_steps,
            max_nonfinite_steps=config.max_nonfinite_steps,
            watch=lambda steps_done: watch_finite(prepared, worker, steps_done),
        )
        loop(job, interrupt, progress)
        signal_exit = interrupt.exit_code  # of a signal from here on there is nothing to tell: the run is done
        if not signal_exit:
            worker.settle()
            _refuse_broken_weights(worker.params().values(), progress.step, checkpoints)
            if adapter is None:
                hf.save_model(output, *model)
            else:
                hf.save_files(
                    output / ADAPTER_FOLDER,
                    lambda folder: write_adapter(folder, prepared, worker.params()),
                    adapter[0].config_file,
                )
                if config.merge_adapter:
                    merge_adapter(adapter[0], output / ADAPTER_FOLDER, output / MERGED_FOLDER, config.model)
            if config.verify_outputs:
                check_outputs(prepared)
            write_card(prepared, repo, progress, made_by)
        loggers.status = "interrupted" if signal_exit else "done"
    done = _result(prepared, progress, total, data, signal_exit)
    if not repo or signal_exit:
        return done
    return replace(done, pushed=push(done.adapter_dir or output, repo, notice))


# ----------------------------------------------------------------------------------------------------- before and after


def _headline(prepared: Prepared) -> str:
    given, report = prepared.ingredients, prepared.report
    some = prepared.n_trainable < prepared.n_params
    return (
        f"{given.model.name}, {parameters_text(prepared.n_params)} parameters, "
        + (f"{parameters_text(prepared.n_trainable)} trained, " if some else "")
        + f"{given.precision.model}, on {devices_text(report)}: {report.device_bytes['total'] / GIB:.2f} GiB planned"
        + (" on each" if report.world_size > 1 else "")
    )


def devices_text(report: Report) -> str:
    """The device of a run, and how many there are of several."""
    return f"{report.world_size} x {report.device.title}" if report.world_size > 1 else report.device.title


def _data_line(data: Corpora, loader: Any, total: int) -> str:
    held = f", {data.validation.n_tokens:,} to validate" if data.validation else ""
    return (
        f"{data.train.n_tokens:,} tokens to train in {data.train.n_rows:,} rows{held}; "
        f"{loader.steps_per_epoch:,} steps an epoch, {total:,} in all"
    )


def make_worker(prepared: Prepared, comms: Sequence[Comm] = (), notice: Notice = print) -> Worker | Team:
    """The executor and buffers of the device that the run was planned for; of all that `comms` connects, as a team.

    `notice`: as in `train`.
    """
    from .runtime.choices import KeptChoices
    from .runtime.team import Team
    from .runtime.worker import Worker

    config, given, registry = prepared.loaded.config, prepared.ingredients, prepared.registry
    target = prepared.target
    if target.device.sm is None:
        return Worker.on_cpu(prepared.assembly, given.ops, config.train_seed)
    choices = KeptChoices(target.device.title, notice)

    def on_gpu(comm: Comm | None) -> Worker:
        return Worker.on_gpu(
            prepared.assembly,
            given.ops,
            config.train_seed,
            kernel_for=lambda op: registry.kernel_for(op, target, config.recipe).kernel,
            target=target,
            notice=notice if comm is None or comm.rank == 0 else _unheard,
            keep_choices=choices.keep,
            comm=comm,
            allow_reference=config.kernels == "allow_reference",
        )

    worker = Team(comms, on_gpu) if prepared.report.world_size > 1 else on_gpu(None)
    choices.save()
    return worker


def _unheard(line: str) -> None:
    """What the first rank has said already."""


def fill_weights(prepared: Prepared, worker: Worker | Team) -> None:
    """Random weights or the checkpoint's, and the optimizer's first state, straight into the planned buffers."""
    from .runtime.initialise import initialise

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
    load_adapter(prepared, worker.params())


def check_finite(prepared: Prepared, worker: Worker | Team, steps_done: int = 0) -> None:
    """Have `worker`, whose weights are in place, stop at the first op that writes a number which is not finite.

    Raises ConfigError when the weights hold one already.
    """
    from .runtime.finite import refuse_nonfinite_weights

    refuse_nonfinite_weights(worker.params(), prepared.assembly.weights, prepared.model_dir)
    watch_finite(prepared, worker, steps_done)


def watch_finite(prepared: Prepared, worker: Worker | Team, steps_done: int) -> None:
    """Have `worker` raise NonFiniteError at such an op from now on, `steps_done` optimizer steps into the run."""
    from .runtime.finite import FiniteCheck

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


def _open_output(output: Path, checkpoints: Path, loaded: LoadedConfig, notice: Notice) -> None:
    """Make the folders, clear what a killed save has left, and write run.yaml: the resolved config and versions."""
    from . import checkpoint

    try:
        output.mkdir(parents=True, exist_ok=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
        header = "".join(f"# {name} {version}\n" for name, version in versions().items())
        (output / "run.yaml").write_text(header + dump_yaml(resolved(loaded)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write to {error.filename or output}: {error.strerror}.") from None
    for leftover in {*checkpoint.remove_leftovers(checkpoints), *checkpoint.remove_leftovers(output)}:
        notice(f"removed {leftover.name}, left by a save that was killed")


def _set_aside(resumed: Resumed | None, checkpoints: Path, records: Path, notice: Notice, *, anew: bool) -> None:
    """Leave of an earlier run what this one goes on from, and rename the rest."""
    from . import checkpoint

    here = resumed if is_of(resumed, checkpoints) else None
    why = f"the run goes on from step {here.step:,}" if here else "a new run begins"
    # Before the records are cut: killed in between, they reach beyond the newest checkpoint, never the reverse.
    moved = checkpoint.set_aside(checkpoints, after=here.step if here else -1)
    if anew and here is None and records.is_file():
        moved.append(checkpoint.aside(records))
    for path in moved:
        notice(f"{path.name}: set aside, since {why}")
    if resumed:
        cut_metrics(records, resumed.step)


def versions() -> dict[str, str]:
    """Versions of what decides a run's numbers, for run.yaml and metrics.jsonl."""
    import platform
    from importlib import metadata

    wanted = ("surogate-core", "torch", "transformers", "tokenizers", "safetensors", "numpy")
    found = {name: metadata.version(name) for name in wanted}
    return found | {"python": platform.python_version()}


def _run_info(prepared: Prepared, loader: Any, total: int, resumed: Resumed | None) -> RunInfo:
    config = prepared.loaded.config
    return RunInfo(
        run_name=config.resolved_run_name,
        output_dir=Path(config.output_dir),
        total_steps=total,
        steps_per_epoch=loader.steps_per_epoch,
        tokens_per_step=loader.tokens_per_step,
        config=resolved(prepared.loaded),
        versions=versions() | plugin_versions(prepared),
        device=devices_text(prepared.report),
        parameters=prepared.n_params,
        trainable_parameters=prepared.n_trainable,
        done_steps=resumed.step if resumed else 0,
    )


def _refuse_broken_weights(weights: Iterable[Tensor], step: int, checkpoints: Path) -> None:
    """An update can overflow although its gradient was finite; what it leaves must not replace a good checkpoint."""
    from .checkpoint import list_checkpoints
    from .runtime.finite import all_finite

    if all_finite(weights):
        return
    complete = list_checkpoints(checkpoints)
    raise RunStopped(
        f"step {step}: the weights hold numbers that are not finite: an update overflowed. They are not saved; "
        + (f"the newest complete checkpoint is {complete[-1]}. " if complete else "no checkpoint was complete yet. ")
        + "Lower learning_rate or weight_decay."
    )


def _result(prepared: Prepared, progress: Progress, total: int, data: Corpora, signal_exit: int) -> TrainResult:
    from .data.proof import bits_per_byte

    config = prepared.loaded.config
    bits = None
    if progress.evaluations and data.validation_bytes:
        _, loss, labels = progress.evaluations[-1]
        bits = bits_per_byte(loss, labels, data.validation_bytes) if labels == data.validation_labels else None
    return TrainResult(
        run_name=config.resolved_run_name,
        output_dir=Path(config.output_dir),
        checkpoint_dir=Path(config.resolved_checkpoint_dir),
        steps=progress.step,
        total_steps=total,
        tokens=progress.tokens,
        seconds=progress.seconds,
        loss=progress.loss,
        evaluations=tuple(progress.evaluations),
        unigram_loss=data.unigram_loss,
        bits_per_byte=bits,
        signal_exit=signal_exit,
        adapter_dir=Path(config.output_dir) / ADAPTER_FOLDER if config.lora else None,
        merged_dir=Path(config.output_dir) / MERGED_FOLDER if config.lora and config.merge_adapter else None,
        commands=load_commands(prepared),
    )
