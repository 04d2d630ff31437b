"""The keys of a message that say whether it is trained."""

from __future__ import annotations

import re
from typing import Any

from surogate_core.errors import ConfigError

from .tool_calls import Dropped

NOT_ANSWERS = "messages that are not the assistant's"

KEYS = (
    *("weight", "train", "loss"),  # OpenAI, axolotl, ms-swift
    *("training", "trainable", "train_on_turn", "loss_mask", "step_loss_mask", "loss_weight"),
)
"""1 or true: the message is trained; 0 or false: it is not."""

_IN_PART = ("train_detail", "training_detail")
"""Keys of axolotl that select characters of an answer."""

_LIKE_A_MASK = re.compile(
    r"(^|_)(mask|masks|masked|train|trained|training|trainable|loss|weight|supervised?|ignored?)(_|$)", re.IGNORECASE
)


def is_trained(message: dict[str, Any], index: int, dropped: Dropped) -> bool:
    """Return whether the keys of a message let it be trained, and remove these keys from it.

    Raises ConfigError for a value that is not yes or no, for keys that contradict each other, and for a key that looks
    like one of these and may mean the opposite ("mask").
    """
    where = f"message {index} ({message['role']})"
    partly = next((key for key in _IN_PART if key in message), None)
    if partly is not None:
        raise ConfigError(f"{where} has {partly}: parts of an answer cannot be trained alone. Remove it, or use train.")
    found = {}
    for key in KEYS:
        value = message.pop(key, None)
        if value is None:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ConfigError(
                f"{where} has {key} {value!r}: an answer is trained or not, 1 or 0 (true or false). Correct such rows."
            )
        found[key] = value == 1
    if len(set(found.values())) > 1:
        raise ConfigError(f"{where} has contradictory keys: {found}. Remove one of them.")
    for key, value in message.items():
        if _LIKE_A_MASK.search(key) and isinstance(value, bool | int | float | list):
            raise ConfigError(
                f"{where} has {key} {value!r:.40}, which may say what is trained, or what is not. Write train: true or "
                "train: false instead, or remove it."
            )
    for key, trained in found.items():
        if trained and message["role"] != "assistant":
            dropped[f"the key {key!r}", NOT_ANSWERS] += 1
    return all(found.values())
