"""Images, videos and sound in rows: refused by name, because only text is trained."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from surogate_core.errors import ConfigError

from ..columns import holds_something

_LISTS: Final = ("images", "videos", "audios")
_SINGLE: Final = ("image", "video", "audio")
MEDIA_COLUMNS: Final = (*_LISTS, *_SINGLE)
"""Columns, and keys of messages, that hold images, videos or sound. A single one may be beside any text."""

_KIND = re.compile("image|video|audio")
_PLACEHOLDER = re.compile(r"<\|?(?:image|video|audio)(?:_pad|_?\d+)?\|?>|<\|vision_start\|>|<start_of_image>|\[IMG\]")
_REMEDY: Final = "this program trains text only. Remove such rows."


def refuse_media_columns(row: Mapping[str, Any], texts: Iterable[str]) -> None:
    """Raise ConfigError if a row has images, videos or sound that its `texts` are about.

    A column `image`, `video` or `audio` counts where a text has a place for it, such as <image>.
    """
    filled = [name for name in MEDIA_COLUMNS if holds_something(row.get(name))]
    if not filled:
        return
    if filled[0] in _LISTS:
        raise ConfigError(f"column {filled[0]!r} holds what the text is about: {_REMEDY}")
    place = next((found[0] for text in texts if (found := _PLACEHOLDER.search(text))), None)
    if place is not None:
        raise ConfigError(f"column {filled[0]!r} holds what {place} in the text stands for: {_REMEDY}")


def refuse_media_keys(message: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError if a message has images, videos or sound beside its text."""
    for name in MEDIA_COLUMNS:
        if holds_something(message.get(name)):
            raise ConfigError(f"{where} has {name}: {_REMEDY}")


def refuse_media_part(part: object, where: str) -> None:
    """Raise ConfigError if a part of a message is an image, a video or sound: by its type, or by its keys."""
    if not isinstance(part, Mapping):
        return
    kind = part.get("type")
    named = [kind] if isinstance(kind, str) else [key for key, value in part.items() if holds_something(value)]
    found = next((name for name in named if _KIND.search(str(name))), None)
    if found is not None:
        raise ConfigError(f"{where} is of type {str(found)[:40]}: {_REMEDY}")
