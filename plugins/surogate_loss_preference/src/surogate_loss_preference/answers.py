"""Prompts and answers of a row, in the forms that TRL, axolotl and LLaMA-Factory use, as documents.

The answers are text, a message, or a list of messages. The prompt is text or messages in a column of its own, or the
messages with which the answers begin. The prompt ends where its messages end, whoever says the last one. What follows
is the answer, and all that the assistant says there is trained.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from surogate_core.api import ConfigError, Encoded, Omission

_PROMPTS = ("prompt", "messages", "conversations", "instruction", "question")
"""Names of the column with the prompt in TRL, axolotl and LLaMA-Factory."""

_SPEAKERS = ("assistant", "gpt", "bot", "model", "tool", "function_call", "tool_call", "observation")
"""Roles of the messages of an answer."""

Message = Mapping[str, Any]

VERSION, MENDED = 2, {2: "messages of the assistant in a prompt, such as calls of tools, counted as the answer"}
"""Of the types that are made of these documents."""


class AnswerOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_field: str | None = Field(
        None,
        description="Column with the prompt: text or messages. Unset: the one with a usual name. null, or if there is "
        "none: the answers begin with its messages.",
    )
    input_field: str | None = Field(None, description="Column with text that follows a prompt of text, if not empty.")
    system_field: str | None = Field(None, description="Column with the system prompt.")
    tools_field: str | None = Field(None, description="Column with the tools, as in type conversation.")
    text_as: Literal["messages", "text"] = Field(
        "messages",
        description="messages: text is what user and assistant say, in the model's chat template; text: prompt and "
        "answer as they are, followed by eos.",
    )
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="Cut off the start of longer prompts, and count them."
    )
    max_tokens: int | None = Field(
        None, ge=2, description="Cut off the start of the prompt of longer documents, and count them."
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {}, description="Values of variables of the chat template, as in type conversation."
    )

    @model_validator(mode="after")
    def _check(self) -> AnswerOptions:
        if self.chat_template_kwargs and self.text_as == "text":
            raise ValueError("chat_template_kwargs has no effect with text_as: text; remove one of them")
        return self


def encode_answers(
    row: Mapping[str, Any], tokenizer: Any, options: AnswerOptions, columns: Sequence[str]
) -> Sequence[Encoded]:
    """Return a document for the answer in each of `columns`, whose prompts have the same tokens; or one left out.

    Raises ConfigError if a column is empty or the prompts differ.
    """
    prompt, answers = _parts(row, options, columns)
    if isinstance(prompt, str):
        documents = [_plain(prompt, str(answer), tokenizer) for answer in answers]
    else:
        fields = {"system": options.system_field, "tools": options.tools_field}
        given = {name: row.get(field) for name, field in fields.items() if field}
        # errors name these columns; a prompt that is in the column of the answer gets another name
        field = options.prompt_field
        asked = "prompt" if field is None or field in columns else field
        documents = [
            tokenizer.encode_conversation(
                {**row, asked: prompt, column: answer, **given},
                messages_field=asked,
                completion_field=column,
                system_field="system" if options.system_field else None,
                tools_field="tools" if options.tools_field else None,
                loss_scale="completion",
                chat_template_kwargs=options.chat_template_kwargs,
            )
            for column, answer in zip(columns, answers, strict=True)
        ]
    if out := next((document.left_out for document in documents if document.left_out), ""):
        return [Encoded((), (), left_out=out)]
    if silent := next((name for name, d in zip(columns, documents, strict=True) if True not in d.trained), ""):
        raise ConfigError(f"column {silent!r}: no token of the answer is trained. Remove such rows.")
    starts = [list(document.trained).index(True) for document in documents]
    prompts = [list(document.tokens[:start]) for document, start in zip(documents, starts, strict=True)]
    if any(other != prompts[0] for other in prompts):
        raise ConfigError(
            "the prompts of both answers differ in the chat template, so their answers cannot be compared. Remove the "
            "row, or let both answers follow the same messages."
        )
    return _shortened(documents, starts[0], options)


def _plain(prompt: str, answer: str, tokenizer: Any) -> Encoded:
    asked, said = tokenizer.encode_ids(prompt), tokenizer.encode_ids(answer)
    asked = [tokenizer.bos_id, *asked] if tokenizer.adds_bos else asked
    said = said if tokenizer.eos_id is None else [*said, tokenizer.eos_id]
    return Encoded([*asked, *said], [False] * len(asked) + [True] * len(said))


def _shortened(documents: Sequence[Encoded], prompt: int, options: AnswerOptions) -> Sequence[Encoded]:
    """Cut off the start of the prompts, as much as the longest document needs. At least one token of them stays."""
    cut = max(0, prompt - (options.max_prompt_tokens or prompt))
    longest = max(len(document.tokens) for document in documents)
    cut = max(cut, longest - (options.max_tokens or longest))
    if cut >= prompt:
        return [Encoded((), (), left_out=f"an answer is longer than max_tokens: {options.max_tokens}")]
    first, *others = [
        replace(document, tokens=document.tokens[cut:], trained=document.trained[cut:], omissions=())
        for document in documents
    ]
    unit = "pairs" if others else "answers"
    limits = [f"{key}: {value}" for key in ("max_prompt_tokens", "max_tokens") if (value := getattr(options, key))]
    counted = [Omission("the start of the prompt", unit, f"longer than {', '.join(limits)}", int(cut > 0), 1)]
    kept = [omission for document in documents for omission in document.omissions]
    return [replace(first, omissions=(*kept, *(counted if limits else ()))), *others]


# ------------------------------------------------------------------------------------------------------ forms of a row


def guessed_prompt(columns: Sequence[str]) -> dict[str, Any]:
    """Return the keys of `AnswerOptions` that a dataset with these columns wants."""
    prompt = next((name for name in _PROMPTS if name in columns), None)
    found: dict[str, Any] = {"prompt_field": prompt} if prompt else {}
    found |= {"input_field": "input"} if prompt == "instruction" and "input" in columns else {}
    return found | {f"{name}_field": name for name in ("system", "tools") if name in columns}


def named(options: AnswerOptions, *names: str) -> list[str]:
    """Return the columns that the keys of `names` select."""
    return [column for name in names if (column := getattr(options, f"{name}_field")) is not None]


def _parts(
    row: Mapping[str, Any], options: AnswerOptions, columns: Sequence[str]
) -> tuple[str | list[Message], list[Any]]:
    """Return the prompt and the answers: all text, or all lists of messages."""
    as_text, both = options.text_as == "text", " and ".join(columns)
    answers = [_cell(row, name, as_text) for name in columns]
    prompt = _cell(row, options.prompt_field, as_text) if options.prompt_field else None
    if as_text:
        prompt = _with_input(row, prompt, options)
        if not isinstance(prompt, str) or not all(isinstance(answer, str) for answer in answers):
            raise ConfigError("text_as: text needs text in the columns of the prompt and of the answers")
        return prompt, answers
    messages = [_messages(answer, "assistant", name) for answer, name in zip(answers, columns, strict=True)]
    if not all(_speaks(answer[0]) for answer in messages):  # the prompt is in the answers, as its column may be, too
        shared = _shared(messages)
        own = [answer[shared:] for answer in messages]
        if not shared or not all(_speaks(answer[0]) for answer in own):
            wrong = "ends without an answer" if len(columns) == 1 else "begin with different prompts"
            raise ConfigError(f"{both} {wrong}. Remove such rows.")
        asked = messages[0][:shared]
        if prompt is not None and _says_more(_messages(prompt, "user", str(options.prompt_field)), asked):
            raise ConfigError(
                f"column {options.prompt_field!r} is another prompt than the one that {both} begin with. Remove such "
                "rows, or set prompt_field: null, which reads the answers alone."
            )
        return asked, own
    if options.prompt_field is None:
        raise ConfigError(f"{columns[0]} holds no prompt. Set prompt_field to the column that does.")
    return _messages(_with_input(row, prompt, options), "user", options.prompt_field), messages


def _speaks(message: Message) -> bool:
    return message.get("role", message.get("from")) in _SPEAKERS


def _says_more(column: Sequence[Message], asked: Sequence[Message]) -> bool:
    """Return whether a message of the prompt's column, but for those of an answer, is not in the answers' prompt.

    Data sets repeat the whole prompt in the column, its last question or the whole conversation: these lose no text.
    """
    said = [_text(message) for message in asked]
    return any(not any(_text(message) in text for text in said) for message in column if not _speaks(message))


def _text(message: Message) -> str:
    content = message.get("content", message.get("value"))
    return content.strip() if isinstance(content, str) else json.dumps(content, sort_keys=True)


def _shared(messages: Sequence[list[Message]]) -> int:
    """Return how many messages are the prompt: those that all lists begin with, or all up to the last question."""
    first, *others = messages
    if not others:
        return max(number for number, message in enumerate(first[:-1], 1) if not _speaks(message)) if first[1:] else 0
    shared = 0
    while shared < min(map(len, messages)) - 1 and all(other[shared] == first[shared] for other in others):
        shared += 1
    return shared


def _with_input(row: Mapping[str, Any], prompt: Any, options: AnswerOptions) -> Any:
    more = row.get(options.input_field) if options.input_field else None
    if not more:
        return prompt
    if not (isinstance(more, str) and isinstance(prompt, str)):
        raise ConfigError(f"column {options.input_field!r} follows a prompt that is no text. Remove input_field.")
    return f"{prompt}\n{more}"


def _cell(row: Mapping[str, Any], name: str, as_text: bool) -> Any:
    """Return a cell. Text that is a list of messages in JSON is that list, unless wanted `as_text`."""
    value = row[name]
    if isinstance(value, str) and not as_text and value.lstrip()[:2] in ("[{", "[]"):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        value = found if all(isinstance(item, Mapping) and {"role", "from"} & item.keys() for item in found) else value
    if value is None or value == [] or (isinstance(value, str) and not value.strip()):
        raise ConfigError(f"column {name!r} is empty. Remove such rows.")
    return value


def _messages(value: Any, role: str, name: str) -> list[Message]:
    """Return text as a message of `role`, a message or messages as they are."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    messages = [value] if isinstance(value, Mapping) else value
    if not isinstance(messages, list) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError(f"column {name!r} must be text, a message or a list of messages (got {value!r:.60})")
    return messages
