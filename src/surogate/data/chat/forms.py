"""Answers that a conversation has in another form than a server would ask for them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from surogate_core.api import Omission

from .answer_span import RenderedChat, Untrainable
from .omissions import REASONING_KEYS, split_reasoning
from .template import Span

_EMPTY_BLOCK = re.compile(
    r"\s*[<\[]([^\s<>\[\]/]*(?:think|thought|reason)[^\s<>\[\]]*)[>\]]\s*[<\[]/\1[>\]]", re.IGNORECASE
)
_LAST_ROUND = "end a row after each answer, and set loss_scale: last_round"
_WHY_PROMPT = (
    "the chat template writes other text before them in the conversation, such as none of its think block. Give "
    "answers their reasoning, set chat_template_kwargs to what the server gets (such as preserve_thinking: true), or "
    f"{_LAST_ROUND}"
)
_WHY_FORMS = (
    "the chat template writes it in other answers of the same conversation, so the model learns both forms. To train "
    f"one, {_LAST_ROUND}. chat_template_kwargs (such as enable_thinking: false) may make the block a part of the prompt"
)


def refuse_second_block(chat: RenderedChat, index: int, start: int) -> None:
    """Raise Untrainable if the template writes a think block in front of the one in the content of answer `index`.

    Such templates read reasoning in a key of its own alone (Qwen3.8), and would teach a model to think behind an empty
    block. start: of the answer.
    """
    content = (chat.messages[index].get("content") or "").strip()
    if "</think>" not in content or any(isinstance(chat.messages[index].get(key), str) for key in REASONING_KEYS):
        return
    at = chat.text.find(content, start)
    if at >= 0 and chat.text[:at].rstrip().endswith("</think>"):
        raise Untrainable(
            "an answer has its reasoning in its content, and the chat template writes a think block of its own before",
            f"Move the reasoning into the key {REASONING_KEYS[0]}",
        )


def other_forms(chat: RenderedChat, trained: Mapping[int, Span]) -> list[Omission]:
    """Count the trained answers that do not follow the prompt of a server, and those without the think block of others.

    Neither is missing from the row, but a model that is asked as usual does not write such an answer there.
    """
    if not trained:
        return []
    differing = sum(not chat.follows_prompt(index, start) for index, (start, _) in trained.items())
    found = [Omission("the prompt of a server", "answers", _WHY_PROMPT, differing, len(trained))]
    plain = [
        chat.text[start:stop]
        for index, (start, stop) in trained.items()
        if not split_reasoning(chat.messages[index])[0]
    ]
    blocks = sum(_EMPTY_BLOCK.match(text) is not None for text in plain)
    if blocks:
        without = len(plain) - blocks
        found.append(Omission("the empty think block", "answers without reasoning", _WHY_FORMS, without, len(plain)))
    return found
