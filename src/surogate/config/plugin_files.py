"""The key `plugins`: it is read ahead of all others, because the plugins in these files declare keys themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from .errors import Findings
from .values import parse_files
from .variables import escape_dollars, expand_variables
from .yaml import apply_overrides, read_yaml

KEY: Final = "plugins"


def read_run(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Return the mapping in the YAML file of a run, with `overrides` applied and absolute paths of plugins.

    Those in the file are relative to its folder, those in `overrides` to the current one. Raises ConfigError.
    """
    raw = read_yaml(path)
    if files := plugin_files(raw, str(path.parent)):
        raw[KEY] = escape_dollars(files)
    return apply_overrides(raw, overrides)


def plugin_files(raw: Mapping[str, Any], folder: str = "") -> tuple[str, ...]:
    """Return the absolute paths of the files that a config names; () if the value is wrong, which `load_config` tells.

    folder: that of relative paths, by default the current one.
    """
    findings = Findings()
    try:
        files = parse_files(expand_variables(KEY, raw.get(KEY) or (), findings), folder=folder)
    except ValueError:
        return ()
    return () if findings.problems else files
