"""The training mask of a rendered conversation: the answers are trained, each with its end-of-turn token.

If the template marks `{% generation %}` blocks, these are the answers, without the prompt. Otherwise `answer_span`
finds each answer: everything that the model must produce after the inference prompt, with reasoning and tool calls as
the template writes them, and an empty think block if it writes one. No assumption is made about the format. A row is
left out if the template drops an answer or a part of it, or if the span of an answer cannot be determined.

An answer is not trained if the template drops its reasoning but writes the reasoning of another answer of the same
conversation. Such templates remove the reasoning of earlier rounds: at inference the model reads such answers but
never writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from surogate_core.api import Encoded, Omission
from surogate_core.errors import ConfigError

from .answer_span import MARK_ANSWERS, RenderedChat, Untrainable
from .forms import other_forms, refuse_second_block
from .omissions import check_answer, omissions, split_reasoning, writes_reasoning
from .template import Message, Span
from .token_spans import encode_spans

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

LossScale = Literal["default", "last_round", "all"]
ConversationScale = Literal["default", "last_round", "completion", "all"]


def encode_chat(
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    tokenizer: Tokenizer,
    loss_scale: ConversationScale,
    untrained: Collection[int] = (),
    *,
    prompt: int = 0,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> Encoded:
    """Return the tokens of the rendered conversation and which of them are trained.

    loss_scale: "default": every answer, except those that lose their reasoning as described above; "last_round": the
    answers after the last message of the user; "completion": those after the first `prompt` messages; "all": every
    token. untrained: indices of answers that are never trained. template_kwargs: values of variables of the template.
    If the template drops an answer, or the span of one cannot be determined, the result has no tokens and
    `left_out` says why. Raises ConfigError if the template refuses the messages, or does not end an answer.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"the tokenizer in {tokenizer.directory} has no chat template. Put the chat_template.jinja of the chat "
            "model of the same family into that folder, or train on plain text (type: text)."
        )
    template = template.with_variables(template_kwargs)
    wanted = [index for index in _chosen(messages, loss_scale, prompt) if index not in untrained]
    if not wanted:
        return Encoded((), (), left_out="a key such as weight, train or loss excludes every answer from training")
    text = template.render(messages, tools)
    chat = RenderedChat(messages, tools, template, tokenizer.added_texts, tokenizer.special_texts, text)
    try:
        if loss_scale == "all":
            spans = _all_but(chat, [index for index in _answers(messages) if index in untrained])
            for index in wanted:
                check_answer(messages[index], chat.text)
            trained, lost = wanted, _dropped_reasoning(chat, {})
        else:
            found = _spans(chat, wanted)
            for index, (start, _) in found.items():
                refuse_second_block(chat, index, start)
            trained = _without_dropped_reasoning(chat, found) if loss_scale == "default" else wanted
            spans = [found[index] for index in trained]
            forms = other_forms(chat, {index: found[index] for index in trained})
            lost = [*_dropped_reasoning(chat, found), *_not_trained(found, trained), *forms]
    except Untrainable as reason:
        return Encoded((), (), left_out=str(reason))
    encoded = encode_spans(chat.text, spans, tokenizer)
    return Encoded(encoded.tokens, encoded.trained, omissions=(*lost, *omissions(chat, wanted)))


def _answers(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _chosen(messages: Sequence[Message], loss_scale: ConversationScale, prompt: int) -> list[int]:
    indices = _answers(messages)
    if not indices:
        raise ConfigError("the conversation has no message of the assistant, so nothing is trained. Remove such rows.")
    if loss_scale == "completion":
        indices = [index for index in indices if index >= prompt]
        if not indices:
            raise ConfigError(
                "no message of the assistant follows the prompt, so nothing is trained. Remove such rows."
            )
    if loss_scale == "last_round":
        last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        indices = [index for index in indices if index > last_user]
        if not indices:
            raise ConfigError(
                "no message of the assistant follows the last message of the user, so loss_scale: last_round trains "
                "nothing. Remove such rows, or use loss_scale: default."
            )
    return indices


def _spans(chat: RenderedChat, wanted: Sequence[int]) -> dict[int, Span]:
    """Return {index: span} of the wanted answers. Raises Untrainable if a span lacks a part of its answer."""
    if chat.template.marks_generation(chat.tools):
        return _marked_spans(chat, wanted)
    spans = {}
    for index in wanted:
        span, end = chat.answer(index)
        check_answer(chat.messages[index], chat.written(span, end))
        spans[index] = span
    for (_, stop), (start, _) in itertools.pairwise(spans.values()):
        if start < stop:
            raise Untrainable("two answers overlap in the rendered text", MARK_ANSWERS)
    return spans


def _marked_spans(chat: RenderedChat, wanted: Sequence[int]) -> dict[int, Span]:
    """As `_spans`, from the `{% generation %}` blocks: the template must write one per answer, in order."""
    _, blocks = chat.template.render_spans(chat.messages, chat.tools)
    answers = _answers(chat.messages)
    if len(blocks) > len(answers):
        blocks = _with_text(chat, blocks)
    if len(blocks) != len(answers):
        raise Untrainable(
            "the template marks another number of {% generation %} blocks than there are answers, so the blocks cannot "
            "be assigned to messages",
            "Write one block for each",
        )
    spans = {}
    for index, block in zip(answers, blocks, strict=True):
        if index in wanted:
            span, end = _checked_block(chat, chat.within(index, block))
            check_answer(chat.messages[index], chat.written(span, end))
            spans[index] = span
    return spans


def _with_text(chat: RenderedChat, blocks: Sequence[Span]) -> list[Span]:
    """Return the blocks of answers. A block of added tokens alone, such as a last eos, continues the answer before it.

    It is not trained if other text is between them: no answer ends there.
    """
    found: list[Span] = []
    for start, stop in blocks:
        rest = chat.text[start:stop]
        for token in sorted(chat.added, key=len, reverse=True):
            rest = rest.replace(token, "")
        if rest.strip():
            found.append((start, stop))
        elif found and not chat.text[found[-1][1] : start].strip():
            found[-1] = (found[-1][0], stop)
    return found


def _checked_block(chat: RenderedChat, span: Span) -> tuple[Span, str]:
    """Return the span of a `{% generation %}` block up to its end-of-turn token, and that token."""
    start, stop = span
    block = chat.text[start:stop].rstrip()
    end = max((token for token in chat.added if block.endswith(token)), key=len, default=None)
    if end is None:
        raise ConfigError(
            f"{chat.template.where}: a {{% generation %}} block ends without a special token: {block[-40:]!r}. The "
            "model would not learn to end its turn: put the end-of-turn token inside the block."
        )
    return (start, start + len(block)), end


def _all_but(chat: RenderedChat, untrained: Sequence[int]) -> list[Span] | None:
    """Return the spans outside the given answers; None if there are none: all text is trained."""
    if not untrained:
        return None
    cuts = [0, *(at for span in _spans(chat, untrained).values() for at in span), len(chat.text)]
    return [(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True) if start < stop]


def _without_dropped_reasoning(chat: RenderedChat, spans: dict[int, Span]) -> list[int]:
    """Return the answers to train: those that lose their reasoning are excluded, unless all answers lose it."""
    reasoning = [index for index in spans if split_reasoning(chat.messages[index])[0]]
    kept = [index for index in reasoning if _keeps_reasoning(chat, index, spans)]
    return [index for index in spans if not kept or index in kept or index not in reasoning]


def _keeps_reasoning(chat: RenderedChat, index: int, spans: dict[int, Span]) -> bool:
    start, stop = spans.get(index, (0, len(chat.text)))
    return writes_reasoning(chat.messages[index], chat.text[start:stop])


def _dropped_reasoning(chat: RenderedChat, spans: dict[int, Span]) -> list[Omission]:
    reasoning = [index for index in _answers(chat.messages) if split_reasoning(chat.messages[index])[0]]
    dropped = sum(not _keeps_reasoning(chat, index, spans) for index in reasoning)
    if not reasoning:
        return []
    why = "the chat template does not write it"
    return [Omission("the reasoning", "answers with reasoning", why, dropped, len(reasoning))]


def _not_trained(found: dict[int, Span], trained: Sequence[int]) -> list[Omission]:
    count = len(found) - len(trained)
    why = (
        "the template drops their reasoning but keeps that of a later answer, and the model never writes such answers. "
        "To train each with its reasoning, end a row after it"
    )
    return [Omission("the training", "answers", why, count, len(found))] if count else []
