"""Where an answer is in a rendered conversation: what the model must produce after the prompt that inference gives it.

The answer begins where the prompt ends, and the prompt is the rendering of the messages before it with
`add_generation_prompt`, as a server makes it. Most templates begin the rendering of the whole conversation with that
text. Some write earlier messages differently in a longer conversation; there, what follows the last message before the
answer is compared. A prompt that opens a think block may be missing from an answer of which the template drops the
reasoning; such an answer begins where the think block would.

The answer ends with the token that ends its turn: the first added token after what it says. What it says is found by
rendering the conversation again with a marker in its place: as its text, or in the names of its tool calls.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ConfigError
from .chat_template import ChatTemplate, Message, Span

MARK_ANSWERS = "Mark the answers in the template by {% generation %} ... {% endgeneration %}."

# A think block that a prompt opens, and may close again: "<think>\n", "<think>\n\n</think>\n\n", "[THINK]".
_THINK_BLOCK = re.compile(r"(?:[<\[][^\s<>\[\]]*(?:think|thought|reason)[^\s<>\[\]]*[>\]]\s*)+\Z", re.IGNORECASE)


class NotWritten(Exception):
    """The template drops an answer, or a part of it that training needs. The message says which, without quoting it."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation and its rendering. added: texts of the tokenizer's added tokens, of which one ends a turn."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    template: ChatTemplate
    added: Sequence[str]
    text: str

    def answer(self, index: int) -> tuple[Span, str]:
        """The characters of the answer that is message `index`, and the token at its end.

        Raises NotWritten when the template drops it, and ConfigError when its place cannot be told.
        """
        start = self._start(index)
        return self._calls(index, start) if self.messages[index].get("tool_calls") else self._said(index, start)

    @cached_property
    def marker(self) -> str:
        """Text that is not in the rendering."""
        marker = "\ue000\ue001"
        while marker in self.text:
            marker += "\ue001"
        return marker

    # ------------------------------------------------------------------------------------------------- where it begins

    def _start(self, index: int) -> int:
        prompt = self._attempt(self.messages[:index], prompt=True)
        if prompt is not None and self.text.startswith(prompt):
            return len(prompt)
        for before in range(index - 1, -1, -1):  # past messages that the template does not write
            start = self._start_after(before, index)
            if start is not None:
                return start
        if index == 0:  # few templates can write a prompt without a message
            header = self.template.generation_prompt(self.tools)
            at = self.text.find(header)
            if header and at >= 0:
                return at + len(header)
        given = self.text[:60] if prompt is None else prompt[-60:]
        raise ConfigError(f"{self._name(index)} does not begin with the generation prompt: {given!r}. {MARK_ANSWERS}")

    def _start_after(self, before: int, index: int) -> int | None:
        """Where answer `index` begins, told by what follows the text of message `before`; None: cannot be told."""
        messages = list(self.messages)
        messages[before] = {**messages[before], "content": self.marker}
        whole, prompt = self._attempt(messages), self._attempt(messages[:index], prompt=True)
        if whole is None or prompt is None or whole.count(self.marker) != 1 or prompt.count(self.marker) != 1:
            return None
        following, given = whole.partition(self.marker)[2], prompt.partition(self.marker)[2]
        if not self.text.endswith(following):
            return None
        think = _THINK_BLOCK.search(given)
        for header in (given, given[: think.start()] if think else given):
            if following.startswith(header):
                return len(self.text) - len(following) + len(header)
        return None

    # ---------------------------------------------------------------------------------------------------- where it ends

    def _said(self, index: int, start: int) -> tuple[Span, str]:
        """The span of an answer of text."""
        probe = self._marked(index, {**self.messages[index], "content": self.marker})
        before, found, behind = probe.partition(self.marker)
        if not found:
            raise NotWritten("the chat template does not write the text of an answer")
        if self.marker in behind:
            raise ConfigError(f"{self._name(index)} does not appear once in the rendered text. {MARK_ANSWERS}")
        after = self._after_what_it_says(index, start, before, behind)
        end = self._token_at(behind)
        if end is None:
            raise ConfigError(
                f"{self._name(index)} is followed by {behind[:30]!r}, not by a special token. The model would not "
                "learn to end its turn: use a template that ends it, and make its end-of-turn a special token of the "
                "tokenizer."
            )
        return self._closed(index, start, after + behind.index(end) + len(end), end)

    def _calls(self, index: int, start: int) -> tuple[Span, str]:
        """The span of an answer with tool calls."""
        message = self.messages[index]
        named = [_renamed(call, self.marker) for call in message["tool_calls"]]
        probe = self._marked(index, {**message, "tool_calls": named})
        before, found, behind = probe.rpartition(self.marker)
        if not found:
            raise NotWritten("the chat template does not write the tool calls of an answer")
        after = self._after_what_it_says(index, start, before.partition(self.marker)[0], behind)
        end = self._end_of_turn(index)
        alone = self.template.render([*self.messages[:index], {**message, "tool_calls": named}], self.tools)
        rest, found, _ = alone.rpartition(self.marker)[2].partition(end)
        if not found:
            raise NotWritten("the chat template does not end the turn after tool calls")
        if not behind.startswith(rest + end):
            raise ConfigError(f"{self._name(index)}: the end of its turn depends on what follows. {MARK_ANSWERS}")
        return self._closed(index, start, after + len(rest) + len(end), end)

    def _marked(self, index: int, message: Message) -> str:
        """The conversation with this message in place of answer `index`."""
        return self.template.render([*self.messages[:index], message, *self.messages[index + 1 :]], self.tools)

    def _after_what_it_says(self, index: int, start: int, before: str, behind: str) -> int:
        """Where in the text what the answer says is over; `before` and `behind` it in the rendering with the marker."""
        after = len(self.text) - len(behind)
        shared = min(
            start, len(before)
        )  # a prompt that opens a think block holds the beginning of what some answers say
        if not self.text.endswith(behind) or after < start or before[:shared] != self.text[:shared]:
            raise ConfigError(f"{self._name(index)}: the text around it depends on what it says. {MARK_ANSWERS}")
        return after

    def _end_of_turn(self, index: int) -> str:
        """The token that ends an answer of text in place of answer `index`."""
        said = {"role": "assistant", "content": self.marker}
        text = self.template.render([*self.messages[:index], said], self.tools)
        end = self._token_at(text.partition(self.marker)[2])
        if end is None:
            raise NotWritten("the chat template does not end the turn after tool calls")
        return end

    def _token_at(self, text: str) -> str | None:
        """The added token that `text` begins with after white space; None: there is none."""
        space = len(text) - len(text.lstrip())
        return max((token for token in self.added if text.startswith(token, space)), key=len, default=None)

    def _closed(self, index: int, start: int, stop: int, end: str) -> tuple[Span, str]:
        if end in self.text[start : stop - len(end)]:
            raise ConfigError(
                f"{self._name(index)} holds the end-of-turn token {end} in its text: {self.text[start:stop][:60]!r}. "
                "Remove it there: the template writes it."
            )
        return (start, stop), end

    def _attempt(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        """The rendering; None when the template refuses these messages."""
        try:
            return self.template.render(messages, self.tools, prompt=prompt)
        except ConfigError:
            return None

    def _name(self, index: int) -> str:
        return f"{self.template.where}: message {index} (assistant)"


def _renamed(call: Message, marker: str) -> dict[str, Any]:
    """The call with the marker at the end of its function's name."""
    return {**call, "function": {**call["function"], "name": call["function"]["name"] + marker}}
