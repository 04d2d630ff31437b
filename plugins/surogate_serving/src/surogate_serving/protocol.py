"""Answers that the checks need of a server: each program gives them by a protocol of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from surogate_core.errors import ConfigError

from .connection import shown


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


class NotGiven(Exception):  # it ends a check, and is no error
    """A server gives no answer that a check needs. Its text says which, and what gives it."""


@dataclass(frozen=True)
class Words:
    """What to do about a difference, in terms of a server program.

    template   to have the chat template of the output
    variables  to have chat_template_kwargs applied
    ends       to have it stop at other tokens, of the files that are served
    dtype      to have it compute in {dtype}, a dtype of torch
    adapter    to have it serve the adapter {name}
    """

    template: str
    variables: str
    ends: str
    dtype: str
    adapter: str


class Server(Protocol):
    """The protocol of a server program, or a model in this process.

    program   its name
    where     its address, or the folder of the files
    words     what to do about differences
    own_error rms error, relative to products, that it adds to that of the dtype and the format
    least     smallest log probability that it can give
    left_out  which tokens it gives no log probabilities of, for a sentence
    continues whether it takes an answer at the end of messages for one that the model is to continue, so that the end
              of its turn is not written
    adapter   the adapter that is compared if none is named; None: the model that it serves is
    """

    program: str
    words: Words
    own_error: float
    least: float
    left_out: str
    continues: bool
    adapter: str | None

    @property
    def where(self) -> str: ...

    def models(self) -> Sequence[ServedModel]:
        """Return the names that it answers to."""

    def form(self) -> str | None:
        """Return the name for --format of the form in which it says that it has its weights; None: it says none."""

    def tools(self, given: Sequence[Any]) -> list[Any]:
        """Return tools as the server gives them to the chat template, which may write all that is in them."""

    def ids(self, model: str, rendering: Rendering) -> list[int]:
        """Return the tokens of rendered messages. Raises Refused if the template refuses them, NotGiven if it cannot
        render such messages at all."""

    def log_probs(self, model: str, ids: Sequence[int], wanted: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
        """Return {position: {token: log probability}} for positions of a text: of its token, and of the likeliest.

        A position of which the server gives none is left out.
        """

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


def token(value: Any) -> int:
    """Return a number of an answer that counts something, such as a token."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"the answer of the server has {shown(str(value))!r} where a whole number belongs.")
    return value


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


def filled(tools: Sequence[Any], missing: Mapping[str, Any], extra: bool) -> list[Any]:
    """Return tools with the keys of a function in an order, and with values for those that are not given.

    missing: value of a key that is not given, in the order of keys. extra: whether other keys stay.
    """

    def formed(tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            return tool
        ordered = {key: function.get(key, value) for key, value in missing.items()}
        return {**tool, "function": {**ordered, **function} if extra else ordered}

    return [formed(tool) for tool in tools]


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
