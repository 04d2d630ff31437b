"""The turns of a chat template: what it writes before, between and after messages, found by rendering conversations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle

Message = Mapping[str, str]
Render = Callable[[Sequence[Message]], str]
"""Renders messages up to where the answer begins. Raises if the template refuses them."""

SYSTEM, USER, ANSWER = "Setting", "Question", "Reply"


@dataclass(frozen=True)
class Turns:
    """A chat template without tools and thinking.

    start      before the first question, without a system message
    system     before and after a system message; None: the template has no place for one at the start
    answer     between a question and its answer
    question   between an answer and the next question
    last       after the last question
    """

    start: str
    system: tuple[str, str] | None
    answer: str
    question: str
    last: str

    def render(self, messages: Sequence[Message]) -> str:
        """Return the text of messages that end with a question."""
        text, rest = self.start, list(messages)
        if rest[0]["role"] == "system":
            assert self.system is not None
            text, rest = self.system[0] + rest[0]["content"] + self.system[1], rest[1:]
        for message in rest[:-1]:
            text += message["content"] + (self.answer if message["role"] == "user" else self.question)
        return text + rest[-1]["content"] + self.last


def conversation(turns: int, system: bool = False) -> list[Message]:
    """Return a conversation whose contents are told apart by their numbers."""
    roles = zip(cycle((("user", USER), ("assistant", ANSWER))), range(turns), strict=False)
    messages = [{"role": role, "content": f"{text}{number}"} for (role, text), number in roles]
    return [*([{"role": "system", "content": SYSTEM}] if system else []), *messages]


def turns_of(render: Render) -> Turns | None:
    """Return the turns of a template, or None if no such turns say what it does."""
    try:
        found = read_turns(render)
    except Exception:  # of any class: the template decides
        return None
    if found is None or any(found.render(conversation(n)) != render(conversation(n)) for n in (1, 3, 5)):
        return None
    return Turns(found.start, system_of(render, found), found.answer, found.question, found.last)


def read_turns(render: Render) -> Turns | None:
    """Return what stands around the messages of a conversation of three."""
    text = render(conversation(3))
    parts = between(text, [message["content"] for message in conversation(3)])
    return Turns(parts[0], None, *parts[1:]) if parts else None


def system_of(render: Render, turns: Turns) -> tuple[str, str] | None:
    """Return what stands around a system message, if it is at the start and changes nothing else."""
    try:
        parts = between(render(conversation(1, system=True)), [SYSTEM, f"{USER}0"])
        if parts is None:
            return None
        system = parts[0], parts[1]
        found = Turns(turns.start, system, turns.answer, turns.question, turns.last)
        same = all(found.render(c) == render(c) for c in (conversation(n, system=True) for n in (1, 3, 5)))
    except Exception:  # some templates refuse a system message
        return None
    return system if same else None


def between(text: str, contents: Sequence[str]) -> list[str] | None:
    """Return what stands before, between and after contents, or None if they are not in this order, once each."""
    parts = []
    for content in contents:
        before, found, text = text.partition(content)
        if not found:
            return None
        parts.append(before)
    return [*parts, text]
