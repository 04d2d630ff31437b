"""Trains a config: joins the processes of the run, finds its device, refuses what cannot work, and plans."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from surogate_core.api import DeviceInfo, JoinContext, Report, Task, World, refuse_checkpoint
from surogate_core.assembly import resolve
from surogate_core.assembly.resolve import KernelTable
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import GIB
from surogate_core.machine.local_device import USE_THE_CPU, LocalDevice, open_contexts
from surogate_core.machine.spinning import spin_shortly
from surogate_core.machine.timing import mark
from surogate_core.planning.plan import Plan
from surogate_core.plugins.discovery import load_registry

from ..checkpoints.adapter import check_adapter
from ..checkpoints.folder_lock import locked
from ..checkpoints.folders import list_checkpoints
from ..checkpoints.resume import Resumed, choose_checkpoint
from ..config.load import LoadedConfig, load_config, resolved
from ..config.plugin_files import plugin_files
from ..config.schema import TrainConfig
from ..fitting.changes import one_line
from ..fitting.proposals import suggest
from ..hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES
from ..machine.rates_file import as_measured, this_machine
from ..machine.system import PINNED_RESERVE_BYTES, pinnable_memory_bytes
from ..outputs.check import OutputCheck
from ..outputs.folder import refuse_earlier_work, refuse_to_overwrite
from ..reporting.loggers import check_loggers
from ..runs.plan import plan_run
from ..runs.ranks import refuse_parts_of_one
from ..runs.run import Run, open_run
from ..world.log import ProcessLog
from ..world.processes import LOAD_SECONDS, START_SECONDS, Processes
from .best_rule import BestRule
from .callbacks import Callback, Callbacks, ReportCallback
from .result import TrainResult

Notice = Callable[[str], None]
Listen = Callable[[Report], bool | None]


def train(
    loaded: LoadedConfig,
    notice: Notice = print,
    world: World | None = None,
    listen: Listen | None = None,
    callbacks: Sequence[ReportCallback | Callback] = (),
) -> TrainResult:
    """Train as the config says and write a Hugging Face checkpoint to `output_dir`, or an adapter to its `adapter`.

    `notice` is called with lines for the user. `world`: the processes of the run; by default those that the launcher of
    the config joins or starts. `listen` is called with every report in the process that writes the outputs; True makes
    the run finish after the step that is running: saved, evaluated, with its outputs. `callbacks`: those of a script,
    whose errors name them (CallbackError). Raises ConfigError for input that cannot be used, before anything is
    written, and RunStopped when the run stops itself, after saving what is complete.
    """
    spin_shortly()  # before the import of torch, below
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # for a lost store torch logs pages before our one message
    config = loaded.config
    launcher = load_registry(files=config.plugins).launcher(config.launcher)
    options = loaded.options["launcher", config.launcher]
    loaded.require_datasets()
    if world is None and launcher.start is not None:
        if listen is not None or callbacks:
            raise ConfigError(
                f"launcher: {config.launcher} trains in other processes, which cannot call a function of this one. "
                "Train without a callback; metrics.jsonl has all reports."
            )
        result: TrainResult = launcher.start(task_of(loaded), notice, options)
        return result
    here = usable_device()
    if world is None:
        place = JoinContext(
            environment=os.environ,
            device_count=here.count,
            on_gpu=here.device.sm is not None,
            wanted=config.gpus,
            ranks_per_device=config.ranks_per_gpu,
            uuids=_uuids(here) if launcher.matches(os.environ) else (),
        )
        assert launcher.join is not None, "a launcher has `start` or `join`"
        world = launcher.join(place, options)
    called = Callbacks(callbacks)
    called.refuse_several(world.processes)
    processes = Processes(world, config.stall_seconds)
    with processes.ending(), OutputCheck() as check:
        if not world.writer:
            processes.log = ProcessLog(Path(config.output_dir), world)
            return _train(loaded, processes, None, here, check, processes.log, None, Callbacks())
        checkpoints = Path(config.resolved_checkpoint_dir)
        folders = {checkpoints: "checkpoint_dir: ", Path(config.output_dir): "output_dir: "}
        for folder, where in folders.items():
            refuse_checkpoint(folder, where)
        with locked(folders, notice):
            if config.resume_with_saved_tokens and config.resume_from_checkpoint is False:
                raise ConfigError(
                    f"{loaded.source}: resume_with_saved_tokens: true, but resume_from_checkpoint: false starts a new "
                    "run. Set resume_from_checkpoint, or remove the key."
                )
            resumed = choose_checkpoint(checkpoints, config.resume_from_checkpoint, loaded.source, notice)
            processes.checkpoint = resumed.directory.name if resumed else ""
            refuse_earlier_work(loaded, resumed)
            mark("earlier runs")
            if config.verify_outputs:
                check.begin()
            return _train(loaded, processes, resumed, here, check, notice, listen, called)


def last_checkpoint(config: TrainConfig) -> str:
    """Return the name of the last complete checkpoint of a run; "" if there is none."""
    complete = list_checkpoints(Path(config.resolved_checkpoint_dir))
    return complete[-1].name if complete else ""


def task_of(loaded: LoadedConfig) -> Task:
    """Return a run as what other processes need to train it."""
    return Task(config=resolved(loaded), source=loaded.source, train=_work, mode=loaded.mode)


def _work(task: Task, world: World, notice: Notice) -> TrainResult:
    """Train a task in one of the processes of `world`."""
    os.environ.update(task.environment)
    registry = load_registry(files=plugin_files(task.config))
    loaded = load_config(task.config, registry=registry, mode=task.mode, source=task.source)
    return train(loaded, notice, world)


def _train(
    loaded: LoadedConfig,
    processes: Processes,
    resumed: Resumed | None,
    here: LocalDevice,
    check: OutputCheck,
    notice: Notice,
    listen: Listen | None,
    callbacks: Callbacks,
) -> TrainResult:
    config, world = loaded.config, processes.world
    registry = load_registry(files=config.plugins)
    if world.writer:
        check_loggers(loaded, registry)
    reads_weights = world.writer and _reads_weights(config, resumed)
    files = [*CONFIG_FILES, *TOKENIZER_FILES, *(WEIGHT_FILES if reads_weights else ())]
    if here.device.sm is not None:
        open_contexts(sorted(set(world.devices)))
    from surogate_core.runtime.device import refuse_unequal

    from ..world.connect import connected
    from .samples import config_prompts
    from .trainer import train_planned

    mark("import torch")
    device = device_of_torch(here)
    refuse_unequal(world.devices if device.sm else ())
    mark("devices")
    processes.at("looking for the model", LOAD_SECONDS)
    opened = open_run(loaded, registry, files)
    processes.at("planning", START_SECONDS)
    refuse_parts_of_one(config, world.size)
    planned = plan_run(opened, device, world.size, host_memory=pinnable_memory_bytes(), nodes=world.nodes)
    refuse_missing_kernels(opened.config, planned.kernels, device, notice)
    if world.writer:
        refuse_to_overwrite(opened)
        if resumed is None:
            check_adapter(opened, notice)
        config_prompts(opened.config)  # a file that is missing is told before data is read
    refuse_unless_it_fits(opened, planned)
    if rule := BestRule.of(opened.config):
        notice(str(rule))
    mark("plan")
    with connected(processes, config.transport, device.sm is not None, notice) as comms:
        return train_planned(opened, planned, resumed, processes, comms, check, notice, listen, callbacks)


def _reads_weights(config: TrainConfig, resumed: Resumed | None) -> bool:
    """Return whether a run reads the model's weights. A checkpoint has them, except an adapter's frozen base."""
    return config.adapter is not None if resumed else not config.from_scratch


def _uuids(here: LocalDevice) -> list[str]:
    from surogate_core.runtime.device import gpu_uuids

    return gpu_uuids(range(here.count)) if here.device.sm else []


def usable_device() -> LocalDevice:
    """Return this machine's device, without importing torch. Raises ConfigError for a GPU that cannot be used."""
    here = this_machine()
    if here.idle:
        raise ConfigError(here.idle)
    return here


def device_of_torch(here: LocalDevice) -> DeviceInfo:
    """Return the device that torch computes on. Raises ConfigError if torch cannot use the GPU of `here`."""
    from surogate_core.runtime.device import training_device

    device = as_measured(training_device())
    if here.device.sm is not None and device.sm is None:
        import torch

        raise ConfigError(
            f"torch {torch.__version__} cannot use {here.device.title}: it is built for CUDA {torch.version.cuda}, for "
            f"which the NVIDIA driver may be too old. Update the driver, install a torch for an older CUDA, or "
            f"{USE_THE_CPU}."
        )
    return device


def refuse_missing_kernels(config: TrainConfig, kernels: KernelTable, device: DeviceInfo, notice: Notice) -> None:
    """Raise ConfigError if a kernel is missing, unless references are allowed; then name them in a notice."""
    if not config.allows_references:
        resolve.refuse_missing_kernels(kernels, device)
    elif idle := resolve.idle_modules(kernels):
        notice(f"kernels: allow_reference: torch references run instead of {', '.join(idle)}, slowly")


def refuse_unless_it_fits(opened: Run, planned: Plan) -> None:
    """Raise ConfigError with suggestions if the plan needs more memory than the device or the host has."""
    if planned.report.fits:
        return
    on_device = planned.report.missing_bytes > 0
    why, last = _device_refusal(opened, planned) if on_device else _host_refusal(opened, planned)
    suggestions = "; or ".join(one_line(proposal, planned) for proposal in suggest(opened, planned))
    remedies = [f"change {suggestions}"] if suggestions else []
    if opened.config.sample_prompts:
        moves = on_device and planned.report.device.sm is not None and opened.config.sample_on == "device"
        lower = "lower sample_batch_size, " if opened.config.sample_batch_size > 1 else ""
        remedies.append(f"{lower}{'set sample_on: host, ' * moves}or remove sample_prompts".removeprefix("or "))
    if not suggestions or not on_device:
        remedies.append(last)
    remedy = "; or ".join(remedies)
    raise ConfigError(f"{opened.loaded.source}: {why}. {remedy[0].upper()}{remedy[1:]}.")


def _device_refusal(opened: Run, planned: Plan) -> tuple[str, str]:
    """Return why the run does not fit the device, and what to do if nothing can be suggested."""
    report = planned.report
    recomputed = " with everything recomputed" if planned.chosen else ""
    limit = " (device_memory_limit)" if opened.config.device_memory_limit else ""
    return (
        f"the run needs {report.device_bytes['total'] / GIB:.1f} GiB{recomputed}, more than "
        f"the {report.device.memory_bytes / GIB:.1f} of {report.device.title}{limit}",
        "use a smaller model or a shorter sequence_len",
    )


def _host_refusal(opened: Run, planned: Plan) -> tuple[str, str]:
    """Return why the run does not fit the host, and what to do if the machine has the memory."""
    report, allowed = planned.report, (planned.report.host_memory or 0) / GIB
    strategies = ", ".join(strategy.name for strategy, _ in planned.inputs.offload)
    if opened.config.host_memory_limit:
        has, remedy = f"{allowed:.1f} of host_memory_limit", "raise host_memory_limit"
    else:
        has = f"{allowed:.1f} that this machine has available, less {PINNED_RESERVE_BYTES / GIB:.0f} for its processes"
        remedy = "set host_memory_limit if the machine has more than it shows"
    kinds = {f"offloading ({strategies}) pins": report.pinned_bytes, "samples take": sum(report.beside.values())}
    parts = [f"{kind} {nbytes / GIB:.1f} GiB" for kind, nbytes in kinds.items() if nbytes]
    return f"{' and '.join(parts)} of host memory, more than the {has}", remedy
