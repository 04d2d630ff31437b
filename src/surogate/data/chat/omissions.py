"""The parts of a conversation that are missing from its rendering.

A template may skip roles, tools, tool calls, reasoning and any other key of a message without an error. A part counts
as written if it passes two checks: when the conversation is rendered again with a marker in place of each text, the
marker appears; and the text itself is in the rendering, verbatim or as JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surogate_core.api import Omission

from .answer_span import RenderedChat, Untrainable
from .template import Message

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that hold reasoning. transformers passes the first one present to templates under all names."""

# Ids pair results with calls in a program. Templates that do not write them rely on the order.
_KNOWN_KEYS = ("role", "content", "tool_calls", "tool_call_id", *REASONING_KEYS)
_KNOWN_CALL_KEYS = ("id", "type", "function")
_WHY = "the chat template does not write it"


def check_answer(message: Message, answer: str) -> None:
    """Raise Untrainable unless `answer`, without its end-of-turn token, holds the message's text and each tool call."""
    _, said = split_reasoning(message)
    if not answer.strip():
        raise Untrainable("the chat template leaves an answer empty")
    if not appears(said, answer):
        raise Untrainable("the chat template does not write the text of an answer unchanged")
    for call in message.get("tool_calls") or ():
        function = call["function"]
        if not appears(function["name"], answer):
            raise Untrainable("the chat template does not write the tool calls of an answer")
        if not all(appears(text, answer) for text in _texts(function["arguments"])):
            raise Untrainable("the chat template does not write the arguments of a tool call")
    if _thinks_twice(message, answer):
        raise Untrainable(
            "the reasoning of an answer is in a key of its own and in its content, and the chat template writes both",
            "Remove one of them",
        )
    if not said and not message.get("tool_calls") and not writes_reasoning(message, answer):
        raise Untrainable("the chat template does not write the reasoning of an answer that has nothing else")


def split_reasoning(message: Message) -> tuple[str, str]:
    """Return (reasoning, rest of the text) of an answer, both stripped of white space."""
    content = message.get("content") or ""
    thought, closed, said = content.rpartition("</think>")
    inside = thought.partition("<think>")[2] or thought
    keys = [message[key] for key in REASONING_KEYS if isinstance(message.get(key), str)]
    return ((keys[0] if keys else inside).strip(), said.strip()) if closed or keys else ("", content.strip())


def _thinks_twice(message: Message, answer: str) -> bool:
    thought, closed, _ = (message.get("content") or "").rpartition("</think>")
    inside = (thought.partition("<think>")[2] or thought).strip()
    own, _ = split_reasoning(message)
    keys = any(isinstance(message.get(key), str) and message[key].strip() for key in REASONING_KEYS)
    if not (closed and keys and inside in answer and appears(own, answer)):
        return False
    return (own not in inside and inside not in own) or answer.count(min(own, inside, key=len)) > 1


def writes_reasoning(message: Message, text: str) -> bool:
    return appears(split_reasoning(message)[0], text)


def appears(value: str, text: str) -> bool:
    """Return whether the stripped `value` is in `text`: verbatim, as JSON, or as JSON inside JSON."""
    value = value.strip()
    for _ in range(3):
        if value in text:
            return True
        value = json.dumps(value, ensure_ascii=False)[1:-1]
    return False


def omissions(chat: RenderedChat, trained: Sequence[int]) -> list[Omission]:
    """Return what is missing from the rendering. Of the answers `trained`, whose text is checked before, only keys."""
    skeleton = _skeleton(chat)
    found = _missing_texts(chat, trained, skeleton)
    if chat.tools:
        found += _missing_tools(chat.tools, chat.text, skeleton)
    return [*found, *_missing_keys(chat), *_missing_call_keys(chat)]


def _mark(chat: RenderedChat, index: int) -> str:
    return f"{chat.marker}{index}\ue002"


def _skeleton(chat: RenderedChat) -> str | None:
    """Render the conversation with a marker in place of every text; None if the template refuses that."""
    marked = []
    for index, message in enumerate(chat.messages):
        text = _mark(chat, index)
        new = {**message, "content": text} if (message.get("content") or "").strip() else dict(message)
        if new.get("tool_calls"):
            new["tool_calls"] = [{**call, "function": {**call["function"], "name": text}} for call in new["tool_calls"]]
        marked.append(new)
    return chat.attempt(marked)


def _missing_texts(chat: RenderedChat, trained: Sequence[int], skeleton: str | None) -> list[Omission]:
    """Count the messages whose text is missing, by role; of answers that are not trained, text and calls."""
    missing: Counter[str] = Counter()
    roles = Counter(message["role"] for message in chat.messages)
    for index, message in enumerate(chat.messages):
        texts = [split_reasoning(message)[1] if message["role"] == "assistant" else message.get("content") or ""]
        texts += [call["function"]["name"] for call in message.get("tool_calls") or ()]
        if index in trained or not any(text.strip() for text in texts):
            continue
        marked = skeleton is None or _mark(chat, index) in skeleton
        if not marked or not all(appears(text, chat.text) for text in texts):
            missing[message["role"]] += 1
    why = "the chat template does not write it, or only a part"
    return [Omission("the text", f"messages with role {role}", why, n, roles[role]) for role, n in missing.items()]


def _missing_tools(tools: Sequence[Any], text: str, skeleton: str | None) -> list[Omission]:
    if any(not appears(_tool_name(tool), text if skeleton is None else skeleton) for tool in tools):
        return [Omission("tools", "rows with tools", _WHY)]
    if not all(appears(leaf, text) for leaf in _texts(list(tools))):
        return [Omission("a part of the tools", "rows with tools", _WHY)]
    return []


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str((function if isinstance(function, Mapping) else tool).get("name", ""))


def _missing_keys(chat: RenderedChat) -> list[Omission]:
    """Count the keys of messages whose removal leaves the rendering unchanged."""
    given = [(n, key) for n, message in enumerate(chat.messages) for key in message if key not in _KNOWN_KEYS]
    if not given:
        return []

    def without(places: Sequence[tuple[int, str]]) -> str | None:
        kept = enumerate(chat.messages)
        return chat.attempt([{key: m[key] for key in m if (n, key) not in places} for n, m in kept])

    if without(given) != chat.text:
        given = [place for place in given if without([place]) == chat.text]
    counts = Counter(key for _, key in given)
    return [
        Omission(f"the key {key!r}", "messages", _WHY, count, sum(key in message for message in chat.messages))
        for key, count in counts.items()
    ]


def _missing_call_keys(chat: RenderedChat) -> list[Omission]:
    calls = [call for message in chat.messages for call in message.get("tool_calls") or ()]
    missing: Counter[str] = Counter()
    for call in calls:
        keys = (key for key in call if key not in _KNOWN_CALL_KEYS)
        missing.update(key for key in keys if not all(appears(text, chat.text) for text in _texts(call[key])))
    return [Omission(f"the key {key!r}", "tool calls", _WHY, n, len(calls)) for key, n in missing.items()]


def _texts(value: Any) -> Iterator[str]:
    """Yield the leaves of a JSON value as text, except null, true and false, whose spelling differs by language."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)
