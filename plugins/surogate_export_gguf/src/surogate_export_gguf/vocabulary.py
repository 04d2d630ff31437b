"""Texts and types of the tokens of a file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import TokenType

from surogate_core.api import ConfigError

BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Tokens:
    """The tokens of a file.

    texts  in the order of the ids
    types  of `gguf.TokenType`
    """

    texts: list[str]
    types: list[TokenType]


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object of a file. Raises ConfigError if it is missing or is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} has no {path.name}, from which a GGUF file has its tokens. Copy that of the base."
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}. Copy that of the base.") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold a JSON object. Copy that of the base.")
    return found


def tokens_of(tokenizer: Mapping[str, Any], size: int) -> Tokens:
    """Return the tokens of a parsed tokenizer.json for a model with `size` of them. Raises ConfigError."""
    model, added = tokenizer["model"], tokenizer.get("added_tokens") or []
    vocabulary: Mapping[str, int] = model["vocab"]
    ids = {**vocabulary, **{token["content"]: token["id"] for token in added}}
    last = max(ids, key=lambda text: ids[text])
    if ids[last] >= size:
        reason = f"tokenizer.json has {last!r} as id {ids[last]}"
        raise ConfigError(f"vocab_size: {reason}, for which the model has no row (got {size}). Is it another model's?")
    texts = [unused(i, ids) for i in range(size)]
    types = [TokenType.UNUSED] * size
    for text, i in vocabulary.items():
        texts[i], types[i] = text, plain_type(text, model)
    for token in added:
        check_added(token)
        i = token["id"]
        texts[i], types[i] = token["content"], TokenType.CONTROL if token["special"] else TokenType.USER_DEFINED
        if token["content"] == model.get("unk_token") and model.get("byte_fallback"):
            types[i] = TokenType.UNKNOWN
    return Tokens(texts, types)


def plain_type(text: str, model: Mapping[str, Any]) -> TokenType:
    """Return the type of a token that is not added."""
    if model.get("byte_fallback") and BYTE.fullmatch(text):
        return TokenType.BYTE
    return TokenType.UNKNOWN if text == model.get("unk_token") else TokenType.NORMAL


def check_added(token: Mapping[str, Any]) -> None:
    """Refuse a token that is found in text by rules that llama.cpp does not have."""
    for rule in ("lstrip", "single_word"):
        if token.get(rule):
            name = token["content"]
            raise ConfigError(
                f"{name!r} has {rule}: true in tokenizer.json, which llama.cpp does not know. Set it to false there."
            )


def unused(i: int, ids: Mapping[str, int]) -> str:
    """Return a text for a row of the embedding without a token, which no token has."""
    text = f"[PAD{i}]"
    while text in ids:
        text = f"[{text}]"
    return text
