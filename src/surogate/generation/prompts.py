"""Prompts to generate from: texts, and files of them. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_core.errors import ConfigError

from ..data.chat.row_tokenizer import RowTokenizer

_ROWS = (".jsonl", ".json")


@dataclass(frozen=True)
class Prompt:
    """A text that a model continues or answers, or a conversation whose next message it writes.

    where: what messages call it.
    """

    text: str = ""
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Any] | None = None
    where: str = "the prompt"

    @property
    def shown(self) -> str:
        """The text, or the last message of the conversation."""
        return str(self.messages[-1].get("content") or "") if self.messages else self.text

    def conversation(self, system: str | None = None) -> list[Mapping[str, Any]]:
        """Return the prompt as messages. system: a message in front. Raises ConfigError if there is one already."""
        messages = list(self.messages) or [{"role": "user", "content": self.text}]
        if system is None:
            return messages
        if messages[0].get("role") == "system":
            raise ConfigError(f"{self.where}: begins with a system message. Leave --system out, or remove it there.")
        return [{"role": "system", "content": system}, *messages]


def prompt_ids(prompt: Prompt, tokenizer: RowTokenizer, *, chat: bool, system: str | None = None) -> list[int]:
    """Return the tokens that a model reads for a prompt.

    chat: the conversation as the chat template writes it, up to the start of the answer; otherwise the text as a
    document begins in training. Raises ConfigError without a template, and for a conversation that is to be a text.
    """
    if chat:
        template = tokenizer.chat_template
        if template is None:
            raise ConfigError(
                f"{tokenizer.directory}: has no chat template (chat_template.jinja). Continue texts with it: "
                "surogate generate --raw."
            )
        ids = tokenizer.encode_ids(template.render(prompt.conversation(system), prompt.tools, prompt=True))
    elif prompt.messages:
        raise ConfigError(f"{prompt.where}: is a conversation, and --raw continues texts. Use --chat.")
    else:
        start = [tokenizer.bos_id] if tokenizer.adds_bos and tokenizer.bos_id is not None else []
        ids = [*start, *tokenizer.encode_ids(prompt.text)]
    if not ids:
        raise ConfigError(f"{prompt.where}: has no token. Give a text.")
    return ids


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file: of rows (.jsonl, .json) with `prompt` or `messages`, and `tools` if any; else a prompt a line.

    `prompt` is a text or a conversation. Of `messages` that end with an answer, the prompt is what stands in front of
    it. Empty lines are none. Raises ConfigError with the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{path}: cannot be read: {reason}. Name a file of prompts in UTF-8.") from error
    lines = text.splitlines()
    found = list(_rows(path, lines) if path.suffix.lower() in _ROWS else line_prompts(lines, str(path)))
    if not found:
        raise ConfigError(f"{path}: holds no prompt. Write one a line.")
    return found


def line_prompts(lines: Iterable[str], where: str) -> Iterator[Prompt]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield Prompt(line.rstrip("\n"), where=f"{where}:{number}")


def _rows(path: Path, lines: Sequence[str]) -> Iterator[Prompt]:
    if path.suffix.lower() == ".json":
        whole = _parsed("\n".join(lines), str(path))
        rows = whole if isinstance(whole, list) else [whole]
        yield from (_prompt(row, f"{path}, row {number}") for number, row in enumerate(rows, 1))
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _prompt(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is no JSON: {error}. Correct it.") from error


def _prompt(row: Any, where: str) -> Prompt:
    if isinstance(row, str) and row.strip():
        return Prompt(row, where=where)
    keys = [key for key in ("prompt", "messages") if isinstance(row, dict) and row.get(key) is not None]
    if len(keys) != 1:
        raise ConfigError(
            f"{where}: needs `prompt`, a text or a conversation, or `messages`, a conversation, and not both. "
            "Correct it."
        )
    (key,), found, tools = keys, row[keys[0]], row.get("tools")
    if key == "prompt" and isinstance(found, str) and found.strip():
        return Prompt(found, tools=checked_tools(tools, where), where=where)
    named = isinstance(found, list) and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in found)
    answered = named and found[-1:] and found[-1]["role"] == "assistant"
    if answered and key == "prompt":  # other programs let a model continue this message
        raise ConfigError(
            f"{where}: prompt ends with a message of the assistant. End it with the one to answer; a last answer of "
            "`messages` is left out."
        )
    messages = found[:-1] if answered else found
    if not named or not messages:
        text = "no text, and " * (key == "prompt")
        raise ConfigError(f"{where}: {key} is {text}no list of objects with a role to answer. Correct it.")
    return Prompt(messages=messages, tools=checked_tools(tools, where), where=where)


def checked_tools(tools: Any, where: str) -> list[Any] | None:
    """Return tools as templates read them: a list of objects, or JSON text of one. Raises ConfigError otherwise."""
    from ..data.chat.tool_calls import tools_of

    try:
        return tools_of(tools, "tools")
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
