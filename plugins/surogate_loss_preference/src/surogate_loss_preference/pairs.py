"""The dataset type `preference`: a prompt, a chosen and a rejected answer.

The answers are text, a message, or a list of messages. The prompt is text or messages in a column of its own, or the
messages with which both answers begin. Each pair becomes two documents, the chosen one first. What is trained is what
fine-tuning with `loss_scale: last_round` trains: the answers after the user's last message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import ConfigError, DatasetFormatDef, Encoded, Omission

_PROMPTS = ("prompt", "messages", "conversations", "instruction", "question")
"""Names of the column with the prompt in TRL, axolotl and LLaMA-Factory."""
_ANSWERS = {"chosen": ("chosen", "chosen_response"), "rejected": ("rejected", "rejected_response")}

Message = Mapping[str, Any]


class PreferenceOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_field: str | None = Field(
        None, description="Column with the prompt: text or messages. null: both answers begin with its messages."
    )
    input_field: str | None = Field(None, description="Column with text that follows a prompt of text, if not empty.")
    chosen_field: str = Field("chosen", description="Column with the better answer: text, a message or messages.")
    rejected_field: str = Field("rejected", description="Column with the worse answer.")
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


def encode(row: Mapping[str, Any], tokenizer: Any, options: PreferenceOptions) -> Sequence[Encoded]:
    """Return the chosen and the rejected document of a row. Raises ConfigError if it is no pair."""
    prompt, answers = _parts(row, options)
    if answers[0] == answers[1]:
        raise ConfigError(f"{options.chosen_field} and {options.rejected_field} are equal. Remove such rows.")
    if isinstance(prompt, str):
        pair = [_plain(prompt, str(answer), tokenizer) for answer in answers]
    else:
        given = {"system": options.system_field, "tools": options.tools_field}
        columns = {name: row.get(field) for name, field in given.items() if field}
        pair = [
            tokenizer.encode_conversation(
                {"prompt": prompt, "answer": answer, **columns},
                messages_field="prompt",
                completion_field="answer",
                system_field="system" if options.system_field else None,
                tools_field="tools" if options.tools_field else None,
                loss_scale="last_round",
            )
            for answer in answers
        ]
    if out := next((document.left_out for document in pair if document.left_out), ""):
        return [Encoded((), (), left_out=out)]
    starts = [list(document.trained).index(True) for document in pair]
    if list(pair[0].tokens[: starts[0]]) != list(pair[1].tokens[: starts[1]]):
        raise ConfigError(
            "the prompts of both answers differ in the chat template, so their answers cannot be compared. Remove the "
            "row, or let both answers follow the same messages."
        )
    return _shortened(pair, starts[0], options)


def _plain(prompt: str, answer: str, tokenizer: Any) -> Encoded:
    asked, said = tokenizer.encode_ids(prompt), tokenizer.encode_ids(answer)
    asked = [tokenizer.bos_id, *asked] if tokenizer.adds_bos else asked
    said = said if tokenizer.eos_id is None else [*said, tokenizer.eos_id]
    return Encoded([*asked, *said], [False] * len(asked) + [True] * len(said))


def _shortened(pair: Sequence[Encoded], prompt: int, options: PreferenceOptions) -> Sequence[Encoded]:
    """Cut off the start of both prompts, as much as the longer document needs. At least one token of them stays."""
    cut = max(0, prompt - (options.max_prompt_tokens or prompt))
    longest = max(len(document.tokens) for document in pair)
    cut = max(cut, longest - (options.max_tokens or longest))
    if cut >= prompt:
        return [Encoded((), (), left_out=f"an answer is longer than max_tokens: {options.max_tokens}")]
    shorter = [
        replace(document, tokens=document.tokens[cut:], trained=document.trained[cut:], omissions=())
        for document in pair
    ]
    limits = [f"{key}: {value}" for key in ("max_prompt_tokens", "max_tokens") if (value := getattr(options, key))]
    counted = [Omission("the start of the prompt", "pairs", f"longer than {', '.join(limits)}", int(cut > 0), 1)]
    kept = [omission for document in pair for omission in document.omissions]
    return [replace(shorter[0], omissions=(*kept, *(counted if limits else ()))), shorter[1]]


# ----------------------------------------------------------------------------------------------------- forms of a pair


def _parts(row: Mapping[str, Any], options: PreferenceOptions) -> tuple[str | list[Message], list[Any]]:
    """Return the prompt and both answers: all text, or all lists of messages."""
    names = options.chosen_field, options.rejected_field
    as_text = options.text_as == "text"
    answers = [_cell(row, name, as_text) for name in names]
    prompt = _cell(row, options.prompt_field, as_text) if options.prompt_field else None
    if as_text:
        return _text_parts(row, prompt, answers, options)
    messages = [_messages(answer, "assistant", name) for answer, name in zip(answers, names, strict=True)]
    begins = [answer[0].get("role", answer[0].get("from")) not in _SPEAKERS for answer in messages]
    if any(begins):  # the prompt is in the answers, whatever the column of the prompt repeats of it
        shared = 0
        while shared < min(map(len, messages)) - 1 and messages[0][shared] == messages[1][shared]:
            shared += 1
        own = [answer[shared:] for answer in messages]
        if not shared or any(answer[0].get("role", answer[0].get("from")) not in _SPEAKERS for answer in own):
            raise ConfigError(f"{names[0]} and {names[1]} begin with different prompts. Remove such rows.")
        return messages[0][:shared], own
    if options.prompt_field is None:
        raise ConfigError(f"{names[0]} holds no prompt. Set prompt_field to the column that does.")
    asked = _messages(_with_input(row, prompt, options), "user", options.prompt_field)
    return asked, messages


_SPEAKERS = ("assistant", "gpt", "bot", "model", "tool", "function_call", "tool_call", "observation")
"""Roles of the messages of an answer."""


def _text_parts(
    row: Mapping[str, Any], prompt: Any, answers: list[Any], options: PreferenceOptions
) -> tuple[str, list[Any]]:
    prompt = _with_input(row, prompt, options)
    if not isinstance(prompt, str) or not all(isinstance(answer, str) for answer in answers):
        raise ConfigError("text_as: text needs text in the columns of the prompt and of both answers")
    return prompt, answers


def _with_input(row: Mapping[str, Any], prompt: Any, options: PreferenceOptions) -> Any:
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
        except ValueError:
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


def _guess(columns: Sequence[str]) -> Mapping[str, Any]:
    found = {f"{kind}_field": next((n for n in names if n in columns), names[0]) for kind, names in _ANSWERS.items()}
    prompt = next((name for name in _PROMPTS if name in columns), None)
    found |= {"prompt_field": prompt} if prompt else {}
    found |= {"input_field": "input"} if prompt == "instruction" and "input" in columns else {}
    return found | {f"{name}_field": name for name in ("system", "tools") if name in columns}


def _named(options: PreferenceOptions, *names: str) -> list[str]:
    return [column for name in names if (column := getattr(options, f"{name}_field")) is not None]


PREFERENCE = DatasetFormatDef(
    name="preference",
    summary="a prompt with a chosen and a rejected answer",
    options=PreferenceOptions,
    matches=lambda columns: all(any(name in columns for name in names) for names in _ANSWERS.values()),
    fields=lambda options: _named(options, "prompt", "input", "chosen", "rejected", "system", "tools"),
    optional=lambda options: _named(options, "input", "system", "tools"),
    encode=encode,
    guess=_guess,
    truncation="delete",
    group=2,
)
