"""Sort the keys of a user's mapping by who reads them: core, a plugin, or nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from surogate_core.words import fold

from .errors import Findings, Problem, shown, shown_key, unknown_key
from .keys import ALIASES, DEAD, IGNORED, MEANS, NOT_YET, PACKAGES, SECTIONS, foreign, same_value
from .schema import TrainConfig
from .variables import expand_variables


def sort_keys(
    raw: Mapping[str, Any], plugin_keys: Collection[str], findings: Findings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (core's keys, plugins' keys) with aliases resolved, variables expanded and nulls dropped.

    plugin_keys: keys that the options of any installed plugin declare. Every other key is checked against the tables
    of `original.toml`: accepted if its value does nothing, else a problem.
    """
    given = {key for key, value in raw.items() if value is not None}
    core: dict[str, Any] = {}
    plugin: dict[str, Any] = {}
    for written, value in raw.items():
        key = ALIASES.get(written, written) if isinstance(written, str) else written
        if key != written and raw.get(key) not in (None, value):
            findings.wrong(key, f"is given twice, as {written} too; keep one")
        elif key in plugin_keys or key in TrainConfig.model_fields:
            if value is not None:
                (plugin if key in plugin_keys else core)[key] = expand_variables(key, value, findings)
        elif key not in MEANS:
            _unserved(key, value, given, plugin_keys, findings)
    for flag in raw.keys() & MEANS.keys():
        _meant(flag, raw[flag], core, findings)
    return core, plugin


def _meant(flag: str, value: Any, core: dict[str, Any], findings: Findings) -> None:
    """Set the key that a flag of the original means, if it is true."""
    key, meant = MEANS[flag]
    if same_value(expand_variables(flag, value, findings), True):
        if core.get(key, meant) not in (meant, "auto"):
            findings.wrong(flag, f"is true, which means {key}: {meant}, but {key} is {core[key]}; keep one")
        core[key] = meant
        findings.notices.append(f"{flag}: true means {key}: {meant}")
    elif value is not None and not same_value(value, False):
        findings.wrong(flag, f"must be true or false (got {shown(value)})")


def _unserved(key: Any, value: Any, given: Collection[Any], plugin_keys: Collection[str], findings: Findings) -> None:
    """Check a key that nothing in this installation reads."""
    if key in NOT_YET or key in DEAD:
        _unread(key, value, given, findings)
    elif key in SECTIONS:
        _section(key, value, given, findings)
    elif key in IGNORED:
        if value is not None:
            findings.notices.append(f"{key}: ignored, nothing reads this key; {IGNORED[key]}")
    elif key in PACKAGES:
        findings.wrong(key, f"no installed plugin has this key; pip install {PACKAGES[key]}")
    else:
        findings.problems.append(_unknown(key, plugin_keys))


def _unread(key: str, value: Any, given: Collection[Any], findings: Findings) -> None:
    entry = NOT_YET[key] if key in NOT_YET else DEAD[key]
    if not entry.accepts(value, given):
        accepted = f" (accepted: {', '.join(map(shown, entry.accepted))})" if entry.accepted else ""
        findings.wrong(key, f"{entry.why} (got {shown(value)}); {entry.instead}{accepted}")


def _section(name: str, value: Any, given: Collection[Any], findings: Findings) -> None:
    if value is None:
        return
    if not isinstance(value, Mapping):
        findings.wrong(name, f"must be a section of keys (got {shown(value)})")
        return
    legal = [key.partition(".")[2] for key in NOT_YET if key.startswith(f"{name}.")]
    for key, inner in value.items():
        if key in legal:
            _unread(f"{name}.{key}", inner, given, findings)
        else:
            findings.problems.append(unknown_key(key, legal, within=f"{name}."))


def _unknown(key: Any, plugin_keys: Collection[str]) -> Problem:
    """Return the problem of an unknown key, with a hint if it is another trainer's name, else with the nearest key."""
    name = fold(key) if isinstance(key, str) else ""
    if (hint := foreign()["hints"].get(name)) is not None:
        return Problem(shown_key(key), f"unknown key; {hint}")
    legal = {*TrainConfig.model_fields, *plugin_keys, *NOT_YET, *SECTIONS, *DEAD, *PACKAGES, *ALIASES, *MEANS}
    return unknown_key(key, legal, meant=foreign()["same"].get(name))
