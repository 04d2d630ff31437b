"""Reasons why a checkpoint has other tokens than the present code makes of the same data, and the way to go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from surogate_core.api import DatasetFormatDef

from ..data.chat.conversation import CONVERSATION
from ..data.saved_tokens import KEY
from .facts import DATA, DATASETS

_GO_ON = f"{KEY}: true goes on with the saved tokens, if their cache is still there."


def other_tokens(
    saved: Mapping[str, Any], now: Mapping[str, Any], formats: Mapping[str, DatasetFormatDef], asked: bool
) -> str:
    """Return what to say to a run that has other tokens than a checkpoint; "" if nothing is known.

    saved, now: facts. asked: the run has asked for the saved tokens.
    """
    if asked:
        return ""
    mended = list(dict.fromkeys(_mended(saved, now, formats)))
    if mended:
        return f"Faults of dataset types were mended since: {'; '.join(mended)}. {_GO_ON}"
    if "content" not in saved.get(DATA, {}):
        return f"The version that saved it kept no hash of the tokens themselves. {_GO_ON}"
    return ""


def _mended(saved: Mapping[str, Any], now: Mapping[str, Any], formats: Mapping[str, DatasetFormatDef]) -> Iterator[str]:
    """Yield the fault of each version between the saved one and the present one of each dataset."""
    for index, new in enumerate(now[DATASETS]):
        # a checkpoint without versions counts as version 1 of the types of now
        old = (
            saved[DATASETS][index] if index < len(saved.get(DATASETS, ())) else {**new, "version": 1, "conversation": 1}
        )
        definition = formats.get(new.get("type", ""))
        if definition is None or old.get("type") != definition.name:
            continue
        steps = [(definition, old.get("version", 1), new["version"])]
        if "conversation" in new:  # a type of a plugin may encode conversations
            steps.append((CONVERSATION, old.get("conversation", 1), new["conversation"]))
        for of, then, version in steps:
            for mending in range(then + 1, version + 1):
                yield of.mended.get(mending, f"version {mending} of dataset type {of.name} makes other tokens")
