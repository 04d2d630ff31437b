"""From a user's YAML mapping to a validated configuration.

Keys come from three places: core's own (`schema.py`), the options of installed plugins, mounted flat (`options.py`),
and the tables of keys that are known but not served (`keys.py`). All problems are reported at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from surogate_core.errors import ConfigError, PluginError

from .adapter import Mode, apply_adapter_rules, default_flag
from .dataset_entries import parse_datasets
from .dataset_entry import DatasetEntry
from .errors import Findings, Problem, problems_error, validate
from .keys import ADAPTER_FLAG
from .options import SELECTED_BY_FILES, owners_of_keys, validate_selected
from .registry import Registry
from .rules import apply_rules, check_weight_formats, selects_weight_format
from .schema import TrainConfig
from .selection import select_plugins
from .sorting import sort_keys
from .variables import escape_dollars


@dataclass(frozen=True)
class LoadedConfig:
    """A validated run. Two are equal if they describe the same run, wherever they were read from.

    options: (kind, name) -> the options of each selected plugin: recipe, optimizer, loggers, ... notices: lines to
    show the user once. source: where the config was read, for later errors about it. idle: keys of weight formats that
    the run does not use. model: the name of the model that the run trains; None until its files are read
    (`model_options.of_model`), and `options` then has those of each model for which the config has keys.
    """

    config: TrainConfig
    options: Mapping[tuple[str, str], BaseModel]
    mode: Mode
    notices: tuple[str, ...] = field(default=(), compare=False)
    source: str = field(default="config", compare=False)
    idle: frozenset[str] = field(default=frozenset(), compare=False)
    model: str | None = field(default=None, compare=False)

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
        """Return the training data. Raises ConfigError if there is none: planning needs no data, training does."""
        if not self.config.datasets:
            raise ConfigError(
                f"{self.source}: datasets: is required to train; give a list of entries, "
                "each with a path (a file, a folder or a dataset of the Hugging Face Hub)"
            )
        return self.config.datasets


def load_config(raw: Mapping[str, Any], *, registry: Registry, mode: Mode = "train", source: str) -> LoadedConfig:
    """Validate a user's mapping. `source` names it in errors ("run.yaml").

    Raises ConfigError with one line per problem; PluginError if the only problem is a plugin that is missing, broken
    or in conflict.
    """
    findings = Findings()
    core, plugin = sort_keys(raw, owners_of_keys(registry.options_models()).keys(), findings)
    for key in sorted(plugin.keys() & registry.option_conflicts.keys()):
        text = registry.option_conflicts[key]
        findings.problems.append(Problem(key, text, error=PluginError(text)))
    adapter_as_written = core.get("adapter")
    core.setdefault(ADAPTER_FLAG.key, default_flag(adapter_as_written, mode, selects_weight_format(plugin, registry)))
    for key in ("datasets", "validation_datasets"):
        if key in core:
            core[key] = parse_datasets(key, core[key], registry, findings)
    if not core.get("validation_datasets"):
        core.pop("validation_datasets", None)
    select_plugins(core, plugin, registry, findings)
    config, problems = validate(TrainConfig, core)
    findings.problems += [problem for problem in problems if problem.key not in findings.failed]
    if config is not None:
        config = apply_rules(config, findings)
        config = apply_adapter_rules(config, adapter_as_written, registry, findings)
    options = validate_selected(core, config.adapter if config is not None else None, plugin, registry, findings)
    idle = check_weight_formats(config, options, registry, findings)
    if config is None or findings.problems:
        raise problems_error(source, findings.problems)
    return LoadedConfig(config, options, mode, tuple(findings.notices), source, idle)


def published(loaded: LoadedConfig) -> dict[str, Any]:
    """Return `resolved` for files and trackers: without the address of a webhook, which may be a secret."""
    return without_address(resolved(loaded))


def without_address(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config, also one that no run has written, without the address of a webhook."""
    alerts = config.get("alerts")
    if not alerts:
        return {**config}
    return {**config, "alerts": {**alerts, "url": None} if isinstance(alerts, Mapping) else None}


def resolved(loaded: LoadedConfig) -> dict[str, Any]:
    """Return every key that has an effect with its value, ready for JSON and YAML (`dump_yaml`).

    Loading it gives an equal config.
    """
    values = loaded.config.model_dump(mode="json")
    for key in ("datasets", "validation_datasets"):
        entries: Iterable[DatasetEntry] | None = getattr(loaded.config, key)
        if entries is not None:
            values[key] = [entry.model_dump(mode="json", exclude_none=True) | entry.options for entry in entries]
    for (kind, name), options in loaded.options.items():
        may_be_used = kind == SELECTED_BY_FILES and name != loaded.model
        given = options.model_dump(mode="json", by_alias=True, exclude_unset=may_be_used)
        values |= {key: value for key, value in given.items() if key not in loaded.idle}
    escaped: dict[str, Any] = escape_dollars(values)
    return escaped
