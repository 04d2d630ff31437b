"""Tools and tool calls of a row, in the form that chat templates read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.api import Omission
from surogate_core.api.json_object import RepeatedKey, unique_keys
from surogate_core.errors import ConfigError

from ..readers import kind_of_value

Dropped = Counter[tuple[str, str]]
"""(what, its unit) -> how many of it a row has that no chat template can write."""

_FUNCTION = ("name", "arguments")
_WHY_UNSEEN = (
    "the row does not show a function that it calls, so the model learns to call what it never sees. Add the column "
    "`tools`, or set tools_field"
)


def calls_of(value: object, where: str, dropped: Dropped) -> list[dict[str, Any]]:
    """Return calls in the form of templates: {"type", "function": {"name", "arguments"}}, the arguments an object.

    Raises ConfigError for a call without a name, or with arguments that are no object.
    """
    value = from_json(value)
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list | tuple):
        raise ConfigError(f"{where} has tool_calls {kind_of_value(value)}, not a list of calls. Correct such rows.")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"{where} has a tool call without the name of a function: {kind_of_value(call)}. Correct it."
            )
        own = {key: call[key] for key in others(call, _FUNCTION)}
        if "function" in call:
            dropped.update((f"the key {key!r}", "functions of tool calls") for key in others(function, _FUNCTION))
            dropped.update((f"the key {key!r}", "tool calls") for key in _FUNCTION if call.get(key) is not None)
        arguments = _arguments(function.get("arguments"), f"{where} calls {function['name']!r} with arguments")
        found.append({"type": "function", **own, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _arguments(given: object, where: str) -> Mapping[str, Any]:
    """Return the arguments of a call as an object; none, or an empty text, is a call without arguments.

    Templates write anything else as it stands, which no caller can read.
    """
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    try:
        value = from_json(given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{where} that are {kind_of_value(given)}, not a JSON object. Correct such rows: write an object "
            '({"city": "Oslo"}) or its JSON text, and {} for none.'
        )
    return value


def tools_of(value: object, column: str) -> list[Any] | None:
    """Return the tools in a cell; None if there are none."""
    value = from_json(value)
    if value is None or value in ("", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ConfigError(
            f"column {column!r} holds {kind_of_value(value)}, not a list of tools (JSON schemas). Correct it."
        )
    return value


def unseen_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[Omission]:
    """Count a conversation that calls a function which neither its tools nor a message that is no answer names."""
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    given = [message["content"] for message in messages if message["role"] not in ("assistant", "tool")]
    shown = "\n".join([json.dumps(tools, ensure_ascii=False), *given])
    unseen = any(name not in shown for name in called)
    return [Omission("the tools", "conversations with calls", _WHY_UNSEEN, int(unseen), 1)] if called else []


def others(value: Mapping[Any, Any], known: Sequence[str]) -> list[Any]:
    """Return the keys that are neither known nor null."""
    return [key for key, item in value.items() if key not in known and item is not None]


def from_json(value: object) -> object:
    """Parse the text of a JSON object or list; return anything else unchanged.

    Raises ConfigError for an object with a key twice, of which only one could be read.
    """
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value, object_pairs_hook=unique_keys)
        except RepeatedKey as error:
            raise ConfigError(f"{error}: {value[:60]!r}. Correct or remove such rows.") from error
        except (ValueError, RecursionError):
            return value
    return value
