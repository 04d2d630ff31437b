"""The dataset type `conversation`: messages, rendered by the model's own chat template."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from ...api import DatasetFormatDef, Encoded, Omission
from ...errors import ConfigError
from ..readers import kind_of_value
from .mask import LossScale, encode_chat
from .omissions import REASONING_KEYS

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
_FUNCTION = ("name", "arguments")
_NOT_ANSWERS = "messages that are not the assistant's"
_WHY_DROPPED = {
    _NOT_ANSWERS: "only answers are trained. To train all text, set loss_scale: all",
    **dict.fromkeys(
        ("messages", "parts of messages", "tool calls", "functions of tool calls"),
        "chat templates have no place for it",
    ),
}
_WHY_UNSEEN = (
    "the row does not show a function that it calls, so the model learns to call what it never sees. Add the column "
    "`tools`, or set tools_field"
)
_COLUMNS = ("messages", "conversations", "conversation")

_TRAINS = {"weight": (0, 1), "train": (False, True), "loss": (False, True)}
"""Keys that say whether an answer is trained (OpenAI, axolotl, ms-swift) -> values for no and yes."""
_TRAINS_IN_PART = ("train_detail", "training_detail")
"""Keys of axolotl that select characters of an answer."""

LOSS_SCALE = (
    "What is trained. default: every answer, except answers whose reasoning the template drops while it keeps that of "
    "a later answer; last_round: the answers after the user's last message; all: all text."
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
    loss_scale: LossScale = Field("default", description=LOSS_SCALE)


def encode_conversation(row: Mapping[str, object], tokenizer: Tokenizer, options: ConversationOptions) -> Encoded:
    """Render the messages of a row and tokenize them; answers are trained, each with its end-of-turn token.

    Raises ConfigError if the row is not a conversation, or if the chat template refuses it.
    """
    names = options.message_property_mappings
    dropped: Counter[tuple[str, str]] = Counter()
    messages = _messages(row[options.messages_field], options.messages_field, names, dropped)
    if options.completion_field is not None:
        given = row[options.completion_field]
        if isinstance(given, str) and not given.lstrip().startswith("["):
            given = [{"role": "assistant", "content": given}]
            messages += _messages(given, options.completion_field, None, dropped)
        else:
            messages += _messages(given, options.completion_field, names, dropped)
    system = row.get(options.system_field) if options.system_field else None
    if system:
        if not isinstance(system, str):
            raise ConfigError(
                f"column {options.system_field!r} holds {kind_of_value(system)}, not text. Correct such rows, or set "
                "system_field: null."
            )
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        elif messages[0]["content"].strip() != system.strip():
            raise ConfigError(
                f"column {options.system_field!r} holds a system prompt, and the messages begin with another. Remove "
                "one, or set system_field: null."
            )
    tools = _tools(row.get(options.tools_field), options.tools_field) if options.tools_field else None
    for index, message in enumerate(messages):
        _check_text(message, f"message {index} ({message['role']})")
    _check_text(tools, f"column {options.tools_field!r}")
    untrained = [index for index, message in enumerate(messages) if not _is_trained(message, index, dropped)]
    encoded = encode_chat(messages, tools, tokenizer, options.loss_scale, untrained)
    unseen = _unseen_tools(messages, tools) if encoded.tokens else []
    ignored = [Omission(what, unit, _WHY_DROPPED[unit], count, count) for (what, unit), count in dropped.items()]
    return replace(encoded, omissions=(*encoded.omissions, *unseen, *ignored))


def _is_trained(message: dict[str, Any], index: int, dropped: Counter[tuple[str, str]]) -> bool:
    """Return whether a message is trained according to the keys of `_TRAINS`, and remove these keys from it."""
    where = f"message {index} ({message['role']})"
    partly = next((key for key in _TRAINS_IN_PART if key in message), None)
    if partly is not None:
        raise ConfigError(f"{where} has {partly}: parts of an answer cannot be trained alone. Remove it, or use train.")
    found = {}
    for key, (no, yes) in _TRAINS.items():
        value = message.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (no, yes):
            raise ConfigError(
                f"{where} has {key} {value!r}: an answer is trained or not, {yes!r} or {no!r}. Correct such rows."
            )
        found[key] = value == yes
    if len(set(found.values())) > 1:
        raise ConfigError(f"{where} has contradictory keys: {found}. Remove one of them.")
    for key, trained in found.items():
        if trained and message["role"] != "assistant":
            dropped[f"the key {key!r}", _NOT_ANSWERS] += 1
    return all(found.values())


def _messages(
    value: object, column: str, names: MessageProperties | None, dropped: Counter[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Return the messages of a cell with the keys that chat templates read."""
    value = _from_json(value)
    if not isinstance(value, list | tuple):
        raise ConfigError(
            f"column {column!r} holds {kind_of_value(value)}, not a list of messages. Set messages_field."
        )
    if not value:
        raise ConfigError(f"column {column!r} holds no message. Remove such rows.")
    return [
        _message(message, f"column {column!r}, message {index}", names, dropped) for index, message in enumerate(value)
    ]


def _message(
    value: object, where: str, names: MessageProperties | None, dropped: Counter[tuple[str, str]]
) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {kind_of_value(value)}, not an object with role and content. Correct such rows.")
    given = {str(key): item for key, item in value.items() if item is not None}  # tables fill missing keys with null
    if names is None:
        is_share = "role" not in given and "from" in given
        names = MessageProperties(role="from", content="value") if is_share else MessageProperties()
    said = given.pop(names.role, None)
    role = ROLES.get(said) if isinstance(said, str) else None
    if role is None:
        raise ConfigError(
            f"{where} has {names.role} {said!r}. Known: {', '.join(ROLES)}. Keys there: "
            f"{', '.join(given) or 'none'}. Correct the row, or set message_property_mappings."
        )
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
        message["tool_calls"] = _tool_calls(calls, where, dropped)
    return message


def _content(content: object, calls: object, where: str, name: str, dropped: Counter[tuple[str, str]]) -> str:
    """Return the text, or the joined text parts of a list of parts. Empty only if the message calls tools."""
    if isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        dropped.update((f"the key {key!r}", "parts of messages") for part in content for key in _others(part, _PART))
        content = "".join(part["text"] for part in content)
    if content is None and calls:
        return ""
    if not isinstance(content, str):
        raise ConfigError(
            f"{where} has {name} {kind_of_value(content)}, not text. Correct such rows: only text is trained."
        )
    return content


def _others(value: Mapping[Any, Any], known: Sequence[str]) -> list[Any]:
    """Return the keys that are neither known nor null."""
    return [key for key, item in value.items() if key not in known and item is not None]


def _tool_calls(value: object, where: str, dropped: Counter[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return calls in the form of templates: {"type", "function": {"name", "arguments"}}, the arguments an object."""
    value = _from_json(value)
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, list | tuple):
        raise ConfigError(f"{where} has tool_calls {kind_of_value(value)}, not a list of calls. Correct such rows.")
    found = []
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ConfigError(
                f"{where} has a tool call without the name of a function: {kind_of_value(call)}. Correct it."
            )
        own = {key: call[key] for key in _others(call, _FUNCTION)}
        if "function" in call:
            dropped.update((f"the key {key!r}", "functions of tool calls") for key in _others(function, _FUNCTION))
            dropped.update((f"the key {key!r}", "tool calls") for key in _FUNCTION if call.get(key) is not None)
        arguments = _from_json(function.get("arguments", {}))
        found.append({"type": "function", **own, "function": {"name": function["name"], "arguments": arguments}})
    return found


def _tools(value: object, column: str) -> list[Any] | None:
    value = _from_json(value)
    if value is None or value in ("", []):
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise ConfigError(
            f"column {column!r} holds {kind_of_value(value)}, not a list of tools (JSON schemas). Correct it."
        )
    return value


def _unseen_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[Omission]:
    """Count a conversation that calls a function which neither its tools nor a message that is no answer names."""
    called = {call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    given = [message["content"] for message in messages if message["role"] not in ("assistant", "tool")]
    shown = "\n".join([json.dumps(tools, ensure_ascii=False), *given])
    unseen = any(name not in shown for name in called)
    return [Omission("the tools", "conversations with calls", _WHY_UNSEEN, int(unseen), 1)] if called else []


def _from_json(value: object) -> object:
    """Parse the text of a JSON object or list; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


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
)
