"""The dataset type `preference`: a prompt, a chosen and a rejected answer. Each pair is two documents, chosen first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from pydantic import Field

from surogate_core.api import Column, ConfigError, DatasetFormatDef, Encoded

from .answers import MENDED, VERSION, AnswerOptions, encode_answers, guessed_prompt, named

_ANSWERS = {"chosen": ("chosen", "chosen_response"), "rejected": ("rejected", "rejected_response")}


MARGIN = Column("margin", "document")
"""The lead of the chosen answer of a pair, at both of its documents."""


class PreferenceOptions(AnswerOptions):
    chosen_field: str = Field("chosen", description="Column with the better answer: text, a message or messages.")
    rejected_field: str = Field("rejected", description="Column with the worse answer.")


def encode(row: Mapping[str, Any], tokenizer: Any, options: PreferenceOptions) -> Sequence[Encoded]:
    """Return the chosen and the rejected document of a row. Raises ConfigError if it is no pair."""
    chosen, rejected = options.chosen_field, options.rejected_field
    if row[chosen] and row[chosen] == row[rejected]:
        raise ConfigError(f"{chosen} and {rejected} are equal. Remove such rows.")
    pair = encode_answers(row, tokenizer, options, (chosen, rejected))
    if len(pair) == 2 and list(pair[0].tokens) == list(pair[1].tokens):
        raise ConfigError(f"{chosen} and {rejected} have the same tokens. Remove such rows.")
    return pair


def _found(columns: Sequence[str]) -> Mapping[str, Any]:
    found = {f"{kind}_field": next((n for n in names if n in columns), names[0]) for kind, names in _ANSWERS.items()}
    return {**found, **guessed_prompt(columns)}


PREFERENCE = DatasetFormatDef(
    name="preference",
    summary="a prompt with a chosen and a rejected answer",
    options=PreferenceOptions,
    matches=lambda columns: all(any(name in columns for name in names) for names in _ANSWERS.values()),
    fields=lambda options: named(options, "prompt", "input", "chosen", "rejected", "system", "tools"),
    optional=lambda options: named(options, "input", "system", "tools"),
    encode=encode,
    found=_found,
    truncation="delete",
    group_size=2,
    version=VERSION,
    mended=MENDED,
)


class MarginOptions(PreferenceOptions):
    margin_field: str = Field(
        "margin", description="Column that says how much better the chosen answer is: a number of at least 0."
    )


def _encode_with_margin(row: Mapping[str, Any], tokenizer: Any, options: MarginOptions) -> Sequence[Encoded]:
    value = row[options.margin_field]
    try:
        margin = float("" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        margin = -1.0
    if not (isfinite(margin) and margin >= 0):
        raise ConfigError(f"column {options.margin_field!r} must be a number of at least 0 (got {value!r:.60})")
    pair = encode(row, tokenizer, options)
    return [one if one.left_out else replace(one, columns={MARGIN.name: margin}) for one in pair]


PREFERENCE_WITH_MARGIN = DatasetFormatDef(
    name="preference_with_margin",
    summary="a prompt with a chosen and a rejected answer, and how much better it is, for loss: reward",
    options=MarginOptions,
    matches=lambda columns: False,  # such columns are pairs first of all
    fields=lambda options: named(options, "prompt", "input", "chosen", "rejected", "margin", "system", "tools"),
    optional=lambda options: named(options, "input", "system", "tools"),
    encode=_encode_with_margin,
    found=_found,
    truncation="delete",
    columns=(MARGIN,),
    group_size=2,
    version=VERSION,
    mended=MENDED,
)
