"""Answers that the checks need of a server, and the programs that give them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from surogate_core.errors import ConfigError

from .connection import Connection, shown


@dataclass(frozen=True)
class Rendering:
    """Messages that a server is to render.

    prompt     whether the start of an answer follows them
    variables  values of variables of the chat template
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    prompt: bool
    variables: Mapping[str, Any]


class ServedModel(NamedTuple):
    """A name that a server answers to. parent: the name of an adapter's base; None: it is no adapter."""

    name: str
    parent: str | None


class Server(Protocol):
    """A server program's protocol."""

    program: str
    connection: Connection

    def models(self) -> Sequence[ServedModel]:
        """Return the names that it answers to."""

    def ids(self, model: str, rendering: Rendering) -> list[int]:
        """Return the tokens of rendered messages."""

    def log_probs(self, model: str, ids: Sequence[int], wanted: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
        """Return {position: {token: log probability}} for positions of a text: of its token, and of the likeliest."""

    def stops(self, model: str, before: Sequence[int], end: int) -> bool:
        """Return whether generation stops when the model writes the token `end` after the tokens `before`."""


def field(answer: Any, *path: str | int) -> Any:
    """Return a part of an answer. Raises ConfigError if it has another form."""
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            named = ".".join(map(str, path))
            raise ConfigError(
                f"the answer of the server has no {named}: {shown(str(answer))!r}. Its version may be too old or too "
                "new for this check."
            ) from None
    return answer


def token_ids(answer: Any, *path: str) -> list[int]:
    """Return a list of tokens in an answer."""
    found = field(answer, *path)
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        raise ConfigError(f"the answer of the server has {'.'.join(path)} {shown(str(found))!r}, not token ids.")
    return found


def number(value: Any) -> float:
    """Return a log probability of an answer; a server may write minus infinity as null or as text."""
    try:
        return float("-inf") if value is None else float(value)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the answer of the server has the log probability {shown(str(value))!r}, no number."
        ) from None


def entries(listed: Any) -> list[Mapping[str, Any]]:
    """Return the entries of an answer of /v1/models."""
    found = field(listed, "data")
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ConfigError("/v1/models: the answer has no list of models. Is this a model server?")
    return found


def served_models(listed: Any) -> list[ServedModel]:
    """Return the models in an answer of /v1/models."""
    return [ServedModel(str(field(e, "id")), e.get("parent") and str(e["parent"])) for e in entries(listed)]


def sent(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as clients of OpenAI's interface send them: the arguments of calls as JSON text."""
    return [_with_text(message) for message in messages]


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    def text(call: Mapping[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        given = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**call["function"], "arguments": given}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [text(call) for call in calls]} if calls else dict(message)
