"""The rules of the keys that select an adapter: `adapter`, and the flag that is short for one adapter."""

from __future__ import annotations

from typing import Any, Literal

from surogate_core.words import fold

from .errors import Findings, shown
from .keys import ADAPTER_FLAG as FLAG
from .registry import Registry
from .schema import TrainConfig

Mode = Literal["train", "pt", "sft"]
"""The verb of the command line: `train` takes the defaults of `pt` (pre-training), `sft` trains an adapter."""


def default_flag(adapter: Any, mode: Mode, stored: bool) -> bool:
    """Return the flag's value where the config does not set it. adapter: the value of `adapter` as written.

    The flag follows `adapter`. Without `adapter` it is set by `sft`, and by weights that are `stored` in a format,
    which are frozen: only an adapter can train on them, whatever the verb.
    """
    if adapter is None:
        return mode == "sft" or stored
    return isinstance(adapter, str) and fold(adapter) == FLAG.name


def apply_adapter_rules(config: TrainConfig, written: Any, registry: Registry, findings: Findings) -> TrainConfig:
    """Check the keys of adapters. Return the config with the flag translated to `adapter`.

    written: the value of `adapter` in the user's file; None if it is not there.
    """
    flag = bool(getattr(config, FLAG.key))
    if flag and written is not None and config.adapter != FLAG.name and "adapter" not in findings.failed:
        findings.wrong(
            "adapter", f"is {shown(written)}, but {FLAG.key}: true means adapter: {FLAG.name}; remove one of them"
        )
    if not flag and config.adapter == FLAG.name:
        findings.wrong(FLAG.key, f"is false, but adapter is {FLAG.name}; remove one of them")
    if flag and FLAG.name not in registry.names(FLAG.kind):
        findings.wrong(
            FLAG.key,
            f"no installed plugin provides it: pip install {FLAG.package}, "
            f"or set {FLAG.key}: false to train all weights",
        )
    adapter = FLAG.name if flag else config.adapter
    if adapter is not None:
        _check_base(config, flag, findings)
    else:
        _check_unused(config, findings)
    _check_merge(config, findings)
    return config.model_copy(update={"adapter": adapter})


def _check_base(config: TrainConfig, flag: bool, findings: Findings) -> None:
    """An adapter is saved without its base, so the base must be loadable again as it is."""
    if config.from_scratch:
        key, without = (FLAG.key, f"{FLAG.key}: false") if flag else ("adapter", "adapter: none")
        findings.wrong(
            key,
            "an adapter needs a base model that can be loaded again, but from_scratch: true draws random weights; "
            f"set {without}, or from_scratch: false",
        )
    if config.rope_scaling is not None:
        findings.wrong(
            "rope_scaling",
            "an adapter is loaded with its base model, whose config.json would not have this scaling; "
            "set it in that config.json instead",
        )


def _check_merge(config: TrainConfig, findings: Findings) -> None:
    if config.merge_format != "hf" and not config.merge_adapter:
        findings.wrong(
            "merge_format",
            "is the format of the merged model, and merge_adapter is false; set merge_adapter: true, or remove the key "
            f"(got {config.merge_format})",
        )


def _check_unused(config: TrainConfig, findings: Findings) -> None:
    """Keys that have no meaning while all weights are trained."""
    if config.adapter_path is not None:
        findings.wrong(
            "adapter_path",
            f"continues an adapter, but {FLAG.key} is false; set {FLAG.key}: true (the default of surogate sft; "
            "--sft of other commands), or remove the key",
        )
    if config.merge_adapter:
        findings.wrong(
            "merge_adapter",
            f"writes base + adapter, but {FLAG.key} is false; set {FLAG.key}: true (the default of surogate sft; "
            "--sft of other commands), or remove the key",
        )
