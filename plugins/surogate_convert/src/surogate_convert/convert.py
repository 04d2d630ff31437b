"""From the keys of another trainer to a config of Surogate, with a note on each key that is not simply renamed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surogate_core.api import ConfigError

from .conversion import Conversion
from .leaves import Leaf
from .reading import read
from .rules import TOOLS, Tool, tool
from .source import Source
from .tools import OWN

_ORDER = (
    *("model", "adapter", "lora", "adapter_path", "output_dir", "run_name", "loss", "reference", "datasets"),
    *("validation_datasets", "validation_split_ratio", "loss_scale", "truncation_strategy", "sample_packing"),
    *("sequence_len", "per_device_train_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps"),
    *("learning_rate", "lr_scheduler_type", "warmup_ratio", "warmup_steps", "optimizer", "weight_decay"),
)
_SIGN = 5
"""The weight of a key or word that only one tool has, beside a key that the tool knows."""


@dataclass
class Converted:
    """A converted config.

    leaves    every value of the file: converted, missing or unneeded
    differing (key, sentence) of keys that mean something else here, or were set for another default
    added     keys that were not in the file: the tool's own defaults
    """

    tool: Tool
    config: dict[str, Any] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)
    differs: list[tuple[str, str]] = field(default_factory=list)
    added: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[tuple[str, str]]:
        """(key, sentence) of each value without a counterpart: what it asked for is lost."""
        return [(leaf.name, "; ".join(leaf.said)) for leaf in self.leaves if leaf.fate == "missing"]

    @property
    def unneeded(self) -> list[tuple[str, str]]:
        """(key, sentence) of each value for which nothing has to be set."""
        return [(leaf.name, "; ".join(leaf.said)) for leaf in self.leaves if leaf.fate == "unneeded"]

    @property
    def converted(self) -> int:
        return sum(leaf.fate == "converted" for leaf in self.leaves)


def convert(path: Path, name: str | None = None) -> Converted:
    """Convert a file of the tool `name`, by default the one whose keys it has.

    Raises ConfigError for a file that cannot be read, is of no tool, or asks for training that is not converted.
    """
    source = read(path)
    chosen = tool(name) if name else recognised(path, source)
    conversion = Conversion(path, source, chosen)
    conversion.run(OWN[chosen.name])
    config = conversion.config
    ordered = [key for key in _ORDER if key in config]
    config = {key: config[key] for key in dict.fromkeys((*ordered, *config))}
    lost = [leaf.name for leaf in conversion.leaves if leaf.fate is None]
    assert not lost, f"not settled: {lost}"
    return Converted(chosen, config, conversion.leaves, conversion.differing, conversion.added)


def recognised(path: Path, source: Source) -> Tool:
    """Return the tool whose keys a file has."""
    if "unsloth" in source.words:  # its scripts have the keys of TRL too
        return tool("unsloth")
    if path.suffix == ".py":
        return tool("trl")
    tables = [tool(name) for name in TOOLS]
    if {"model", "datasets"} <= {*source.names}:  # other tools call them base_model, dataset
        raise ConfigError(f"{path}: has the keys of a config of Surogate. Train it as it is: surogate train {path}")
    words = source.words | {*source.names}
    score = {t.name: sum(key in t.keys for key in source.names) + _SIGN * len(words & {*t.signs}) for t in tables}
    best = sorted(score, key=lambda name: -score[name])
    titles = ", ".join(t.title for t in tables)
    if score[best[0]] == 0:
        raise ConfigError(f"{path}: has no key of {titles}. Give the config of a run.")
    found = tool(best[0])
    unknown = [key for key in source.names if key not in found.keys]
    if not words & {*found.signs} and 2 * len(unknown) > len(source.names):
        raise ConfigError(
            f"{path}: most of its keys are of none of {titles}: {', '.join(unknown[:5])}. Other tools are not "
            f"converted. If it is of one of these, say which: --from {found.name}"
        )
    if score[best[0]] == score[best[1]]:
        raise ConfigError(f"{path}: may be of {best[0]} or {best[1]}. Say which: --from {best[0]}")
    return found
