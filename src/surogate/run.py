"""The commands as functions of a loaded config. The command line and `surogate` in Python are built on them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api import DeviceInfo
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import device as known_device
from surogate_core.machine.local_device import LocalDevice
from surogate_core.planning.plan import Plan
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import Registry

from .checkpoints.adapter import kind_of_adapter, open_merge
from .config.adapter import Mode
from .config.load import LoadedConfig, load_config
from .config.plugin_files import plugin_files, read_run
from .config.values import parse_bytes
from .config.yaml import apply_overrides
from .fitting.changes import Changes, Proposal, changed
from .fitting.longest import Longest, short_row
from .fitting.longest import longest as longest_rows
from .fitting.proposals import propose
from .hub.config_json import read_config, text_part
from .hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir
from .machine.rates_file import this_machine
from .machine.system import pinnable_memory_bytes
from .outputs.earlier_work import refuse_inputs, set_aside_model, writable
from .runs.chosen_format import chosen_format
from .runs.plan import plan_run
from .runs.ranks import count_ranks
from .runs.run import Run, asked_by, named_model
from .runs.run import open_run as find_run
from .training.result import TrainResult
from .training.start import train
from .training.worker_setup import fill_weights, make_worker

if TYPE_CHECKING:
    from .checkpoints.adapter import Merging
    from .checkpoints.stored_base import StoredBase
    from .data.corpora import Corpora, TokenizedRow

__all__ = [
    "Fit",
    "LoadedConfig",
    "LongestRows",
    "Plan",
    "Run",
    "TrainResult",
    "export",
    "fill_weights",
    "fit",
    "known_device",
    "load",
    "longest",
    "make_worker",
    "merge",
    "open_run",
    "plan",
    "quantize",
    "tokenize",
    "tokenize_row",
    "train",
]

Notice = Callable[[str], None]

LIMIT = "device_memory_limit"
"""The key that `fit` sets for a size."""


def load(config: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), mode: Mode = "train") -> LoadedConfig:
    """Read and validate a YAML file, or a mapping of its keys. `overrides` are "key=value". Raises ConfigError naming
    file and key."""
    raw = apply_overrides(config, overrides) if isinstance(config, Mapping) else read_run(Path(config), overrides)
    source = "config" if isinstance(config, Mapping) else str(config)
    return load_config(raw, registry=load_registry(files=plugin_files(raw)), mode=mode, source=source)


def open_run(loaded: LoadedConfig, patterns: Sequence[str] = CONFIG_FILES) -> Run:
    """Find the model of a config and the installed plugins that serve it; see `planning.run.open_run`."""
    return find_run(loaded, load_registry(files=loaded.config.plugins), patterns)


def plan(
    given: LoadedConfig | Run,
    device: str | DeviceInfo | LocalDevice | None = None,
    gpus: int | None = None,
    nodes: int = 1,
) -> Plan:
    """Plan a run from the model's config.json alone.

    `device` is a device or its name in the device table. None: the device of this machine that a run would train on.
    `gpus` are those of all `nodes` machines; None: on each machine as many as the key `gpus` asks for. Raises
    ConfigError for GPUs that cannot be spread evenly.
    """
    opened = given if isinstance(given, Run) else open_run(given)
    target = this_machine() if device is None else known_device(device) if isinstance(device, str) else device
    if isinstance(target, LocalDevice):
        ranks = count_ranks(opened.config, target.device, gpus, nodes, target.count)
        return plan_run(opened, target.device, ranks, host_memory=pinnable_memory_bytes(), nodes=nodes)
    return plan_run(opened, target, count_ranks(opened.config, target, gpus, nodes), nodes=nodes)


def unknown_turn_ends(opened: Run) -> str | None:
    """Return a line if the model does not stop at the token that ends the turns of the run's chats; None if it does.

    `tokenize` looks at the data, this at the chat template alone. None as well if no dataset is known to be rendered by
    it, or if the tokenizer's files are not there.
    """
    formats, folder = opened.registry.dataset_formats(), opened.model_dir
    rendered = [e for e in opened.config.datasets if e.type in formats and e.options.get("use_chat_template", True)]
    keys = {key for entry in rendered for key in formats[entry.type].options.model_fields}
    if "chat_template_kwargs" not in keys or not (folder / TOKENIZER_FILES[0]).is_file():
        return None
    from .data.chat.row_tokenizer import RowTokenizer
    from .data.turn_ends import template_ends, unknown_ends

    try:
        tokenizer = RowTokenizer(folder)
        return unknown_ends(template_ends(tokenizer), tokenizer, folder)
    except ConfigError:  # a run refuses these files; a plan needs none of them
        return None


@dataclass(frozen=True)
class Fit:
    """Settings of a run for a device. before: the plan without changes."""

    before: Plan
    proposals: Sequence[Proposal]


def fit(
    loaded: LoadedConfig,
    target: str,
    device: str | LocalDevice | None = None,
    gpus: int | None = None,
    nodes: int = 1,
) -> Fit:
    """Return settings with which a run fits `target`, the fastest first; an optimizer step keeps its rows and tokens.

    `target`: a device of the device table; a size such as "24GiB", to which `device` is limited, and which the
    proposals set as `device_memory_limit`; or "auto" for `device` as it is. `device`, `gpus` and `nodes` are
    those of `plan`. Raises ConfigError for a target that is neither.
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
    before = plan(opened, device, gpus, nodes)
    new = opened.config.device_memory_limit != loaded.config.device_memory_limit
    found = [replace(p, changes={**(limit if limit and new else {}), **p.changes}) for p in propose(opened, before)]
    return Fit(before, found)


@dataclass(frozen=True)
class LongestRows:
    """The longest rows of a run on the device of `plan`, which is the run with one short row a step."""

    opened: Run
    plan: Plan
    rows: list[Longest]


def longest(
    loaded: LoadedConfig, device: str | LocalDevice | None = None, gpus: int | None = None, nodes: int = 1
) -> LongestRows:
    """Return the longest row that fits, for each way to train: an adapter on a base in the model's dtype and in formats
    of fewer bits, and all weights. Takes under a minute.

    `device`, `gpus` and `nodes` are those of `plan`. The file's `sequence_len` and micro-batch do not matter.
    """
    opened = open_run(loaded)
    before = plan(changed(opened, short_row(opened)), device, gpus, nodes)
    return LongestRows(opened, before, [*longest_rows(opened, before)])


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
    registry = load_registry(files=loaded.config.plugins)
    asked, vocab_size = asked_by(loaded, registry), _vocab_size(model_dir, registry)
    return load_corpora(loaded.config, registry.dataset_formats(), model_dir, vocab_size, notice, asked=asked)


def _vocab_size(model_dir: Path, registry: Registry) -> int:
    """Return the vocabulary of a model, which need not be one that a plugin builds. Raises ConfigError if it has none.

    An outer class may leave the size out of its config.json.
    """
    config = read_config(model_dir)
    given = text_part(config)
    size = named_model(config, registry)[1].vocab_size if given is not config else given.get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"model: {model_dir / 'config.json'}: vocab_size is {size!r}, not a number. Replace it.")
    return size


def tokenize_row(loaded: LoadedConfig, place: str) -> TokenizedRow:
    """Tokenise one row of the data as `tokenize` does. `place`: as messages name it, such as rows.jsonl:7."""
    from .data.corpora import tokenize_row

    loaded.require_datasets()
    model_dir = resolve_model_dir(loaded.config.model, TOKENIZER_FILES)
    formats = load_registry(files=loaded.config.plugins).dataset_formats()
    return tokenize_row(loaded.config, formats, model_dir, place)


def merge(
    folder: str | Path,
    output: str | Path,
    base: str | None = None,
    overwrite: bool = False,
    adapter: str | None = None,
    notice: Notice = print,
    config: str | Path | None = None,
) -> Path:
    """Merge the adapter in `folder` into its base, write the model to `output` and return the folder of the base.

    `base`: directory or hub id, if not the one that the adapter's files name. `output` must be empty unless `overwrite`
    is set, which moves a model in it to `outputs.set_aside`. `adapter`: the kind of adapter, if several installed
    plugins can read the folder. `notice` gets how far the model is from the base that the adapter was trained on, if
    that was stored in a weight format, or why that is unknown. `config`: the YAML file of the run that wrote the
    adapter. Its `plugins` are loaded; those of a run.yaml that is only found beside the adapter are not. Raises
    ConfigError for files that cannot be used, PluginError for plugins that do not load.
    """
    with writable(Path(output), overwrite, notice):
        merging, base_in_format = _opened_merge(Path(folder), base, adapter, notice, config)
        refuse_inputs(Path(output), read=(merging.base_dir, Path(folder)))
        merging.write(Path(output), make_room=partial(set_aside_model, Path(output)))
    _tell_distances(base_in_format, notice)
    return merging.base_dir


def _opened_merge(
    folder: Path, base: str | None, adapter: str | None, notice: Notice, config: str | Path | None
) -> tuple[Merging, StoredBase | None]:
    """Open the adapter in a folder and its base, as `merge` does, with what it will find out of the two."""
    from .checkpoints.found_run import FoundRun, found_run
    from .checkpoints.stored_base import stored_base

    trained = found_run(folder) if config is None else FoundRun(Path(config), named=True)
    registry = _registry_of(config)
    with trained.explaining() if trained else nullcontext():
        kind = adapter or kind_of_adapter(registry, folder)
        definition = registry.adapter(kind)
    merging = open_merge(definition, folder, base, registry, notice)
    base_in_format = stored_base(trained, merging.base_dir, registry, notice)
    if base_in_format is not None:
        merging = replace(merging, merge=base_in_format.watched(merging.merge))
    return merging, base_in_format


def _registry_of(config: str | Path | None) -> Registry:
    return load_registry(files=plugin_files(read_run(Path(config), ())) if config is not None else ())


def _tell_distances(found: StoredBase | None, notice: Notice) -> None:
    if found is not None and found.distances:
        notice(str(found))


def export(
    checkpoint: str | Path,
    output: str | Path,
    overwrite: bool = False,
    notice: Notice = print,
    *,
    format: str = "hf",
    base: str | None = None,
    adapter: str | None = None,
    config: str | Path | None = None,
) -> Path:
    """Write a finished model to `output` as programs load it, and return the folder that it was found in.

    `checkpoint`: one of any number of ranks, the output of a run, a model or its name on the hub, or an adapter, which
    is merged on the way. `format`: the name of an installed export format, and after a colon one of its types;
    "hf" is what `transformers` loads. `base`, `adapter` and `notice` are those of `merge`, for an adapter. `config`:
    the YAML file of the run, whose `plugins` are loaded: those of a model whose stacks of experts several processes
    wrote, and of an adapter.
    `output` must be empty unless `overwrite` is set, which moves a model in it to `outputs.set_aside`. Raises
    ConfigError for a folder of nothing, a model that is damaged or quantized, or one that the format cannot hold, and
    PluginError for a format that is not installed.
    """
    from .checkpoints.export import Export
    from .checkpoints.export_source import find_source, moved_in_ranges, open_merged, open_model
    from .checkpoints.model_ranges import export_model, open_checkpoint

    output, registry = Path(output), _registry_of(config)
    chosen = chosen_format(registry, format)
    with writable(output, overwrite, notice):
        found = find_source(str(checkpoint), registry)
        for option, value in (("--base", base), ("--adapter", adapter)):
            if value is not None and not found.adapter:
                raise ConfigError(f"{option} {value}: {found.folder} holds a model, not an adapter. Leave it out.")
        refuse_inputs(output, read=(found.folder,))
        make_room = partial(set_aside_model, output)
        if chosen.format.of_adapters and not found.adapter:
            raise ConfigError(
                f"--format {chosen}: {found.folder} holds a model, and the format is for adapters. Name one."
            )
        if found.checkpoint and not found.adapter and chosen.format.name == "hf":
            export_model(found.folder, output, make_room, moved_in_ranges(found.folder, registry))
            return found.folder
        if found.checkpoint:
            open_checkpoint(found.folder)
        distances, alone = None, None
        if found.adapter:
            merging, distances = _opened_merge(found.folder, base, adapter, notice, config)
            refuse_inputs(output, read=(merging.base_dir,))
            source = open_merged(merging)
            if chosen.format.of_adapters:
                source, alone, distances = replace(source, merging=None), found.folder, None
        else:
            source = open_model(found.folder, registry)
        if chosen.format.by_matrix:
            source = source.by_matrix(registry)
        Export(
            named=Path(checkpoint), source=source, chosen=chosen, registry=registry, notice=notice, adapter=alone
        ).write(output, make_room)
    _tell_distances(distances, notice)
    return found.folder


def quantize(
    model: str, output: str | Path, overrides: Sequence[str] = (), overwrite: bool = False, notice: Notice = print
) -> Path:
    """Write a model with its blocks' matrices in a weight format to `output`, and return the folder of the model.

    `model`: directory or hub id. `overrides`: "key=value" of the format, such as "qlora_bnb=true". `output` must be
    empty unless `overwrite` is set, which moves a model in it to `outputs.set_aside`. `notice` gets what config and
    format have to tell. Raises ConfigError for a model, a key or a format that cannot be used.
    """
    from .checkpoints.quantize import config_of, quantize_checkpoint

    with writable(Path(output), overwrite, notice):
        files = plugin_files(apply_overrides({}, overrides))
        loaded = config_of(model, overrides, load_registry(files=files))
        for line in loaded.notices:
            notice(line)
        opened = open_run(loaded, [*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES])
        refuse_inputs(Path(output), read=(opened.model_dir,))
        make_room = partial(set_aside_model, Path(output))
        quantize_checkpoint(opened, plan(opened, "cpu"), Path(output), notice, make_room)
    return opened.model_dir
