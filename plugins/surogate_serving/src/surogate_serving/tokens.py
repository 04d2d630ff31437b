"""Check 1: the server's tokens of conversations are those of training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.chat.template import ChatTemplate
from surogate.data.chats import Chat
from surogate_core.errors import ConfigError

from .connection import Refused, shown
from .protocol import Rendering, Server
from .result import Result
from .stops import trained_ends, trained_runs

_WRONG_INPUT: Final = (400, 422)
_BEFORE: Final = 4
_AFTER: Final = 12
"""Tokens around a difference that are shown."""
_FUNCTION: Final = ("name", "description", "parameters")


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


def check_tokens(server: Server, model: str, chats: Sequence[Chat], tokenizer: RowTokenizer) -> Result:
    """Compare the tokens of whole conversations, and of the prompts in front of their answers."""
    texts = [text for chat in chats for text in _texts(chat, tokenizer)]
    wrong: list[tuple[Text, list[int]]] = []
    for text in texts:
        try:
            served = server.ids(model, text.rendering)
        except Refused as error:
            if error.status not in _WRONG_INPUT:
                raise
            return _refused(text, error)
        if served != text.ids:
            wrong.append((text, served))
    starts = sum(_starts_an_answer(text) for text in texts)
    numbers = {"conversations": len(chats), "texts": len(texts), "in_front_of_trained": starts, "differ": len(wrong)}
    if not wrong:
        said = f"{len(texts)} texts of {len(chats)} conversations have the tokens of training"
        return Result("tokens", True, said, numbers=numbers)
    text, served = wrong[0]
    fault, remedy = _named(text, served, tokenizer)
    said = f"{len(wrong)} of {len(texts)} texts have other tokens than in training: {fault}"
    where = f"{text.of.where}, {text.what}, from token {_first_difference(text.ids, served)}:"
    lines = (where, *_both(tokenizer, text.ids, served))
    return Result("tokens", False, said, fault, remedy, lines, numbers)


def _refused(text: Text, error: Refused) -> Result:
    """Return the result for messages that the server refuses, as a chat template may do."""
    return Result(
        "tokens",
        False,
        f"the server refuses {text.what} of {text.of.where}",
        "another chat template, or a message that the server does not take",
        f"It says: {error.said}. Serve the chat_template.jinja of the output.",
        numbers={"refused": text.of.where},
    )


def _texts(chat: Chat, tokenizer: RowTokenizer) -> Iterator[Text]:
    """Yield the texts of a conversation. A prompt that the template refuses is none that a server could make."""

    def text(what: str, messages: Sequence[Mapping[str, Any]], prompt: bool) -> Text:
        rendering = Rendering(messages, chat.tools, prompt, chat.variables)
        rendered = chat.template.render(rendering.messages, chat.tools, prompt)
        return Text(chat, what, rendering, tokenizer.encode_ids(rendered))

    yield text("the conversation", chat.messages, False)
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and index:
            try:
                yield text(f"the prompt of message {index + 1}", chat.messages[:index], True)
            except ConfigError:
                continue


def _starts_an_answer(text: Text) -> bool:
    """Return whether these are the tokens in front of an answer that was trained."""
    tokens, size = list(text.of.encoded.tokens), len(text.ids)
    starts = {start for start, _ in trained_runs(text.of.encoded)}
    return size in starts and tokens[:size] == text.ids


def _named(text: Text, served: list[int], tokenizer: RowTokenizer) -> tuple[str, str]:
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
    without, template = tokenizer.chat_template, text.of.template
    if text.rendering.tools and served == _rendered(text, template, tokenizer, None):
        return (
            "the tools are left out",
            f"Serve {files}: its template writes tools. If it does, the server, or a proxy before it, drops `tools`.",
        )
    if text.rendering.tools and served == _rendered(text, template, tokenizer, _as_servers(text.rendering.tools)):
        return (
            "the tools are written in another form",
            "The server writes the keys of a function as name, description, parameters, and null for one that is not "
            "given. Write them so in the data, with a description and parameters for each.",
        )
    if (
        text.rendering.variables
        and without is not None
        and served == _rendered(text, without, tokenizer, text.rendering.tools)
    ):
        names = ", ".join(text.rendering.variables)
        return (
            f"chat_template_kwargs ({names}) are not applied",
            "Use a version of the server that reads chat_template_kwargs, or start vLLM with "
            "--default-chat-template-kwargs.",
        )
    ends = trained_ends([text.of], tokenizer).keys()
    if _without(ours, ends) == _without(served, ends) and len(served) < len(ours):
        named = ", ".join(tokenizer.decode([end]) for end in sorted(ends))
        return f"the end of turns, {named}, is missing", f"Serve {files}: another template is served, without it."
    if tokenizer.decode(ours) == tokenizer.decode(served):
        return "another tokenizer: the text is equal", f"Serve {files}: tokenizer.json is another one."
    return (
        "another chat template",
        f"Serve {files}, without another --chat-template, or name it with --chat-template.",
    )


def _rendered(
    text: Text, template: ChatTemplate, tokenizer: RowTokenizer, tools: Sequence[Any] | None
) -> list[int] | None:
    """Return the tokens of a text with another template, or with other tools; None if the template refuses it."""
    try:
        return tokenizer.encode_ids(template.render(text.rendering.messages, tools, text.rendering.prompt))
    except ConfigError:
        return None


def _as_servers(tools: Sequence[Any]) -> list[Any]:
    """Return tools as servers give them to templates that read them into classes of their own, such as vLLM's."""

    def formed(tool: Any) -> Any:
        function = tool.get("function")
        if not isinstance(function, Mapping):
            return tool
        return {**tool, "function": {**{key: function.get(key) for key in _FUNCTION}, **function}}

    return [formed(tool) for tool in tools]


def _without(ids: Sequence[int], left_out: Collection[int]) -> list[int]:
    return [token for token in ids if token not in left_out]


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
