"""From a user's YAML mapping to a validated configuration.

Keys come from three places: core's own (`schema.py`), the options of installed plugins, mounted flat, and the
table of keys that are known but not served (`keys.py`). Everything that is wrong is reported at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import BaseModel

from ..api import NoOptions
from ..errors import ConfigError, PluginError
from .errors import Problem, fold, keys_of, nearest, problems_error, shown, shown_key, unknown_key, validate
from .foreign import ELSEWHERE, HINTS
from .keys import (
    ADAPTER_PACKAGE,
    ALIASES,
    DATASET_KEYS,
    DEAD,
    IGNORED,
    LIMITS,
    NOT_YET,
    NOT_YET_NAMES,
    PACKAGES,
    SECTIONS,
)
from .schema import DatasetEntry, TrainConfig
from .yaml import apply_overrides, dump_yaml, read_yaml

if TYPE_CHECKING:
    from ..api import DatasetFormatDef

__all__ = [
    "DatasetEntry",
    "LoadedConfig",
    "Mode",
    "Registry",
    "TrainConfig",
    "apply_overrides",
    "dump_yaml",
    "load_config",
    "read_yaml",
    "resolved",
]

Mode = Literal["train", "pt", "sft"]
"""train: pre-training (`pt`) unless the config says otherwise."""

_SELECTED = ("recipe", "optimizer", "launcher")
"""Kinds of plugins that a key of the same name selects, and whose options are mounted for the run."""

_OPTIONAL = ("adapter", "offload")
"""The same for kinds that a run can do without: `none`, the default, selects nothing."""

ADAPTER = "lora"
"""`lora: true` means `adapter: lora`: the only adapter that core knows by name."""

_MAX_DEPTH = 32
_VARIABLE = re.compile(r"\$(?:(\$)|\{([^{}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


class Registry(Protocol):
    """What the configuration asks of the installed plugins. Kinds: recipe, optimizer, logger, format, ..."""

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        """(kind, name) -> model of its options."""
        ...

    def dataset_formats(self) -> Mapping[str, DatasetFormatDef]: ...

    def names(self, kind: str) -> Sequence[str]:
        """Names of the usable things of a kind."""
        ...

    def failed(self, kind: str, name: str, function: str, cause: BaseException) -> PluginError | None:
        """`cause` as an error that names the plugin whose code raised it; None where that is core."""
        ...

    def missing(self, kind: str, name: str) -> PluginError:
        """The error to raise for a name that no working plugin provides."""
        ...


@dataclass(frozen=True)
class LoadedConfig:
    """A validated run. Two are equal when they describe the same run, wherever they were read from.

    options: (kind, name) -> the options of what is selected: recipe, optimizer, loggers ... notices: lines to show
    the user once. source: where the config was read, for later errors about it.
    """

    config: TrainConfig
    options: Mapping[tuple[str, str], BaseModel]
    mode: Mode
    notices: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default="config", compare=False)

    @property
    def recipe_options(self) -> BaseModel:
        return self.options["recipe", self.config.recipe]

    @property
    def optimizer_options(self) -> BaseModel:
        return self.options["optimizer", self.config.optimizer]

    @property
    def adapters(self) -> dict[str, BaseModel]:
        """Names of the adapters that are trained -> their options."""
        return {name: options for (kind, name), options in self.options.items() if kind == "adapter"}

    def require_datasets(self) -> tuple[DatasetEntry, ...]:
        """What to train on. Raises ConfigError when there is nothing: planning needs no data, training does."""
        if not self.config.datasets:
            raise ConfigError(
                f"{self.source}: datasets: is required to train; give a list of entries, "
                "each with a path (a file, a folder or a dataset of the Hugging Face hub)"
            )
        return self.config.datasets


def load_config(raw: Mapping[str, Any], *, registry: Registry, mode: Mode = "train", source: str) -> LoadedConfig:
    """Validate a user's mapping. `source` names it in errors ("run.yaml").

    Raises ConfigError with one line for each thing that is wrong; PluginError when the only cause is a plugin that is
    missing, broken or in conflict.
    """
    loading = _Loading(registry)
    core, plugin = loading.sort(raw)
    loading.alias(core, mode)
    for key in ("datasets", "validation_datasets"):
        if key in core:
            core[key] = loading.datasets(key, core[key])
    if not core.get("validation_datasets"):
        core.pop("validation_datasets", None)
    for kind in _SELECTED:
        loading.select(core, kind)
    for kind in _OPTIONAL:
        loading.select_optional(core, kind)
    loading.loggers(core)
    config, problems = validate(TrainConfig, core)
    loading.problems += [problem for problem in problems if problem.key not in loading.failed]
    if config is not None:
        config = loading.settle(config)
    options = loading.options(core, plugin, config.adapter if config is not None else None)
    if config is None or loading.problems:
        raise problems_error(source, loading.problems)
    return LoadedConfig(config, options, mode, tuple(loading.notices), source)


def resolved(loaded: LoadedConfig) -> dict[str, Any]:
    """Every key with its value, ready for JSON and YAML (`dump_yaml`). Loading it again gives an equal config."""
    values = loaded.config.model_dump(mode="json")
    for key in ("datasets", "validation_datasets"):
        entries: Iterable[DatasetEntry] | None = getattr(loaded.config, key)
        if entries is not None:
            values[key] = [entry.model_dump(mode="json", exclude_none=True) | entry.options for entry in entries]
    for options in loaded.options.values():
        values |= options.model_dump(mode="json", by_alias=True)
    escaped: dict[str, Any] = _map_text(values, lambda text: text.replace("$", "$$"))
    return escaped


class _Loading:
    """One call of `load_config`: what was found wrong so far, and what the user should be told."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.problems: list[Problem] = []
        self.failed: set[str] = set()  # keys of core whose problem is already told
        self.notices: list[str] = []
        self.given: set[Any] = set()
        self.adapter_as_written: Any = None
        self.models = registry.options_models()
        self.owners: dict[str, list[tuple[str, str]]] = {}
        for owner, model in self.models.items():
            for key in keys_of(model):
                self.owners.setdefault(key, []).append(owner)

    def wrong(self, key: str, text: str) -> None:
        self.problems.append(Problem(key, text))
        self.failed.add(key)

    # ---------------------------------------------------------------------------------------------------------- keys

    def sort(self, raw: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(core's keys, plugins' keys) with variables expanded and nulls dropped; the other keys are dealt with."""
        self.given = {key for key, value in raw.items() if value is not None}
        core: dict[str, Any] = {}
        plugin: dict[str, Any] = {}
        for written, value in raw.items():
            key = ALIASES.get(written, written) if isinstance(written, str) else written
            if written == "recompute" and value in ("none", "None"):  # the original's word for false
                value = False
            if key != written and raw.get(key) not in (None, value):
                self.wrong(key, f"is given twice, as {written} too; keep one")
            elif key in self.owners or key in TrainConfig.model_fields:
                if value is not None:
                    (plugin if key in self.owners else core)[key] = self.expanded(key, value)
            else:
                self.unserved(key, value)
        return core, plugin

    def unserved(self, key: Any, value: Any) -> None:
        """A key that nothing in this installation reads."""
        if key in NOT_YET:
            self.not_yet(key, value)
        elif key in SECTIONS:
            self.section(key, value)
        elif key in DEAD:
            self.dead(key, value)
        elif key in IGNORED:
            if value is not None:
                self.notices.append(f"{key}: ignored, nothing reads this key; {IGNORED[key]}")
        elif key in PACKAGES:
            self.wrong(key, f"no installed plugin has this key; pip install {PACKAGES[key]}")
        else:
            self.problems.append(self.unknown(key))

    def unknown(self, key: Any) -> Problem:
        """A key that nobody knows: the key that another trainer's name means, a hint, or the nearest one."""
        name = fold(key) if isinstance(key, str) else ""
        if name in HINTS:
            return Problem(shown_key(key), f"unknown key; {HINTS[name]}")
        legal = {*TrainConfig.model_fields, *self.owners, *NOT_YET, *SECTIONS, *DEAD, *PACKAGES, *ALIASES}
        return unknown_key(key, legal, meant=ELSEWHERE.get(name))

    def dead(self, key: str, value: Any) -> None:
        entry = DEAD[key]
        if not entry.accepts(value):
            accepted = f" (accepted: {', '.join(map(shown, entry.accepted))})" if entry.accepted else ""
            self.wrong(key, f"nothing reads this key (got {shown(value)}); {entry.instead}{accepted}")

    def not_yet(self, key: str, value: Any) -> None:
        entry = NOT_YET[key]
        if not entry.accepts(value, self.given):
            self.wrong(
                key,
                f"not yet: {entry.feature} is not built (got {shown(value)}); {entry.instead} "
                f"(accepted: {shown(entry.default)})",
            )

    def section(self, name: str, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Mapping):
            self.wrong(name, f"must be a section of keys (got {shown(value)})")
            return
        legal = [key.partition(".")[2] for key in NOT_YET if key.startswith(f"{name}.")]
        for key, inner in value.items():
            if key in legal:
                self.not_yet(f"{name}.{key}", inner)
            else:
                self.problems.append(unknown_key(key, legal, within=f"{name}."))

    def expanded(self, key: str, value: Any) -> Any:
        """`value` with `$NAME` and `${NAME}` replaced from the environment, `$$` by `$`."""

        def substitute(match: re.Match[str]) -> str:
            dollar, braced, plain = match.groups()
            if dollar:
                return "$"
            name = braced if plain is None else plain
            if not name.isidentifier() or not name.isascii():
                self.wrong(key, f"{shown(match[0])} names no environment variable; write $$ for a dollar sign")
            elif name not in os.environ:
                self.wrong(key, f"the environment variable {shown_key(name)} is not set; set it, or write $$ for a $")
            else:
                return os.environ[name]
            return match[0]

        return _map_text(value, lambda text: _VARIABLE.sub(substitute, text))

    # --------------------------------------------------------------------------------------------------------- names

    def name(self, kind: str, key: str, value: str) -> str | None:
        """The registered spelling of a name, or None and a problem."""
        names = {fold(name): name for name in self.registry.names(kind)}
        found = names.get(fold(value))
        if found is not None:
            return found
        instead = NOT_YET_NAMES.get((kind, fold(value)))
        if instead is not None:
            self.wrong(key, f"{shown_key(value)}: not yet: it is not built; {instead}")
            return None
        guess = nearest(value, names)
        if guess is not None:
            self.wrong(key, f"{shown_key(value)} is unknown; did you mean {names[guess]}?")
        else:
            self.problems.append(Problem(key, "", error=self.registry.missing(kind, shown_key(value))))
            self.failed.add(key)
        return None

    def select(self, core: dict[str, Any], kind: str) -> None:
        """Replace the name under `kind` by its registered spelling; without one, leave the default for validation."""
        value = core.get(kind, TrainConfig.model_fields[kind].default)
        if kind not in self.failed and not (isinstance(value, str) and value.strip()):
            self.wrong(kind, f"must be a name (got {shown(value)})")
        name = None if kind in self.failed else self.name(kind, kind, value)
        core.pop(kind, None)
        if name is not None:
            core[kind] = name

    def select_optional(self, core: dict[str, Any], kind: str) -> None:
        """As `select`; without the key, or with `none`, nothing is selected."""
        value = core.get(kind)
        if value is None or (isinstance(value, str) and fold(value) == "none"):
            core.pop(kind, None)
        else:
            self.select(core, kind)

    def alias(self, core: dict[str, Any], mode: Mode) -> None:
        """`lora`, where it is not written, follows `adapter`; without either `sft` trains a LoRA adapter."""
        self.adapter_as_written = written = core.get("adapter")
        if written is None:
            core.setdefault("lora", mode == "sft")
        else:
            core.setdefault("lora", isinstance(written, str) and fold(written) == ADAPTER)

    def loggers(self, core: dict[str, Any]) -> None:
        value = core.pop("report_to", ())
        names = [value] if isinstance(value, str) else value
        if "report_to" in self.failed:
            return
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            self.wrong("report_to", f"must be a name or a list of names (got {shown(value)})")
            return
        found = [self.name("logger", "report_to", name) for name in names if fold(name) not in ("none", "")]
        core["report_to"] = [name for name in found if name is not None]

    # ------------------------------------------------------------------------------------------------------ datasets

    def datasets(self, key: str, value: Any) -> tuple[DatasetEntry, ...]:
        if not isinstance(value, list | tuple):
            self.wrong(key, f"must be a list of entries, each a mapping with a path (got {shown(value)})")
            return ()
        entries = [self.dataset(f"{key}.{index}", entry) for index, entry in enumerate(value)]
        return tuple(entry for entry in entries if entry is not None)

    def dataset(self, place: str, given: Any) -> DatasetEntry | None:
        """One entry: core's keys, and those of its type as `options`. None and problems when it cannot be used."""
        if not isinstance(given, Mapping):
            self.wrong(place, f"must be a mapping with a path (got {shown(given)})")
            return None
        within = f"{place}."
        known = DatasetEntry.model_fields.keys() - {"options"}
        values = {key: value for key, value in given.items() if value is not None}
        entry, problems = validate(
            DatasetEntry, {key: value for key, value in values.items() if key in known}, within=within
        )
        self.problems += problems
        if entry is None:
            return None
        kind = "auto" if fold(entry.type) == "auto" else self.name("format", f"{within}type", entry.type)
        if kind is None:
            return None
        options = self.format_options(kind, {key: values[key] for key in values if key not in known}, within)
        return entry.model_copy(update={"type": kind, "options": options})

    def format_options(self, kind: str, given: Mapping[str, Any], within: str) -> dict[str, Any]:
        """The keys of a dataset's type, validated. With `auto` any one type must take them all."""
        formats = self.registry.dataset_formats()
        candidates = [formats[kind]] if kind != "auto" else list(formats.values())
        legal = {name for candidate in candidates for name in keys_of(candidate.options)}
        unknown = [key for key in given if key not in legal]
        for key in unknown:
            if key in DATASET_KEYS:
                self.wrong(
                    f"{within}{key}",
                    f"not yet: datasets of type {DATASET_KEYS[key]} are not built; use type: conversation",
                )
            else:
                words = {*legal, *DatasetEntry.model_fields} - {"options"}
                self.problems.append(unknown_key(key, words, within=within))
        if unknown or not candidates or (kind == "auto" and not given):
            return {}
        results = [self.validated(("format", c.name), c.options, given, within) for c in candidates]
        for options, _ in results:
            if options is not None:
                return options.model_dump(mode="json", by_alias=True, exclude_unset=True)
        self.problems += min((problems for _, problems in results), key=lambda found: len(list(found)))
        return {}

    # ------------------------------------------------------------------------------------------------- whole config

    def settle(self, config: TrainConfig) -> TrainConfig:
        """The rules between keys. Returns the config with implied values filled in."""
        for limit in LIMITS:
            value = getattr(config, limit.key)
            if value not in limit.works:
                self.wrong(limit.key, f"not yet: {limit.instead} (got {shown(value)})")
        changes: dict[str, Any] = {}
        if config.torch_dtype is not None:
            if config.model_dtype not in (None, config.torch_dtype):
                self.wrong("torch_dtype", f"is {config.torch_dtype}, but model_dtype is {config.model_dtype}; keep one")
            changes["model_dtype"] = config.torch_dtype
        if config.max_model_len is not None and config.sequence_len > config.max_model_len:
            self.wrong("sequence_len", f"is {config.sequence_len}, above max_model_len {config.max_model_len}")
        tokens = config.per_device_train_batch_size * config.sequence_len
        if config.lmhead_chunks != "auto" and tokens % config.lmhead_chunks:
            self.wrong(
                "lmhead_chunks",
                f"{config.lmhead_chunks} does not divide the {tokens} tokens of a micro-step "
                "(per_device_train_batch_size x sequence_len); use auto, or a power of two",
            )
        if config.validation_datasets:
            changes["validation_split_ratio"] = 0.0
        if config.init_projections_to_zero and not config.from_scratch:
            self.wrong(
                "init_projections_to_zero", "sets new weights, but from_scratch is false; set it, or remove the key"
            )
        return self.adapter(config.model_copy(update=changes))

    def adapter(self, config: TrainConfig) -> TrainConfig:
        """The rules of the keys of adapters. Returns the config with `adapter: lora` for its alias."""
        written = self.adapter_as_written
        if config.lora and written is not None and config.adapter != ADAPTER and "adapter" not in self.failed:
            self.wrong("adapter", f"is {shown(written)}, but lora: true means adapter: {ADAPTER}; remove one of them")
        if not config.lora and config.adapter == ADAPTER:
            self.wrong(ADAPTER, f"is false, but adapter is {ADAPTER}; remove one of them")
        if config.lora and ADAPTER not in self.registry.names("adapter"):
            self.wrong(
                ADAPTER,
                f"no installed plugin provides it: pip install {ADAPTER_PACKAGE}, "
                "or set lora: false to train all weights",
            )
        adapter = ADAPTER if config.lora else config.adapter
        if adapter is not None and config.from_scratch:
            key, without = (ADAPTER, "lora: false") if config.lora else ("adapter", "adapter: none")
            self.wrong(
                key,
                "an adapter is of a model that can be loaded again, but from_scratch: true draws new weights; "
                f"set {without}, or from_scratch: false",
            )
        if adapter is not None and config.rope_scaling is not None:
            self.wrong(
                "rope_scaling",
                "an adapter is loaded on its base, whose own config.json would not have it; put it there instead",
            )
        if adapter is None and config.adapter_path is not None:
            self.wrong("adapter_path", "continues an adapter, but lora is false; set lora: true, or remove the key")
        if adapter is None and config.merge_adapter:
            self.wrong(
                "merge_adapter",
                "writes base + adapter, but lora is false; set lora: true (the default of surogate sft)",
            )
        return config.model_copy(update={"adapter": adapter})

    def options(
        self, core: Mapping[str, Any], plugin: Mapping[str, Any], adapter: str | None
    ) -> dict[tuple[str, str], BaseModel]:
        """The options of what is selected. Keys of what is not are validated and told to have no effect."""
        options: dict[tuple[str, str], BaseModel] = {}
        selected = [(kind, core[kind]) for kind in (*_SELECTED, "offload") if kind in core]
        selected += [("adapter", adapter)] if adapter is not None else []
        selected += [("logger", name) for name in core.get("report_to", ())]
        for owner in selected:
            model = self.models.get(owner, NoOptions)
            given = {key: plugin[key] for key in keys_of(model) if key in plugin}
            instance, problems = self.validated(owner, model, given)
            self.problems += problems
            if instance is not None:
                options[owner] = instance
        for key, value in plugin.items():
            owners = self.owners[key]
            if not any(owner in selected for owner in owners):
                self.idle(key, value, owners)
        return options

    def validated(
        self, owner: tuple[str, str], model: type[BaseModel], given: Mapping[str, Any], within: str = ""
    ) -> tuple[BaseModel | None, list[Problem]]:
        """`validate`, with what a plugin's own validators raise attributed to it."""
        try:
            return validate(model, given, within=within)
        except Exception as error:
            failed = self.registry.failed(*owner, "options", error)
            if failed is None:
                raise
            raise failed from error

    def idle(self, key: str, value: Any, owners: Sequence[tuple[str, str]]) -> None:
        kind, name = owners[0]
        _, problems = self.validated(owners[0], self.models[kind, name], {key: value})
        self.problems += [problem for problem in problems if problem.key == key]
        self.notices.append(f"{key}: has no effect, since {kind} {name} is not used by this run")


def _map_text(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """`value` with every text in it changed. What is nested deeper than a config can be stays as it is."""
    if isinstance(value, str):
        return change(value)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {key: _map_text(inner, change, depth + 1) for key, inner in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [_map_text(inner, change, depth + 1) for inner in value]
    return value
