"""The Python API. The command line is built on it.

from surogate_core import run

loaded = run.load("run.yaml", ["max_steps=100"])
print(run.plan(loaded, device="h200").report.device_bytes["total"])
result = run.train(loaded)
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .api import DeviceInfo, LauncherDef, Topology
from .assembly.missing_kernels import idle_kernels, idle_modules, unserved_ops
from .assembly.resolve import KernelTable
from .checkpoint.adapter import kind_of_adapter, open_merge
from .checkpoint.folder_lock import locked
from .checkpoint.resume import Resumed, choose_checkpoint
from .config.adapter import Mode
from .config.load import LoadedConfig, load_config
from .config.schema import TrainConfig
from .config.values import parse_bytes
from .config.yaml import apply_overrides, read_yaml
from .errors import ConfigError
from .fitting.changes import Changes, changed
from .fitting.proposals import Proposal, one_line, propose, suggest
from .hub.config_json import read_config
from .hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir
from .machine.devices import GIB
from .machine.devices import device as known_device
from .machine.local_device import USE_THE_CPU, LocalDevice, local_device, open_contexts
from .machine.system import PINNED_RESERVE_BYTES, pinnable_memory_bytes
from .machine.timing import mark
from .outputs.check import OutputCheck
from .outputs.earlier_work import refuse_inputs, set_aside_outputs, writable
from .outputs.folder import refuse_earlier_work, refuse_to_overwrite
from .planning.plan import Plan, plan_run
from .planning.run import Run
from .planning.run import open_run as find_run
from .plugins.discovery import load_registry
from .train.result import TrainResult
from .train.worker_setup import fill_weights, make_worker

if TYPE_CHECKING:
    from .data.corpora import Corpora

__all__ = [
    "Fit",
    "LoadedConfig",
    "Plan",
    "Run",
    "TrainResult",
    "fill_weights",
    "fit",
    "load",
    "make_worker",
    "merge",
    "open_run",
    "plan",
    "quantize",
    "tokenize",
    "train",
]

Notice = Callable[[str], None]

LIMIT = "device_memory_limit"
"""The key that `fit` sets for a size."""

OPENMP_SPINS = "1000"
"""Spins of a CPU thread of torch at a barrier before it sleeps. By default it spins without end, which makes a
step 10 to 70 times slower as soon as another process computes on the same cores (dev/LOG.md)."""


def load(path: str | Path, overrides: Sequence[str] = (), mode: Mode = "train") -> LoadedConfig:
    """Read and validate a YAML file. `overrides` are "key=value". Raises ConfigError naming file and key."""
    raw = apply_overrides(read_yaml(Path(path)), list(overrides))
    return load_config(raw, registry=load_registry(), mode=mode, source=str(path))


def open_run(loaded: LoadedConfig, patterns: Sequence[str] = CONFIG_FILES) -> Run:
    """Find the model of a config and the installed plugins that serve it; see `planning.run.open_run`."""
    return find_run(loaded, load_registry(), patterns)


def plan(given: LoadedConfig | Run, device: str | DeviceInfo | LocalDevice | None = None) -> Plan:
    """Plan a run from the model's config.json alone.

    `device` is a device or its name in the device table. None: the device of this machine that a run would train on, or
    all its visible GPUs with `gpus: 0`.
    """
    opened = given if isinstance(given, Run) else open_run(given)
    target = local_device() if device is None else device
    if isinstance(target, LocalDevice):
        count = opened.config.gpus or target.count
        host_memory = pinnable_memory_bytes()
        return plan_run(opened, target.device, count if target.device.sm else None, host_memory=host_memory)
    return plan_run(opened, known_device(target) if isinstance(target, str) else target)


@dataclass(frozen=True)
class Fit:
    """Settings of a run for a device. before: the plan without changes."""

    before: Plan
    proposals: Sequence[Proposal]


def fit(loaded: LoadedConfig, target: str, device: str | LocalDevice | None = None) -> Fit:
    """Return settings with which a run fits `target`, the fastest first; an optimizer step keeps its rows and tokens.

    `target`: a device of the device table; a size such as "24GiB", to which `device` is limited, and which the
    proposals set as `device_memory_limit`; or "auto" for `device` as it is. `device`: as for `plan`. Raises ConfigError
    for a target that is neither.
    """
    limit = _limit(target)
    if limit is None and target.strip().lower() != "auto":
        try:
            named = known_device(target).name
        except ConfigError as error:
            raise ConfigError(f"--fit {target}: is neither a size such as 24GiB nor auto; {error}") from None
        if device is not None and not (isinstance(device, str) and known_device(device).name == named):
            other = device if isinstance(device, str) else device.device.name
            raise ConfigError(
                f"--fit {target} and --device {other}: each names another device. Give one, or a size to --fit."
            )
        device = named
    opened = open_run(loaded)
    if limit is not None:
        opened = changed(opened, limit)
    before = plan(opened, device)
    new = opened.config.device_memory_limit != loaded.config.device_memory_limit
    found = [replace(p, changes={**(limit if limit and new else {}), **p.changes}) for p in propose(opened, before)]
    return Fit(before, found)


def _limit(target: str) -> Changes | None:
    """Return the key that limits devices to the size `target`; None if it is a word. Raises ConfigError otherwise."""
    if re.fullmatch(r"\d{4}( ?ti)?( ?super)?", target.strip().lower()):
        return None  # a card such as 4090
    try:
        parse_bytes(target)
    except ValueError as error:
        if target[:1].isalpha():
            return None
        raise ConfigError(f"--fit {target!r}: {error}; or name a device, such as h200, or auto.") from None
    return {LIMIT: target}


def tokenize(loaded: LoadedConfig, notice: Notice = print) -> Corpora:
    """Tokenise the data of a run into the cache, pack and check it, as `train` does first. Needs no torch or device.

    Notices on other settings are not given, because some depend on the verb that will train. Raises ConfigError naming
    key, file and line for data that cannot be trained on.
    """
    from .data.corpora import load_corpora

    loaded.require_datasets()
    model_dir = resolve_model_dir(loaded.config.model, TOKENIZER_FILES)
    vocab_size = read_config(model_dir).get("vocab_size")
    if not isinstance(vocab_size, int):
        raise ConfigError(
            f"model: {model_dir / 'config.json'}: vocab_size is {vocab_size!r}, not a number. Replace it."
        )
    return load_corpora(loaded.config, load_registry().dataset_formats(), model_dir, vocab_size, notice)


def train(loaded: LoadedConfig, notice: Notice = print) -> TrainResult:
    """Train as the config says and write a Hugging Face checkpoint to `output_dir`, or an adapter to its `adapter`.

    `notice` is called with lines for the user. Raises ConfigError for input that cannot be used, before anything is
    written, and RunStopped when the run stops itself, after saving what is complete.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read at the import of torch, below
    here = usable_device()
    config = loaded.config
    launcher = load_registry().get("launcher", config.launcher)
    loaded.require_datasets()
    checkpoints = Path(config.resolved_checkpoint_dir)
    folders = {checkpoints: "checkpoint_dir: ", Path(config.output_dir): "output_dir: "}
    with locked(folders, notice), OutputCheck() as check:
        resumed = choose_checkpoint(checkpoints, config.resume_from_checkpoint, loaded.source, notice)
        refuse_earlier_work(loaded, resumed)
        mark("earlier runs")
        if config.verify_outputs:
            check.begin()
        return _train(loaded, launcher, resumed, here, check, notice)


def _train(
    loaded: LoadedConfig,
    launcher: LauncherDef,
    resumed: Resumed | None,
    here: LocalDevice,
    check: OutputCheck,
    notice: Notice,
) -> TrainResult:
    config = loaded.config
    files = [*CONFIG_FILES, *TOKENIZER_FILES, *(WEIGHT_FILES if _reads_weights(config, resumed) else ())]
    if here.device.sm is not None:
        open_contexts(min(config.gpus or here.count, here.count))
    from .runtime.device import devices_to_use
    from .train.trainer import train_planned

    mark("import torch")
    device, devices = device_of_torch(here), devices_to_use(config.gpus)
    mark("devices")
    opened = open_run(loaded, files)
    planned = plan_run(opened, device, devices, host_memory=pinnable_memory_bytes())
    refuse_missing_kernels(opened.config, planned.kernels, device, notice)
    refuse_to_overwrite(opened)
    refuse_unless_it_fits(opened, planned)
    mark("plan")
    result: TrainResult = launcher.run(
        lambda comms: train_planned(opened, planned, resumed, comms, check, notice),
        Topology(devices=devices),
        loaded.options["launcher", config.launcher],
    )
    return result


def merge(
    folder: str | Path,
    output: str | Path,
    base: str | None = None,
    overwrite: bool = False,
    adapter: str | None = None,
    notice: Notice = print,
) -> Path:
    """Merge the adapter in `folder` into its base, write the model to `output` and return the folder of the base.

    `base`: directory or hub id, if not the one that the adapter's files name. `output` must be empty unless `overwrite`
    is set, which moves a model in it to `outputs.set_aside`. `adapter`: the kind of adapter, if several installed
    plugins can read the folder. `notice` gets how far the model is from the base that the adapter was trained on, if
    that was stored in a weight format, or why that is unknown. Raises ConfigError for files that cannot be used.
    """
    from .checkpoint.stored_base import stored_base

    with writable(Path(output), overwrite, notice):
        registry = load_registry()
        kind = adapter or kind_of_adapter(registry, Path(folder))
        merging = open_merge(registry.get("adapter", kind), Path(folder), base)
        refuse_inputs(Path(output), read=(merging.base_dir, Path(folder)))
        base_in_format = stored_base(Path(folder), merging.base_dir, registry, notice)
        if base_in_format is not None:
            merging = replace(merging, merge=base_in_format.watched(merging.merge))
        merging.write(Path(output), make_room=partial(set_aside_outputs, Path(output)))
    if base_in_format is not None and base_in_format.distances:
        notice(str(base_in_format))
    return merging.base_dir


def quantize(
    model: str, output: str | Path, overrides: Sequence[str] = (), overwrite: bool = False, notice: Notice = print
) -> Path:
    """Write a model with its blocks' matrices in a weight format to `output`, and return the folder of the model.

    `model`: directory or hub id. `overrides`: "key=value" of the format, such as "qlora_bnb=true". `output` must be
    empty unless `overwrite` is set, which moves a model in it to `outputs.set_aside`. `notice` gets what config and
    format have to tell. Raises ConfigError for a model, a key or a format that cannot be used.
    """
    from .checkpoint.quantize import config_of, quantize_checkpoint

    with writable(Path(output), overwrite, notice):
        loaded = config_of(model, overrides, load_registry())
        for line in loaded.notices:
            notice(line)
        opened = open_run(loaded, [*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES])
        refuse_inputs(Path(output), read=(opened.model_dir,))
        make_room = partial(set_aside_outputs, Path(output))
        quantize_checkpoint(opened, plan(opened, "cpu"), Path(output), notice, make_room)
    return opened.model_dir


def _reads_weights(config: TrainConfig, resumed: Resumed | None) -> bool:
    """Return whether a run reads the model's weights. A checkpoint has them, except an adapter's frozen base."""
    return config.adapter is not None if resumed else not config.from_scratch


def usable_device() -> LocalDevice:
    """Return this machine's device, without importing torch. Raises ConfigError for a GPU that cannot be used."""
    here = local_device()
    if here.idle:
        raise ConfigError(here.idle)
    return here


def device_of_torch(here: LocalDevice) -> DeviceInfo:
    """Return the device that torch computes on. Raises ConfigError if torch cannot use the GPU of `here`."""
    from .runtime.device import training_device

    device = training_device()
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
    idle = idle_modules(kernels)
    if config.allows_references:
        if idle:
            notice(f"kernels: allow_reference: torch references run instead of {', '.join(idle)}, slowly")
        return
    if idle:
        raise ConfigError(idle_kernels(device, idle))
    if missing := unserved_ops(kernels):
        raise ConfigError(missing)


def refuse_unless_it_fits(opened: Run, planned: Plan) -> None:
    """Raise ConfigError with suggestions if the plan needs more memory than the device or the host has."""
    if planned.report.fits:
        return
    on_device = planned.report.missing_bytes > 0
    why, last = _device_refusal(opened, planned) if on_device else _host_refusal(opened, planned)
    suggestions = "; or ".join(one_line(proposal, planned) for proposal in suggest(opened, planned))
    remedies = [f"change {suggestions}"] if suggestions else []
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
    return (
        f"offloading ({strategies}) pins {report.pinned_bytes / GIB:.1f} GiB of host memory, more than the {has}",
        remedy,
    )
