"""Whose defaults a run has in a command that does not train it, such as `surogate plan`."""

from __future__ import annotations

from surogate_core.errors import SurogateError

from .. import run
from ..config.adapter import Mode
from ..config.keys import ADAPTER_FLAG
from ..config.load import LoadedConfig
from .options import RunArguments


def assumed_verb(loaded: LoadedConfig, arguments: RunArguments) -> str:
    """Return whose defaults a run has, if `surogate sft` or `pt` would train something else with it; otherwise ""."""
    other: Mode = "train" if loaded.mode == "sft" else "sft"
    try:
        differs = run.load(arguments.config, arguments.overrides, other).config != loaded.config
    except SurogateError:  # the config is for one of the commands only
        return ""
    if not differs:
        return ""
    if loaded.mode == "sft":
        return f"defaults of surogate sft: {ADAPTER_FLAG.title} (--pt for those of surogate pt: all weights)"
    return f"defaults of surogate {loaded.mode}: all weights (--sft for those of surogate sft: {ADAPTER_FLAG.title})"
