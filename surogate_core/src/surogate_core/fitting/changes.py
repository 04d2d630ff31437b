"""What a proposal may change of a run, as keys of its config: micro-batch, recomputation, offloading, dtypes, adapter.

A change is a mapping of keys to values. It is applied by loading the config again, so a proposal is planned exactly as
if its lines were in the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..api import OffloadDef, OptimizerDef, Precision
from ..config.keys import ADAPTER_FLAG
from ..config.load import dump_yaml, load_config, resolved
from ..config.schema import RECOMPUTE_KEYS, TrainConfig
from ..planning.run import Run, open_run

Changes = Mapping[str, Any]

LAST_RESORTS: Mapping[str, str] = {
    "param_grad_dtype": "gradients or optimizer states in bf16",
    "optimizer_state_dtype": "gradients or optimizer states in bf16",
    "sequence_len": "shorter rows",
    ADAPTER_FLAG.key: "an adapter in place of all weights",
}
"""Keys whose change alters what a run learns -> what it gives up."""

_SHORTEST = 256
"""Rows are not made shorter than this many tokens."""
_MOST_STEPS = 65536
"""The most micro-steps that `gradient_accumulation_steps` allows."""
_DIVISORS = 1024
"""Divisors up to this one, and their counterparts, are tried as numbers of rows."""


@dataclass(frozen=True)
class Batch:
    """The micro-batch of a worker, and the micro-steps of an optimizer step.

    halvings  how often the rows are shorter by half than asked for; what the model learns changes with it
    """

    rows: int
    length: int
    steps: int
    halvings: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of a micro-step."""
        return self.rows * self.length


@dataclass(frozen=True)
class Toggle:
    """Turns an offload strategy on with one of its options, or off if the config selects it."""

    name: str
    changes: Changes


def changed(run: Run, changes: Changes) -> Run:
    """Return the run with other values for some keys. Raises ConfigError if the config forbids them."""
    loaded = run.loaded
    raw = {**resolved(loaded), **changes}
    again = load_config(raw, registry=run.registry, mode=loaded.mode, source=loaded.source)
    return open_run(again, run.registry) if ADAPTER_FLAG.key in changes else replace(run, loaded=again)


def yaml_lines(changes: Changes) -> list[str]:
    """Return the changes as lines of YAML."""
    return dump_yaml(changes).splitlines() if changes else []


def batches(config: TrainConfig, *, shorter: bool = False) -> list[Batch]:
    """Return the micro-batches of the same optimizer step: the same rows in more or fewer micro-steps.

    The config's own is the first, then by how far they are from it. `shorter`: and those of rows of half the length, a
    quarter, and so on. These keep the tokens of a step.
    """
    rows, steps = config.per_device_train_batch_size, config.gradient_accumulation_steps
    found, length, halvings = [], config.sequence_len, 0
    while True:
        every = {d for divisor in _divisors(rows * steps) for d in (divisor, rows * steps // divisor)}
        sizes = [Batch(d, length, rows * steps // d, halvings) for d in every if rows * steps // d <= _MOST_STEPS]
        found += sorted(sizes, key=lambda batch: (max(batch.rows / rows, rows / batch.rows), -batch.rows))
        if not shorter or length % 2 or length <= _SHORTEST:
            return found
        length, halvings, steps = length // 2, halvings + 1, steps * 2


def _divisors(n: int) -> Iterator[int]:
    return (d for d in range(1, _DIVISORS + 1) if n % d == 0)


def batch_changes(config: TrainConfig, batch: Batch) -> Changes:
    """Return the keys of a micro-batch that differ from the config's."""
    chunks = config.lmhead_chunks
    while isinstance(chunks, int) and batch.tokens % chunks:
        chunks -= 1
    parts = config.attn_bwd_chunks
    while batch.rows % parts:
        parts -= 1
    keys = {
        "per_device_train_batch_size": batch.rows,
        "gradient_accumulation_steps": batch.steps,
        "sequence_len": batch.length,
        "lmhead_chunks": chunks,
        "attn_bwd_chunks": parts,
    }
    return {key: value for key, value in keys.items() if value != getattr(config, key)}


def recompute_changes(config: TrainConfig, word: str) -> Changes:
    """Return the keys that leave recomputation to `recompute`, which is "auto" or "false", alone."""
    keys: dict[str, Any] = {"recompute": False if word == "false" else word} if config.recompute != word else {}
    return keys | {key: False for key in RECOMPUTE_KEYS.values() if getattr(config, key)}


def toggles(run: Run) -> Iterator[Toggle]:
    """Yield a toggle for each option that an installed strategy proposes, and for turning it off."""
    for name in sorted(run.registry.names("offload")):
        strategy: OffloadDef = run.registry.get("offload", name)
        options = run.loaded.options["offload", name]
        now, defaults = (values.model_dump(mode="json", by_alias=True) for values in (options, strategy.options()))
        off = {key: defaults[key] for proposed in strategy.proposed for key in proposed}
        for wanted in (*strategy.proposed, *([off] if strategy.selected(options) else [])):
            changes = {
                key: value for key, value in wanted.items() if (now[key], type(now[key])) != (value, type(value))
            }
            if changes:
                yield Toggle(name, changes)


def narrower(precision: Precision, optimizer: OptimizerDef) -> list[Changes]:
    """Return the dtype keys that make gradients and optimizer states smaller. They change what a run computes."""
    names = ("param_grad", "optimizer_state") if "bf16" in optimizer.state_dtypes else ("param_grad",)
    return [{f"{name}_dtype": "bf16"} for name in names if getattr(precision, name) == "fp32"]


def adapter_change(run: Run) -> Changes:
    """Return the key that trains an adapter instead of all weights; empty if the run trains one."""
    return {ADAPTER_FLAG.key: True} if run.config.adapter is None else {}
