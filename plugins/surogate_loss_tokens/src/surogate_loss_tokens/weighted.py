"""The dataset type `weighted`: a row is a list of segments, each with a text and a weight."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import ConfigError, DatasetFormatDef, Encoded

from .loss import WEIGHT


class WeightedOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    segments_field: str = Field("segments", description="Column with the segments: `{text: ..., weight: 0.5}` each.")


def encode(row: Mapping[str, Any], tokenizer: Any, options: WeightedOptions) -> Encoded:
    """Return the tokens of the segments, each tokenized alone, and eos. A segment of weight 0 is not trained."""
    segments = row[options.segments_field]
    if not isinstance(segments, list):
        raise ConfigError(f"column {options.segments_field!r} must be a list of segments (got {segments!r:.60})")
    tokens: list[int] = []
    weights: list[float] = []
    for number, segment in enumerate(segments):
        given = segment if isinstance(segment, Mapping) else {}
        text, weight = given.get("text"), given.get("weight", 1.0)
        number_given = isinstance(weight, int | float) and not isinstance(weight, bool) and isfinite(weight)
        if not isinstance(text, str) or not number_given or weight < 0 or given.keys() - {"text", "weight"}:
            raise ConfigError(
                f"{options.segments_field}.{number}: must be a text and a weight of at least 0, such as "
                f"{{text: hello, weight: 0.5}} (got {segment!r:.60})"
            )
        ids = tokenizer.encode_ids(text)
        tokens += ids
        weights += [float(weight)] * len(ids)
    if tokens and tokenizer.eos_id is not None:
        tokens.append(tokenizer.eos_id)
        weights.append(weights[-1])
    return Encoded(tokens, [weight > 0 for weight in weights], columns={WEIGHT.name: weights})


WEIGHTED = DatasetFormatDef(
    name="weighted",
    summary="segments of text with a weight each",
    options=WeightedOptions,
    matches=lambda columns: "segments" in columns,
    fields=lambda options: (options.segments_field,),
    encode=encode,
    truncation="delete",
    columns=(WEIGHT,),
)
