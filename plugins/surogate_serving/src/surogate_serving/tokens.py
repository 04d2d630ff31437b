"""Check 1: the server's tokens of conversations are those of training."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.chats import Chat
from surogate_core.errors import ConfigError

from .connection import Refused, shown
from .protocol import NotGiven, Rendering, Server
from .result import Result
from .stops import trained_ends, trained_runs

_WRONG_INPUT: Final = (400, 422)
_BEFORE: Final = 4
_AFTER: Final = 12
"""Tokens around a difference that are shown."""
_FURTHER: Final = {"role": "user", "content": "Go on."}


@dataclass(frozen=True)
class Text:
    """A text that training and the server make of messages.

    of        its conversation
    what      "the conversation", or "the prompt of message 2"
    rendering what the server is asked
    ids       tokens of training
    """

    of: Chat
    what: str
    rendering: Rendering
    ids: list[int]


def check_tokens(
    server: Server, model: str, chats: Sequence[Chat], tokenizer: RowTokenizer, progress: Callable[[int], None]
) -> Result:
    """Compare the tokens of whole conversations, and of the prompts in front of their answers."""
    texts: list[Text] = []
    wrong: list[tuple[Text, list[int]]] = []
    not_given: dict[str, int] = {}
    for done, chat in enumerate(chats):
        progress(done)
        for text in _texts(chat, tokenizer, server.continues):
            try:
                served = server.ids(model, text.rendering)
            except Refused as error:
                if error.status not in _WRONG_INPUT:
                    raise
                return _refused(server, text, error)
            except NotGiven as reason:
                not_given[str(reason)] = not_given.get(str(reason), 0) + 1
                continue
            texts.append(text)
            if served != text.ids:
                wrong.append((text, served))
    lacks = "".join(f"; {count} texts were not compared: {reason}" for reason, count in not_given.items())
    if not texts:
        return Result("tokens", None, "; ".join(not_given) or "there is no text that the server could render")
    starts = sum(_starts_an_answer(text) for text in texts)
    numbers = {
        "conversations": len(chats),
        "texts": len(texts),
        "in_front_of_trained": starts,
        "differ": len(wrong),
        "not_compared": sum(not_given.values()),
    }
    if not wrong:
        said = f"{len(texts)} texts of {len(chats)} conversations have the tokens of training{lacks}"
        return Result("tokens", True, said, numbers=numbers)
    text, served = wrong[0]
    fault, remedy = _named(server, text, served, tokenizer)
    said = f"{len(wrong)} of {len(texts)} texts have other tokens than in training: {fault}{lacks}"
    where = f"{text.of.where}, {text.what}, from token {_first_difference(text.ids, served)}:"
    lines = (where, *_both(tokenizer, text.ids, served))
    return Result("tokens", False, said, fault, remedy, lines, numbers=numbers)


def _refused(server: Server, text: Text, error: Refused) -> Result:
    """Return the result for messages that the server refuses, as a chat template may do."""
    return Result(
        "tokens",
        False,
        f"the server refuses {text.what} of {text.of.where}",
        "another chat template, or a message that the server does not take",
        f"It says: {error.said}. Serve the chat template of the output, {server.words.template}.",
        numbers={"refused": text.of.where},
    )


def _texts(chat: Chat, tokenizer: RowTokenizer, continues: bool) -> Iterator[Text]:
    """Yield the texts of a conversation. A prompt that the template refuses is none that a server could make.

    continues: whether the server leaves an answer at the end open. A further message closes it then.
    """

    def text(what: str, messages: Sequence[Mapping[str, Any]], prompt: bool) -> Text:
        rendering = Rendering(messages, chat.tools, prompt, chat.variables)
        rendered = chat.template.render(rendering.messages, chat.tools, prompt)
        return Text(chat, what, rendering, tokenizer.encode_ids(rendered))

    def is_answer(index: int) -> bool:
        return bool(chat.messages[index]["role"] == "assistant")

    if not (continues and is_answer(-1)):
        yield text("the conversation", chat.messages, False)
    else:
        with suppress(ConfigError):
            yield text("the conversation and a further message", [*chat.messages, _FURTHER], False)
    for index in range(1, len(chat.messages)):
        if is_answer(index) and not (continues and is_answer(index - 1)):
            with suppress(ConfigError):
                yield text(f"the prompt of message {index + 1}", chat.messages[:index], True)


def _starts_an_answer(text: Text) -> bool:
    """Return whether these are the tokens in front of an answer that was trained."""
    tokens, size = list(text.of.encoded.tokens), len(text.ids)
    starts = {start for start, _ in trained_runs(text.of.encoded)}
    return size in starts and tokens[:size] == text.ids


def _named(server: Server, text: Text, served: list[int], tokenizer: RowTokenizer) -> tuple[str, str]:
    """Return what is wrong with the tokens of a text, and what to do."""
    ours, bos = text.ids, tokenizer.bos_id
    files = "the chat_template.jinja and tokenizer files of the output"
    if bos is not None and served == [bos, *ours]:
        return (
            f"{tokenizer.decode([bos])} stands twice at the beginning",
            "The served chat template, or the server, writes another one. Serve the files of the output, and "
            "do not set add_special_tokens in requests.",
        )
    if bos is not None and ours == [bos, *served]:
        return f"{tokenizer.decode([bos])} is missing at the beginning", f"Serve {files}."
    rendering, without = text.rendering, tokenizer.chat_template
    if rendering.tools and served == _rendered(text, replace(rendering, tools=None), tokenizer):
        return (
            "the tools are left out",
            f"Serve {files}: its template writes tools. If it does, the server, or a proxy before it, drops `tools`.",
        )
    for form in server.own_forms(rendering):
        if served == _rendered(text, form.rendering, tokenizer):
            return form.fault, form.remedy
    if rendering.variables and without is not None:
        bare = replace(text, of=replace(text.of, template=without))
        if served == _rendered(bare, replace(rendering, variables={}), tokenizer):
            names = ", ".join(rendering.variables)
            return f"chat_template_kwargs ({names}) are not applied", server.words.variables
    ends = trained_ends([text.of], tokenizer).keys()
    if len(served) < len(ours) and _without(ours, ends, tokenizer) == _without(served, ends, tokenizer):
        named = ", ".join(tokenizer.decode([end]) for end in sorted(ends))
        return f"the end of turns, {named}, is missing", f"Serve {files}: another template is served, without it."
    if tokenizer.decode(ours) == tokenizer.decode(served):
        return "another tokenizer: the text is equal", f"Serve {files}: tokenizer.json is another one."
    return (
        "another chat template",
        f"Serve {files}, {server.words.template}.",
    )


def _rendered(text: Text, rendering: Rendering, tokenizer: RowTokenizer) -> list[int] | None:
    """Return the tokens of a text in another form; None if the template refuses it."""
    try:
        template = text.of.template.with_variables(rendering.variables)
        return tokenizer.encode_ids(template.render(rendering.messages, rendering.tools, rendering.prompt))
    except ConfigError:
        return None


def _without(ids: Sequence[int], left_out: Collection[int], tokenizer: RowTokenizer) -> str:
    """Return the text without some tokens. Text on both sides of one may have other tokens where it is missing."""
    return tokenizer.decode([token for token in ids if token not in left_out])


def _first_difference(ours: Sequence[int], served: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, served, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(served)))


def _both(tokenizer: RowTokenizer, ours: Sequence[int], served: Sequence[int]) -> Iterator[str]:
    """Yield both texts around the first difference, with their tokens."""
    at = _first_difference(ours, served)
    for name, ids in (("trained", ours), ("served", served)):
        part = list(ids[max(0, at - _BEFORE) : at + _AFTER])
        known = [token for token in part if 0 <= token < tokenizer.vocab_size]
        yield f"{name:<8}{shown(repr(tokenizer.decode(known)))}  {part}"
