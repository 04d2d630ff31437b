"""Answers that the checks need of a server: each program gives them by a protocol of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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


class OwnForm(NamedTuple):
    """Messages as a server gives them to the chat template, where it changes them.

    fault   the difference in a few words
    remedy  what to do
    """

    fault: str
    remedy: str
    rendering: Rendering


class ServedModel(NamedTuple):
    """A name that a server answers to. parent: the name of an adapter's base; None: it is no adapter."""

    name: str
    parent: str | None


class NotGiven(Exception):  # it ends a check, and is no error
    """A server gives no answer that a check needs. Its text says which, and what gives it."""


@dataclass(frozen=True)
class Words:
    """Remedies of differences, in terms of a server program.

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

    def own_forms(self, rendering: Rendering) -> Iterator[OwnForm]:
        """Yield what the server may make of messages before it renders them."""

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


def own_tools(program: str, rendering: Rendering, tools: Sequence[Any]) -> Iterator[OwnForm]:
    """Yield messages with tools as a server gives them to the template, if that is another form of them."""
    given = list(rendering.tools or ())
    texts = [[json.dumps(tool, ensure_ascii=False) for tool in listed] for listed in (given, tools)]
    other = [served for ours, served in zip(*texts, strict=True) if ours != served]
    if other:
        yield OwnForm(
            "the tools are written in another form",
            f"{program} gives tools to the template in a form of its own: {shown(other[0])}. Write them so in the "
            "data, or train and serve with a template that writes only keys which it names.",
            replace(rendering, tools=tools),
        )


def functions(tools: Sequence[Any] | None, formed: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> list[Any]:
    """Return tools with their functions in another form."""
    return [
        {**tool, "function": formed(tool["function"])}
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        else tool
        for tool in tools or ()
    ]


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
