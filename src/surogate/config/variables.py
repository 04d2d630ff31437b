"""Environment variables in a config: `$NAME` and `${NAME}` are replaced, `$$` is a dollar sign."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import Findings, shown, shown_key

_VARIABLE = re.compile(r"\$(?:(\$)|\{([^{}]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_MAX_DEPTH = 32
_SECRET = re.compile(
    r"(HF|HUGGING_FACE_HUB|HUGGINGFACE|GITHUB|GH)_TOKEN|(.*_)?(API_KEY|ACCESS_KEY|PRIVATE_KEY|SECRET|PASSWORD|PASSWD)"
)
"""Names of variables whose values must not be written: run.yaml, metrics and the model card have the config."""


def expand_variables(key: str, value: Any, findings: Findings) -> Any:
    """Replace the variables in every text inside `value`, the value of `key`. Variables that are not set are wrong."""

    def substitute(match: re.Match[str]) -> str:
        dollar, braced, plain = match.groups()
        if dollar:
            return "$"
        name = braced if plain is None else plain
        if not name.isidentifier() or not name.isascii():
            findings.wrong(key, f"{shown(match[0])} names no environment variable; write $$ for a dollar sign")
        elif _SECRET.fullmatch(name.upper()):
            findings.wrong(
                key,
                f"${name} looks like a secret, and values of the config are written to run.yaml, metrics and the model "
                "card. The libraries that need it read the variable themselves: remove it here",
            )
        elif name not in os.environ:
            findings.wrong(key, f"the environment variable {shown_key(name)} is not set; set it, or write $$ for a $")
        else:
            return os.environ[name]
        return match[0]

    return _map_text(value, lambda text: _VARIABLE.sub(substitute, text))


def escape_dollars(value: Any) -> Any:
    """Return `value` with every `$` doubled, so that `expand_variables` gives `value` again."""
    return _map_text(value, lambda text: text.replace("$", "$$"))


def _map_text(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """Apply `change` to every text inside `value`. What is nested deeper than a config can be is left as it is."""
    if isinstance(value, str):
        return change(value)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {key: _map_text(inner, change, depth + 1) for key, inner in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple):
        return [_map_text(inner, change, depth + 1) for inner in value]
    return value
