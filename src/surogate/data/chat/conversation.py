"""The dataset type `conversation`: messages, rendered by the model's own chat template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from surogate_core.api import DatasetFormatDef, Encoded, Omission
from surogate_core.errors import ConfigError

from ..readers import kind_of_value
from .mask import ConversationScale, encode_chat
from .media import MEDIA_COLUMNS, refuse_media_columns, refuse_media_keys, refuse_media_part
from .omissions import REASONING_KEYS
from .tool_calls import Dropped, calls_of, from_json, others, tools_of, unseen_tools
from .trained_messages import NOT_ANSWERS, is_trained

if TYPE_CHECKING:  # the command line lists types without loading numpy and tokenizers
    from ..tokenizer import Tokenizer

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
}
"""Name of a speaker in data sets -> role in chat templates."""

_CALLS = ("function_call", "tool_call")
_PART = ("type", "text")
_WHY_DROPPED = {
    NOT_ANSWERS: "only answers are trained. To train all text, set loss_scale: all",
    **dict.fromkeys(
        ("messages", "parts of messages", "tool calls", "functions of tool calls"),
        "chat templates have no place for it",
    ),
}
_COLUMNS = ("messages", "conversations", "conversation")

LOSS_SCALE = (
    "What is trained. default: every answer, except answers whose reasoning the template drops while it keeps that of "
    "a later answer; last_round: the answers after the user's last message; all: all text."
)

TEMPLATE_KWARGS = (
    "Values of variables of the chat template, as a server gets them: `{enable_thinking: false}`. They apply to rows "
    "and to prompts."
)


class MessageProperties(BaseModel):
    """Names of the keys of a message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: str = "role"
    content: str = "content"
    tool_calls: str = "tool_calls"


class ConversationOptions(BaseModel):
    """Keys of a `datasets:` entry of type `conversation`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    messages_field: str = Field("messages", description="Column that holds the list of messages.")
    completion_field: str | None = Field(
        None, description="Column with the messages, or the text, that follow those of `messages_field`."
    )
    system_field: str | None = Field(
        "system", description="Column with the system prompt; a row may leave it empty. null: none is read."
    )
    tools_field: str | None = Field(
        "tools", description="Column with the tools: a list of JSON schemas, or its JSON text. null: none is read."
    )
    message_property_mappings: MessageProperties | None = Field(
        None,
        description="Names of the keys `role`, `content`, `tool_calls` in messages; "
        "null: these names, or `from` and `value` if a message has them.",
    )
    loss_scale: ConversationScale = Field(
        "default", description=f"{LOSS_SCALE} completion: the answers in `completion_field`."
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description=TEMPLATE_KWARGS)

    @model_validator(mode="after")
    def _check(self) -> ConversationOptions:
        if self.loss_scale == "completion" and self.completion_field is None:
            raise ValueError("loss_scale: completion needs completion_field")
        return self


@dataclass(frozen=True)
class Conversation:
    """A row as chat templates read it.

    messages   with their roles, texts and tool calls
    tools      the JSON schemas of the row; None if it has none
    prompt     number of messages in front of those of `completion_field`
    untrained  indices of messages that a key excludes from training
    dropped    parts of the row that no template has a place for
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    prompt: int
    untrained: Sequence[int]
    dropped: Dropped


def encode_conversation(row: Mapping[str, object], tokenizer: Tokenizer, options: ConversationOptions) -> Encoded:
    """Render the messages of a row and tokenize them; answers are trained, each with its end-of-turn token.

    Raises ConfigError if the row is not a conversation, or if the chat template refuses it.
    """
    chat = read_conversation(row, options)
    encoded = encode_chat(
        chat.messages,
        chat.tools,
        tokenizer,
        options.loss_scale,
        chat.untrained,
        prompt=chat.prompt,
        template_kwargs=options.chat_template_kwargs,
    )
    unseen = unseen_tools(chat.messages, chat.tools) if encoded.tokens else []
    ignored = [Omission(what, unit, _WHY_DROPPED[unit], count, count) for (what, unit), count in chat.dropped.items()]
    return replace(encoded, omissions=(*encoded.omissions, *unseen, *ignored))


def read_conversation(row: Mapping[str, object], options: ConversationOptions) -> Conversation:
    """Return the messages and the tools of a row. Raises ConfigError if it is not a conversation."""
    names = options.message_property_mappings
    dropped: Dropped = Counter()
    messages = _messages(row[options.messages_field], options.messages_field, names, dropped)
    prompt = len(messages)
    if options.completion_field is not None:
        given = row[options.completion_field]
        if isinstance(given, str) and not given.lstrip().startswith("["):
            given = [{"role": "assistant", "content": given}]
            messages += _messages(given, options.completion_field, None, dropped)
        else:
            messages += _messages(given, options.completion_field, names, dropped)
    refuse_media_columns(row, (message["content"] for message in messages))
    system = row.get(options.system_field) if options.system_field else None
    if system:
        if not isinstance(system, str):
            raise ConfigError(
                f"column {options.system_field!r} holds {kind_of_value(system)}, not text. Correct such rows, or set "
                "system_field: null."
            )
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
            prompt += 1
        elif messages[0]["content"].strip() != system.strip():
            raise ConfigError(
                f"column {options.system_field!r} holds a system prompt, and the messages begin with another. Remove "
                "one, or set system_field: null."
            )
    tools = tools_of(row.get(options.tools_field), options.tools_field) if options.tools_field else None
    for index, message in enumerate(messages):
        _check_text(message, f"message {index} ({message['role']})")
    _check_text(tools, f"column {options.tools_field!r}")
    untrained = [index for index, message in enumerate(messages) if not is_trained(message, index, dropped)]
    return Conversation(messages, tools, prompt, untrained, dropped)


def _messages(value: object, column: str, names: MessageProperties | None, dropped: Dropped) -> list[dict[str, Any]]:
    """Return the messages of a cell with the keys that chat templates read."""
    value = from_json(value)
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"column {column!r} holds {kind_of_value(value)}, not a list of messages. Set messages_field."
        )
    if not value:
        raise ConfigError(f"column {column!r} holds no message. Remove such rows.")
    return [
        _message(message, f"column {column!r}, message {index}", names, dropped) for index, message in enumerate(value)
    ]


def _message(value: object, where: str, names: MessageProperties | None, dropped: Dropped) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {kind_of_value(value)}, not an object with role and content. Correct such rows.")
    given = {str(key): item for key, item in value.items() if item is not None}  # tables fill missing keys with null
    if names is None:
        found = (_named(given, "role", "from"), _named(given, "content", "value"))
        names = MessageProperties(role=found[0], content=found[1])
    said = given.pop(names.role, None)
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise ConfigError(
            f"{where} has {names.role} {said!r}. Known: {', '.join(ROLES)}. Keys there: "
            f"{', '.join(given) or 'none'}. Correct the row, or set message_property_mappings."
        )
    refuse_media_keys(given, where)
    content, calls = given.pop(names.content, None), given.pop(names.tool_calls, None)
    if said in _CALLS and calls is None:
        content, calls = None, content
    for key in ("role", "content", "tool_calls"):  # set in a message that uses other names for them
        if given.pop(key, None) is not None:
            dropped[f"the key {key!r}", "messages"] += 1
    message: dict[str, Any] = {
        "role": role,
        "content": _content(content, calls, where, names.content, dropped),
        **given,
    }
    says_something = any(str(message.get(key) or "").strip() for key in ("content", *REASONING_KEYS))
    if role == "assistant" and not calls and not says_something:
        raise ConfigError(f"{where} is an empty message of the assistant. Remove the row, or the message.")
    if calls:
        if role != "assistant":
            raise ConfigError(f"{where} calls tools, but its role is {said}. Correct such rows.")
        message["tool_calls"] = calls_of(calls, where, dropped)
    return message


def _named(given: Mapping[str, Any], name: str, of_share: str) -> str:
    """Return the name of a key in a message: ours, or that of ShareGPT if the message has only that one."""
    return of_share if name not in given and of_share in given else name


def _content(content: object, calls: object, where: str, name: str, dropped: Dropped) -> str:
    """Return the text, or the joined text parts of a list of parts. Empty only if the message calls tools."""
    if isinstance(content, list | tuple):
        for index, part in enumerate(content):
            _refuse_other_part(part, f"{where}, part {index}")
        dropped.update((f"the key {key!r}", "parts of messages") for part in content for key in others(part, _PART))
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        return ""
    if not isinstance(content, str):
        raise ConfigError(
            f"{where} has {name} {kind_of_value(content)}, not text. Correct such rows: only text is trained."
        )
    return content


def _refuse_other_part(part: object, where: str) -> None:
    """Raise ConfigError unless a part of a message is text."""
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return
    refuse_media_part(part, where)
    kind = part.get("type") if isinstance(part, Mapping) else None
    found = "is of type text without a text" if kind == "text" else f"is {kind_of_value(part)}, not of type text"
    raise ConfigError(f"{where} {found}. Correct such rows: only text is trained.")


def _check_text(value: object, where: str) -> None:
    """Raise ConfigError if `value` is not JSON, or contains text that UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where} contains half a surrogate pair: not valid text. Correct the row.") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where} is not JSON: {error}. Correct the row.") from error


def _guess(columns: Sequence[str]) -> Mapping[str, Any]:
    found = {"messages_field": next((name for name in _COLUMNS if name in columns), "messages")}
    return found | {f"{name}_field": name for name in ("system", "tools") if name in columns}


def _fields(options: ConversationOptions) -> Sequence[str]:
    named = (options.messages_field, options.completion_field, options.system_field, options.tools_field)
    return [name for name in named if name is not None]


def _optional(options: ConversationOptions) -> Sequence[str]:
    return [name for name in (options.system_field, options.tools_field) if name is not None]


CONVERSATION = DatasetFormatDef(
    name="conversation",
    summary="messages in the model's chat template, the assistant's answers trained",
    options=ConversationOptions,
    matches=lambda columns: any(name in columns for name in _COLUMNS),
    fields=_fields,
    optional=_optional,
    encode=encode_conversation,  # type: ignore[arg-type]  # of core's tokenizer it needs the chat template
    guess=_guess,
    truncation="delete",
    version=3,
    mended={
        2: "arguments of tool calls that are no object, and answers with a key such as trainable: false, were trained",
        3: f"rows with images were trained as text: of messages with {', '.join(MEDIA_COLUMNS)} beside them",
    },
)
