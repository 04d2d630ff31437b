"""What of a rendered conversation is trained: the answers, each with the token that ends its turn.

A template that marks `{% generation %}` blocks says it itself. For others, each answer is found by rendering the same
messages with this one answer replaced by a marker: what stands before the answer must be equal in both texts, and
contain the header that the model is given at inference (the generation prompt); what stands behind must be equal too,
and begin with a special token, which ends the turn. So an answer is all that the model has to produce behind the
generation prompt: reasoning and tool calls included as the template writes them, and an empty think block where it
writes one. Nothing is assumed of the format; where these conditions do not hold, the row is refused.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ..api import Encoded
from ..errors import ConfigError
from .chat_template import ChatTemplate, Message, Span

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

LossScale = Literal["default", "last_round", "all"]

_MARK_ANSWERS = "Mark the answers in the template by {% generation %} ... {% endgeneration %}."


def encode_chat(
    messages: Sequence[Message], tools: Sequence[Any] | None, tokenizer: Tokenizer, loss_scale: LossScale
) -> Encoded:
    """Tokens of the rendered conversation and which are trained.

    loss_scale: "default": every answer; "last_round": the answers behind the last message of the user; "all": every
    token. Raises ConfigError when the template refuses the messages, or it cannot be told what is trained.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError(
            f"the tokenizer in {tokenizer.directory} has no chat template. Put the chat_template.jinja of the chat "
            "model of the same family beside it, or train on plain text (type: text)."
        )
    if loss_scale == "all":
        return encode_spans(template.render(messages, tools), None, tokenizer)
    if not any(message["role"] == "assistant" for message in messages):
        raise ConfigError("no message is the assistant's, so nothing is trained. Remove such rows.")
    text, spans = answers(messages, tools, template, tokenizer.special_texts)
    if loss_scale == "last_round":
        spans = _last_round(messages, spans)
    return encode_spans(text, spans, tokenizer)


def answers(
    messages: Sequence[Message], tools: Sequence[Any] | None, template: ChatTemplate, special: Sequence[str]
) -> tuple[str, list[Span]]:
    """The rendered conversation and its answers, each from behind its header to behind its end-of-turn token.

    special: texts of the special tokens.
    """
    if template.marks_generation(tools):
        text, marked = template.render_spans(messages, tools)
        prompt = template.generation_prompt(tools)
        return text, [_checked_block(text, span, prompt, special, template.where) for span in marked]
    text = template.render(messages, tools)
    spans = [
        _answer(text, messages, index, tools, template, special)
        for index, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    for (_, stop), (start, _) in itertools.pairwise(spans):
        if start < stop:
            raise ConfigError(f"{template.where}: two answers overlap in the rendered text. {_MARK_ANSWERS}")
    return text, spans


def _checked_block(text: str, span: Span, prompt: str, special: Sequence[str], where: str) -> Span:
    """A `{% generation %}` block without the white space behind its end-of-turn token."""
    start, stop = span
    block = text[start:stop].rstrip()
    if prompt and block.startswith(prompt.rstrip()):
        raise ConfigError(
            f"{where}: a {{% generation %}} block begins with the prompt {prompt!r}, which would be trained. "
            "Begin it behind the header."
        )
    if not any(block.endswith(token) for token in special):
        raise ConfigError(
            f"{where}: a {{% generation %}} block ends without a special token: {block[-40:]!r}. The model would not "
            "learn to end its turn: put the end-of-turn token inside the block."
        )
    return start, start + len(block)


def _answer(
    text: str,
    messages: Sequence[Message],
    index: int,
    tools: Sequence[Any] | None,
    template: ChatTemplate,
    special: Sequence[str],
) -> Span:
    """The answer that is message `index`, in `text`, found by a rendering with a marker in its place."""
    marker = "\ue000\ue001"
    while marker in text:
        marker += "\ue001"
    probe = template.render(
        [*messages[:index], {"role": "assistant", "content": marker}, *messages[index + 1 :]], tools
    )
    before, found, behind = probe.partition(marker)
    nth = f"{template.where}: message {index} (assistant)"
    if not found or marker in behind:
        raise ConfigError(f"{nth} does not appear once in the rendered text. {_MARK_ANSWERS}")
    start = _behind_header(before, template.generation_prompt(tools), special)
    if start is None:
        raise ConfigError(f"{nth} does not begin with the generation prompt: {before[-60:]!r}. {_MARK_ANSWERS}")
    stop = len(text) - len(behind)
    if text[:start] != before[:start] or not text.endswith(behind) or stop < start:
        raise ConfigError(f"{nth}: the text around it depends on what it says. {_MARK_ANSWERS}")
    space = len(behind) - len(behind.lstrip())
    end = max((token for token in special if behind.startswith(token, space)), key=len, default=None)
    if end is None:
        raise ConfigError(
            f"{nth} is followed by {behind[:30]!r}, not by a special token. The model would not learn to end its turn: "
            "use a template that ends it, and make its end-of-turn a special token of the tokenizer."
        )
    if end in text[start:stop]:
        raise ConfigError(
            f"{nth} holds the end-of-turn token {end} in its text: {text[start:stop][:60]!r}. Remove it there: the "
            "template writes it."
        )
    return start, stop + space + len(end)


def _behind_header(before: str, prompt: str, special: Sequence[str]) -> int | None:
    """Where the answer begins in `before`, the text up to what the answer says; None when the header is not found.

    Templates that have the prompt open a think block leave it out of earlier turns: then the header is a beginning of
    the prompt. Behind a whole prompt the template may have written more, an empty think block, but no special token.
    """
    if not prompt:
        return len(before)
    for size in range(len(prompt), 0, -1):
        if before.endswith(prompt[:size]) and (size == len(prompt) or any(t in prompt[:size] for t in special)):
            return len(before)
    at = before.rfind(prompt)
    if at < 0 or any(token in before[at + len(prompt) :] for token in special):
        return None
    return at + len(prompt)


def _last_round(messages: Sequence[Message], spans: Sequence[Span]) -> list[Span]:
    roles = [message["role"] for message in messages]
    if roles.count("assistant") != len(spans):
        raise ConfigError(
            f"loss_scale: last_round: the template marks {len(spans)} blocks for {roles.count('assistant')} messages "
            "of the assistant. Use loss_scale: default."
        )
    last_user = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
    kept = roles[last_user + 1 :].count("assistant")
    if kept == 0:
        raise ConfigError(
            "no message of the assistant stands behind the last one of the user, so that loss_scale: last_round "
            "trains nothing. Remove such rows, or use loss_scale: default."
        )
    return list(spans[-kept:])


def encode_spans(text: str, spans: Sequence[Span] | None, tokenizer: Tokenizer) -> Encoded:
    """Tokens of `text`, trained inside `spans`; None: all are.

    The text is tokenised in pieces that end where a span begins or ends, as at inference, where the model's own
    tokens follow those of the prompt. Where no token would cross such a place, these are the tokens of the whole.
    Raises ConfigError when the pieces give other text, or by a tokenizer that reads a piece unlike a part.
    """
    if spans is None:
        tokens = tokenizer.encode_ids(text)
        return _checked(Encoded(tokens, [True] * len(tokens)), tokenizer)
    cuts = [0, *(at for span in spans for at in span), len(text)]
    pieces = [text[start:stop] for start, stop in itertools.pairwise(cuts)]
    encoded = tokenizer.encode_batch(pieces)
    tokens = [token for ids in encoded for token in ids]
    trained = [bool(n % 2) for n, ids in enumerate(encoded) for _ in ids]
    if not tokenizer.reads_pieces_as_parts and tokens != tokenizer.encode_ids(text):
        raise ConfigError(
            "tokens of the prompt and of the answer run into one another with this tokenizer, so that what is trained "
            "cannot be told. Begin answers without white space, or use a byte-level tokenizer."
        )
    result = _checked(Encoded(tokens, trained), tokenizer)
    if not any(trained) or all(trained):
        what = "every token is trained, the prompt too" if any(trained) else "no token is trained"
        raise ConfigError(f"{what}: {marked(result, tokenizer)}. Check the chat template.")
    return result


def _checked(encoded: Encoded, tokenizer: Tokenizer) -> Encoded:
    bos = tokenizer.bos_id
    if bos is not None and list(encoded.tokens[:2]) == [bos, bos]:
        raise ConfigError(
            f"begins with two bos tokens: {marked(encoded, tokenizer)}. The chat template writes one itself: remove "
            "the other from the messages."
        )
    return encoded


def marked(encoded: Encoded, tokenizer: Tokenizer, chars: int = 400) -> str:
    """The document as text, trained parts in [[ ]], of long ones both ends."""
    parts = (f"[[{text}]]" if trained else text for text, trained in runs(encoded, tokenizer))
    shown = re.sub(r"\n", r"\\n", "".join(parts))
    return shown if len(shown) <= chars else f"{shown[: chars // 2]} ... {shown[-chars // 2 :]}"


def runs(encoded: Encoded, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The document as text, cut where training begins or ends: (text, whether it is trained)."""
    found: list[tuple[list[int], bool]] = []
    for token, trained in zip(encoded.tokens, encoded.trained, strict=True):
        if not found or found[-1][1] != trained:
            found.append(([], trained))
        found[-1][0].append(token)
    return [(tokenizer.decode(tokens), trained) for tokens, trained in found]
