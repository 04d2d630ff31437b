"""What of a rendered conversation is trained: the answers, each with the token that ends its turn.

A template that marks `{% generation %}` blocks says it itself. For others, `answer_span` finds each answer: all that
the model has to produce after the prompt that inference gives it, reasoning and tool calls as the template writes them,
and an empty think block where it writes one. Nothing is assumed of the format; where an answer's place cannot be told
the row is refused, and where the template drops an answer, or a part of it, the row is left out.

An answer whose reasoning the template drops, while it writes that of another answer of the same conversation, is not
trained: the template removes the thoughts of earlier rounds, and the model is shown such answers but never writes them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..api import Encoded, Omission
from ..errors import ConfigError
from .answer_span import NotWritten, RenderedChat
from .chat_omissions import check_answer, omissions, split_reasoning, writes_reasoning
from .chat_template import ChatTemplate, Message, Span
from .token_spans import encode_spans

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

LossScale = Literal["default", "last_round", "all"]


def encode_chat(
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    tokenizer: Tokenizer,
    loss_scale: LossScale,
    untrained: Collection[int] = (),
) -> Encoded:
    """Tokens of the rendered conversation and which are trained.

    loss_scale: "default": every answer, but those that lose their reasoning as the module says; "last_round": the
    answers after the last message of the user; "all": every token. `untrained`: indices of answers that are not trained
    in any case. A row whose answers the template drops has no tokens, and `left_out` says why. Raises ConfigError when
    the template refuses the messages, or it cannot be told what is trained.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"the tokenizer in {tokenizer.directory} has no chat template. Put the chat_template.jinja of the chat "
            "model of the same family beside it, or train on plain text (type: text)."
        )
    wanted = [index for index in _chosen(messages, loss_scale) if index not in untrained]
    if not wanted:
        return Encoded((), (), left_out="weight, train or loss says of every answer that it is not trained")
    chat = RenderedChat(messages, tools, template, tokenizer.added_texts, template.render(messages, tools))
    try:
        if loss_scale == "all":
            spans = _all_but(chat, [index for index in _answers(messages) if index in untrained])
            for index in wanted:
                check_answer(messages[index], chat.text)
            trained, told = wanted, _dropped_reasoning(chat, {})
        else:
            found = _spans(chat, wanted)
            trained = _without_lost_thoughts(chat, found) if loss_scale == "default" else wanted
            spans = [found[index] for index in trained]
            told = [*_dropped_reasoning(chat, found), *_passed_over(found, trained)]
    except NotWritten as reason:
        return Encoded((), (), left_out=str(reason))
    encoded = encode_spans(chat.text, spans, tokenizer)
    return Encoded(encoded.tokens, encoded.trained, (*told, *omissions(chat, wanted)))


def _answers(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _chosen(messages: Sequence[Message], loss_scale: LossScale) -> list[int]:
    """Indices of the answers that `loss_scale` trains."""
    indices = _answers(messages)
    if not indices:
        raise ConfigError("no message is the assistant's, so nothing is trained. Remove such rows.")
    if loss_scale == "last_round":
        last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        indices = [index for index in indices if index > last_user]
        if not indices:
            raise ConfigError(
                "no message of the assistant stands behind the last one of the user, so that loss_scale: last_round "
                "trains nothing. Remove such rows, or use loss_scale: default."
            )
    return indices


def _spans(chat: RenderedChat, wanted: Sequence[int]) -> dict[int, Span]:
    """The characters of each wanted answer, by its index; what the answers say is checked to be in them."""
    if chat.template.marks_generation(chat.tools):
        return _marked_spans(chat, wanted)
    spans = {}
    for index in wanted:
        span, end = chat.answer(index)
        check_answer(chat.messages[index], chat.text[span[0] : span[1] - len(end)])
        spans[index] = span
    for (_, stop), (start, _) in itertools.pairwise(spans.values()):
        if start < stop:
            raise ConfigError(
                f"{chat.template.where}: two answers overlap in the rendered text. "
                "Mark the answers in the template by {% generation %} ... {% endgeneration %}."
            )
    return spans


def _marked_spans(chat: RenderedChat, wanted: Sequence[int]) -> dict[int, Span]:
    """The `{% generation %}` blocks of the wanted answers: one block for each answer, in their order."""
    _, blocks = chat.template.render_spans(chat.messages, chat.tools)
    answers = _answers(chat.messages)
    if len(blocks) != len(answers):
        raise ConfigError(
            f"{chat.template.where}: the template marks {len(blocks)} {{% generation %}} blocks for {len(answers)} "
            "messages of the assistant, so that it cannot be told which block is whose. Write one block for each."
        )
    prompt = chat.template.generation_prompt(chat.tools)
    spans = {}
    for index, block in zip(answers, blocks, strict=True):
        if index in wanted:
            span, end = _checked_block(chat.text, block, prompt, chat.added, chat.template)
            check_answer(chat.messages[index], chat.text[span[0] : span[1] - len(end)])
            spans[index] = span
    return spans


def _checked_block(
    text: str, span: Span, prompt: str, added: Sequence[str], template: ChatTemplate
) -> tuple[Span, str]:
    """A `{% generation %}` block without the white space after its end-of-turn token, and that token."""
    start, stop = span
    block = text[start:stop].rstrip()
    if prompt.strip() and block.startswith(prompt.rstrip()):
        raise ConfigError(
            f"{template.where}: a {{% generation %}} block begins with the prompt {prompt!r}, which would be trained. "
            "Begin it behind the header."
        )
    end = max((token for token in added if block.endswith(token)), key=len, default=None)
    if end is None:
        raise ConfigError(
            f"{template.where}: a {{% generation %}} block ends without a special token: {block[-40:]!r}. The model "
            "would not learn to end its turn: put the end-of-turn token inside the block."
        )
    return (start, start + len(block)), end


def _all_but(chat: RenderedChat, untrained: Sequence[int]) -> list[Span] | None:
    """All characters but those of these answers; None: all."""
    if not untrained:
        return None
    cuts = [0, *(at for span in _spans(chat, untrained).values() for at in span), len(chat.text)]
    return [(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True) if start < stop]


def _without_lost_thoughts(chat: RenderedChat, spans: dict[int, Span]) -> list[int]:
    """The answers to train: without those that lose their reasoning, unless all do."""
    thoughtful = [index for index in spans if split_reasoning(chat.messages[index])[0]]
    kept = [index for index in thoughtful if _keeps_reasoning(chat, index, spans)]
    return [index for index in spans if not kept or index in kept or index not in thoughtful]


def _keeps_reasoning(chat: RenderedChat, index: int, spans: dict[int, Span]) -> bool:
    start, stop = spans.get(index, (0, len(chat.text)))
    return writes_reasoning(chat.messages[index], chat.text[start:stop])


def _dropped_reasoning(chat: RenderedChat, spans: dict[int, Span]) -> list[Omission]:
    thoughtful = [index for index in _answers(chat.messages) if split_reasoning(chat.messages[index])[0]]
    dropped = sum(not _keeps_reasoning(chat, index, spans) for index in thoughtful)
    if not thoughtful:
        return []
    why = "the chat template leaves it out of what it writes of such answers"
    return [Omission("the reasoning", "answers with reasoning", why, dropped, len(thoughtful))]


def _passed_over(found: dict[int, Span], trained: Sequence[int]) -> list[Omission]:
    passed = len(found) - len(trained)
    why = (
        "they lose their reasoning while a later answer keeps it, and the model never writes such answers. To train "
        "each with its reasoning, end a row after it"
    )
    return [Omission("the training", "answers", why, passed, len(found))] if passed else []
