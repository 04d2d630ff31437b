"""Tool calls in what a model writes, read in the form in which its chat template writes them. Imports no torch.

No form is known here: the template is asked to write a call, and what stands around its name and arguments is the form.
Most templates write JSON of both, or a name and JSON; others each argument between words, as `<parameter=city>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Final

from surogate_core.errors import ConfigError

from ..data.chat.template import ChatTemplate

_ID: Final = "abcdefghi"  # Mistral's templates require nine characters
_NAME: Final = "some_function"
_GIVEN: Final = {"some_key": "some_value", "other_key": "other_value"}
_CUT_TAG: Final = re.compile(r"[<\[][^<>\[\]\s]*\Z")
_ASKED: Final = {"role": "user", "content": "a"}


@dataclass(frozen=True)
class Call:
    """A call of a function."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        given = ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.arguments.items())
        return f"{self.name}({given})"


@dataclass(frozen=True)
class CallForm:
    """The form in which a chat template writes calls. marker: the text in front of one; "": the answer begins with it.

    find: (text, position) -> the calls there and where they end; None if there is none.
    """

    marker: str
    find: Callable[[str, int], tuple[list[Call], int] | None]

    def read(self, text: str) -> tuple[str, list[Call]]:
        """Return the text of an answer in front of its calls, and the calls; all of it, and none, if it has none."""
        at = text.find(self.marker) if self.marker else len(text) - len(text.lstrip())
        content, calls = text[: max(at, 0)], list[Call]()
        while at >= 0 and (found := self.find(text, at + len(self.marker))):
            calls += found[0]
            at = text.find(self.marker, found[1]) if self.marker else -1
        return (content.rstrip(), calls) if calls else (text, [])

    def shown(self, text: str) -> int:
        """Return how many characters of an unfinished answer are certain to be no part of a call."""
        if not self.marker:
            return 0 if text.lstrip()[:1] in ("", "{", "[") else len(text)
        if (at := text.find(self.marker)) >= 0:
            return at
        for size in range(min(len(self.marker) - 1, len(text)), 0, -1):
            if self.marker.startswith(text[len(text) - size :]):
                return len(text) - size
        return len(text)


def message_of(content: str, calls: Sequence[Call]) -> dict[str, Any]:
    """Return an answer as a message of a conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [_call(call.name, call.arguments, f"call{i:05}") for i, call in enumerate(calls)]
    return message


def _call(name: str, arguments: Mapping[str, Any], id: str = _ID) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def call_form(template: ChatTemplate, tools: Sequence[Any]) -> CallForm | None:
    """Return how a template writes calls; None if it writes none, or in a form that cannot be read back."""
    answer = {"role": "assistant", "content": "", "tool_calls": [_call(_NAME, _GIVEN)]}
    try:
        asked, called = template.render([_ASKED], tools, prompt=True), template.render([_ASKED, answer], tools)
        plain = template.render([_ASKED, {"role": "assistant", "content": "c"}], tools)
    except ConfigError:
        return None
    end = plain[plain.rindex("c") + 1 :] if "c" in plain else ""
    common = _CUT_TAG.sub("", shared_start(called, plain))
    written = called[max(len(common), len(asked) * called.startswith(asked)) :].removesuffix(end)
    if not all(word in written for item in ((_NAME, ""), *_GIVEN.items()) for word in item):
        return None
    return _json_form(written) or _named_form(written) or _worded_form(written)


def shared_start(one: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(char for char, _ in same)


# ---------------------------------------------------------------------------------------------------------------- JSON


def _json_form(written: str) -> CallForm | None:
    for start in (match.start() for match in re.finditer(r"[\[{]", written)):
        value = _decoded(written, start)
        first = value[0][0] if value and isinstance(value[0], list) and value[0] else value[0] if value else None
        if keys := _keys(first):
            return CallForm(written[:start].strip(), partial(_find_objects, *keys))
    return None


def _find_objects(name: str, arguments: str, text: str, at: int) -> tuple[list[Call], int] | None:
    """Return the calls at a position: JSON of one, or of a list, with `name` and `arguments` under these keys."""
    found = _decoded(text, at + len(text[at:]) - len(text[at:].lstrip()))
    if found is None:
        return None
    items = found[0] if isinstance(found[0], list) else [found[0]]
    calls = [call for item in items if (call := _of_object(item, name, arguments))]
    return (calls, found[1]) if calls and len(calls) == len(items) else None


def _decoded(text: str, at: int) -> tuple[Any, int] | None:
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _keys(value: Any) -> tuple[str, str] | None:
    """Return the keys of an object under which the name and the arguments are; None if it has not both."""
    if not isinstance(value, dict):
        return None
    name = next((key for key, item in value.items() if item == _NAME), None)
    arguments = next((key for key, item in value.items() if _object(item) == _GIVEN), None)
    return (name, arguments) if name and arguments else None


def _object(value: Any) -> Any:
    """Return arguments, which may be JSON text of an object."""
    if isinstance(value, str) and value.lstrip()[:1] == "{":
        found = _decoded(value.strip(), 0)
        return found[0] if found else value
    return value


def _of_object(value: Any, name: str, arguments: str) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        return None
    given = _object(value.get(arguments, {}))
    return Call(value[name], given) if isinstance(given, dict) else None


def _named_form(written: str) -> CallForm | None:
    """Return the form of `[TOOL_CALLS]NAME[ARGS]{...}`: the name by itself, and JSON of the arguments."""
    before, _, after = written.partition(_NAME)
    start = after.find("{")
    if not before.strip() or start < 0 or (_decoded(after, start) or [None])[0] != _GIVEN:
        return None
    between = r"[\w-]*".join(_spaced(part) for part in after[:start].split(_ID))
    head = re.compile(rf"\s*([\w.:/-]+?){between}", re.DOTALL)

    def find(text: str, at: int) -> tuple[list[Call], int] | None:
        match = head.match(text, at)
        found = _decoded(text, match.end()) if match else None
        if match is None or found is None or not isinstance(found[0], dict):
            return None
        return [Call(match[1], found[0])], found[1]

    return CallForm(before.strip(), find)


# --------------------------------------------------------------------------------------------------------------- words


def _worded_form(written: str) -> CallForm | None:
    """Return the form of `<function=NAME><parameter=KEY>VALUE</parameter>...`, from a call with two arguments."""
    parts = _split(written, [_NAME, *(word for item in _GIVEN.items() for word in item)])
    if parts is None:
        return None
    before, after_name, in_first, between, in_second, after = parts
    marker = before.strip()
    if not marker or in_first != in_second or not in_first.strip():
        return None
    head = re.compile(rf"\s*([\w.:/-]+?){_spaced(after_name)}", re.DOTALL)
    last = _spaced(after) if after.strip() else r"\s*\Z"
    item = re.compile(rf"(.+?){_spaced(in_first)}(.*?)(?:({_spaced(between)})|{last})", re.DOTALL)

    def find(text: str, at: int) -> tuple[list[Call], int] | None:
        match = head.match(text, at)
        if match is None:
            return None
        name, given, goes_on = match[1], dict[str, Any](), True
        while goes_on:
            match = item.match(text, match.end())
            if match is None:
                return None
            value = _decoded(match[2].strip(), 0)
            whole = value is not None and value[1] == len(match[2].strip())
            given[match[1].strip()] = value[0] if value is not None and whole else match[2].strip()
            goes_on = match[3] is not None
        return [Call(name, given)], match.end()

    return CallForm(marker, find)


def _split(text: str, words: Sequence[str]) -> list[str] | None:
    """Return what stands before, between and after words in their order; None if one is not there."""
    parts = []
    for word in words:
        part, found, text = text.partition(word)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _spaced(text: str) -> str:
    """Return a pattern of a text with any white space around it."""
    return rf"\s*{re.escape(text.strip())}\s*"
