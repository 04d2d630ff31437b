"""The span of an answer in a rendered conversation: the characters that the model must produce at inference.

Start: the answer starts where the prompt ends, also inside of a `{% generation %}` block that begins with the prompt.
The prompt is the rendering of the preceding messages with `add_generation_prompt`, as an inference server renders it.
For most templates the rendering of the whole conversation starts with the prompt. Some templates write earlier
messages differently in a longer conversation; for them, the text after the last message before the answer is compared
instead, and if it differs in white space only, the answer starts after the header that `add_generation_prompt` adds.
If the prompt opens a think block and the template drops the reasoning of the answer, the answer starts where the think
block would be.

End: the answer ends with its end-of-turn token, the first added token after the content. The content is located by
rendering the conversation again with a marker in its place: as the text of the message, or in the names of its tool
calls. Calls end with the token that ends text, or, as with gpt-oss, with a special token of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from surogate_core.errors import ConfigError

from .template import ChatTemplate, Message, RenderEnded, Span

MARK_ANSWERS = "Mark the answers in the template by {% generation %} ... {% endgeneration %}"
OTHER_TEMPLATE = "To train such rows, put another chat_template.jinja into the model's folder"

# A think block that a prompt opens and may also close: "<think>\n", "<think>\n\n</think>\n\n", "[THINK]".
_THINK_BLOCK = re.compile(r"(?:[<\[][^\s<>\[\]]*(?:think|thought|reason)[^\s<>\[\]]*[>\]]\s*)+\Z", re.IGNORECASE)


class Untrainable(Exception):
    """A row that cannot be trained with this template. The message says why, without quoting the row, and what helps.

    The template drops an answer or a part of it that training needs, or the span of an answer cannot be determined.
    """

    def __init__(self, why: str, remedy: str = OTHER_TEMPLATE) -> None:
        super().__init__(f"{why}. {remedy}")


@dataclass(frozen=True)
class RenderedChat:
    """A conversation and its rendering.

    added: texts of the tokenizer's added tokens; one of them ends a turn. special: those of them that are no text.
    """

    messages: Sequence[Message]
    tools: Sequence[Any] | None
    template: ChatTemplate
    added: Sequence[str]
    special: Sequence[str]
    text: str
    _prompts: dict[int, str | None] = field(default_factory=dict)

    def answer(self, index: int) -> tuple[Span, str]:
        """Return the span of the answer in message `index`, and its end-of-turn token.

        Raises Untrainable if the template drops the answer, or if its span cannot be determined. Raises ConfigError if
        no special token ends the turn, or if the answer contains the token that does.
        """
        start = self._start(index)
        return (
            self._calls_span(index, start) if self.messages[index].get("tool_calls") else self._text_span(index, start)
        )

    def written(self, span: Span, end: str) -> str:
        """Return an answer without its end of turn, with the think block that the prompt opens before it."""
        think = _THINK_BLOCK.search(self.text, max(0, span[0] - 60), span[0])
        return self.text[think.start() if think else span[0] : span[1] - len(end)]

    def within(self, index: int, block: Span) -> Span:
        """Return what the model must produce of answer `index`'s `{% generation %}` block: without the prompt."""
        start, stop = block
        end = self._prompt_stop(index)
        if end is not None and start < end < stop:
            return end, stop
        headers = _headers(self.template.generation_prompt(self.tools))
        return next((start + len(header) for header in headers if self.text.startswith(header, start)), start), stop

    def follows_prompt(self, index: int, start: int) -> bool:
        """Return whether the text before answer `index`, which starts at `start`, is the prompt of a server.

        White space may differ. True as well if the template makes no prompt of the messages before.
        """
        prompt = self._prompt(index) if index else None
        return prompt is None or _same(prompt, self.text[:start])

    @cached_property
    def marker(self) -> str:
        """A text that does not occur in the rendering."""
        marker = "\ue000\ue001"
        while marker in self.text:
            marker += "\ue001"
        return marker

    # ---------------------------------------------------------------------------------------------------------- start

    def _start(self, index: int) -> int:
        stop = self._prompt_stop(index)
        if stop is not None:
            return stop
        for before in range(index - 1, -1, -1):  # skip messages that the template does not write
            start = self._start_after(before, index)
            if start is not None:
                return start
        if index == 0:  # few templates can render a prompt without a message
            full, *shorter = _headers(self.template.generation_prompt(self.tools))
            header = shorter[0] if shorter else full  # the longer one may stand before a later answer only
            at = self.text.find(header)
            if header and at >= 0:
                return at + len(full if self.text.startswith(full, at) else header)
        raise Untrainable("an answer does not start with the prompt of inference", MARK_ANSWERS)

    def _prompt_stop(self, index: int) -> int | None:
        """Return where the prompt of answer `index` ends; None if the text does not start with it."""
        prompt = self._prompt(index)
        if prompt is None or not self.text.startswith(prompt):
            return None
        # A template that writes the prompt behind the last message writes none where there is no message.
        return len(prompt) if index or prompt.endswith(self.template.generation_prompt(self.tools)) else None

    def _prompt(self, index: int) -> str | None:
        """Return what a server renders before it asks for answer `index`; None if the template refuses that."""
        if index not in self._prompts:
            self._prompts[index] = self.attempt(self.messages[:index], prompt=True)
        return self._prompts[index]

    def _start_after(self, before: int, index: int) -> int | None:
        """Return the start of answer `index`, found by the text after message `before`; None if it cannot be found."""
        messages = list(self.messages)
        messages[before] = {**messages[before], "content": self.marker}
        whole, prompt = self.attempt(messages), self.attempt(messages[:index], prompt=True)
        if whole is None or prompt is None or whole.count(self.marker) != 1 or prompt.count(self.marker) != 1:
            return None
        following, given = whole.partition(self.marker)[2], prompt.partition(self.marker)[2]
        if not self.text.endswith(following):
            return None
        begin = len(self.text) - len(following)
        for header in _headers(given):
            if following.startswith(header):
                return begin + len(header)
        closed = self.attempt(messages[:index])
        if closed is None or not prompt.startswith(closed):
            return None
        for header in _headers(prompt[len(closed) :]):
            at = _header_end(following, closed.partition(self.marker)[2], header)
            if at is not None:
                return begin + at
        return None

    # ------------------------------------------------------------------------------------------------------------ end

    def _text_span(self, index: int, start: int) -> tuple[Span, str]:
        """Return the span and end-of-turn token of an answer without tool calls."""
        probe = self._marked(index, {**self.messages[index], "content": self.marker})
        before, found, following = probe.partition(self.marker)
        if not found:
            raise Untrainable("the chat template does not write the text of an answer")
        if self.marker in following:
            raise Untrainable("the chat template writes an answer more than once", MARK_ANSWERS)
        after = self._content_end(start, before, following)
        end = self._token_at(following)
        if end is None:
            raise ConfigError(
                f"{self._name(index)} is followed by {following[:30]!r}, not by a special token. The model would not "
                "learn to end its turn: use a template that ends it, and make its end-of-turn a special token of the "
                "tokenizer."
            )
        return self._checked(index, start, after + following.index(end) + len(end), end)

    def _calls_span(self, index: int, start: int) -> tuple[Span, str]:
        """Return the span and end-of-turn token of an answer with tool calls."""
        message = self.messages[index]
        named = [_renamed(call, self.marker) for call in message["tool_calls"]]
        probe = self._marked(index, {**message, "tool_calls": named})
        alone = self.template.render([*self.messages[:index], {**message, "tool_calls": named}], self.tools)
        before, *parts = probe.split(self.marker)
        count = alone.count(self.marker)  # some templates write the name again, before the result
        if not 0 < count <= len(parts):
            raise Untrainable("the chat template does not write the tool calls of an answer")
        following = "".join(parts[count - 1 :])
        after = self._content_end(start, before, following)
        last = alone.rpartition(self.marker)[2]
        rest, end = self._end_of_text(index, last, following) or self._own_end(last, following, self.text[start:after])
        return self._checked(index, start, after + len(rest) + len(end), end)

    def _end_of_text(self, index: int, alone: str, following: str) -> tuple[str, str] | None:
        """Return what is written from the name of the last call up to the token that ends text, and that token.

        alone, following: the text after that name, if the calls are the last message and as they are. None if no such
        token is there.
        """
        last, earlier = self._end_of_turn(index), self._end_of_turn(index, {"role": "user", "content": "a"})
        rest, found, _ = alone.partition(last) if last else (alone, "", "")
        if not found:
            return None
        for end in (last, earlier):  # the last message of a conversation may end otherwise
            if end and following.startswith(rest + end):
                return rest, end
        raise Untrainable("the end of an answer's turn depends on what follows", MARK_ANSWERS)

    def _own_end(self, alone: str, following: str, said: str) -> tuple[str, str]:
        """As `_end_of_text`, of the special token that ends calls alone: the last one in both texts.

        said: the answer up to that name.
        """
        pairs = enumerate(zip(alone, following, strict=False))
        shared = alone[: next((at for at, (one, other) in pairs if one != other), len(alone))]
        for at in range(len(shared), 0, -1):
            end = max((token for token in self.special if shared.endswith(token, 0, at)), key=len, default="")
            if end and not self._without_special(alone[at:]).strip() and end not in said:
                return shared[: at - len(end)], end
        raise Untrainable("the chat template does not end the turn after tool calls")

    def _without_special(self, text: str) -> str:
        for token in sorted(self.special, key=len, reverse=True):
            text = text.replace(token, "")
        return text

    def _marked(self, index: int, message: Message) -> str:
        """Render the conversation with `message` in place of answer `index`."""
        return self.template.render([*self.messages[:index], message, *self.messages[index + 1 :]], self.tools)

    def _content_end(self, start: int, before: str, following: str) -> int:
        """Return where the content of the answer ends in `text`.

        before, following: the text around the content in the rendering with the marker.
        """
        after = len(self.text) - len(following)
        # A prompt that opens a think block contains the beginning of some answers.
        shared = min(start, len(before))
        if not self.text.endswith(following) or after < start or before[:shared] != self.text[:shared]:
            raise Untrainable("the text around an answer depends on its content", MARK_ANSWERS)
        return after

    def _end_of_turn(self, index: int, *later: Message) -> str | None:
        """Return the token that would end the turn of a plain text answer at `index`, with these messages after it."""
        said = {"role": "assistant", "content": self.marker}
        text = self.attempt([*self.messages[:index], said, *later]) or ""
        return self._token_at(text.partition(self.marker)[2])

    def _token_at(self, text: str) -> str | None:
        """Return the added token that `text` starts with, after white space; None if there is none."""
        space = len(text) - len(text.lstrip())
        return max((token for token in self.added if text.startswith(token, space)), key=len, default=None)

    def _checked(self, index: int, start: int, stop: int, end: str) -> tuple[Span, str]:
        """Return the span and its end-of-turn token, which must not occur earlier in the span."""
        if end in self.text[start : stop - len(end)]:
            raise ConfigError(
                f"{self._name(index)} contains the end-of-turn token {end}: {self.text[start:stop][:60]!r}. "
                "Remove it from the data: the template writes it."
            )
        return (start, stop), end

    def attempt(self, messages: Sequence[Message], prompt: bool = False) -> str | None:
        """Return the rendering; None if the template refuses these messages."""
        try:
            return self.template.render(messages, self.tools, prompt=prompt)
        except RenderEnded:
            raise
        except ConfigError:
            return None

    def _name(self, index: int) -> str:
        return f"{self.template.where}: message {index} (assistant)"


def _same(one: str, other: str) -> bool:
    """Return whether two texts are equal but for white space."""
    return one == other or "".join(one.split()) == "".join(other.split())


def _headers(prompt: str) -> Iterator[str]:
    """Yield the prompt and, if it opens a think block, the part before that."""
    yield prompt
    think = _THINK_BLOCK.search(prompt)
    if think:
        yield prompt[: think.start()]


def _header_end(text: str, closing: str, header: str) -> int | None:
    """Return where `header` ends in `text` if all before it is `closing` up to white space; None if it is not."""
    wanted = "".join(closing.split())
    at = text.find(header) if header.strip() else -1
    while at >= 0 and "".join(text[:at].split()) != wanted:
        at = text.find(header, at + 1)
    return at + len(header) if at >= 0 else None


def _renamed(call: Message, marker: str) -> dict[str, Any]:
    """Return the call with the marker appended to the name of its function."""
    return {**call, "function": {**call["function"], "name": call["function"]["name"] + marker}}
