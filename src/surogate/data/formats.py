"""The dataset type `text`, for plain language modelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import DatasetFormatDef, Encoded, Tokenizer
from surogate_core.errors import ConfigError

from .readers import kind_of_value


class TextOptions(BaseModel):
    """Keys of a `datasets:` entry of type `text`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    text_field: str = Field("text", description="Column that holds the text.")
    sample_by: Literal["document", "paragraph", "line"] = Field(
        "document",
        description="A document in a .txt file: the whole file, a paragraph (between blank lines), or a line.",
    )
    add_bos: bool | None = Field(
        None, description="Start each document with the tokenizer's bos; null: if the tokenizer itself does."
    )


def encode_text(
    row: Mapping[str, object], tokenizer: Tokenizer, options: TextOptions, first: bool = True, last: bool = True
) -> Encoded:
    """Return [bos] + tokens of the text + eos, all trained; nothing for an empty text.

    first, last: whether it is the start of the text and gets bos, and the end, and gets eos.
    """
    text = row[options.text_field]
    if not isinstance(text, str):
        raise ConfigError(
            f"column {options.text_field!r} holds {kind_of_value(text)}, not text. Set text_field to a column of "
            "strings, or remove such rows."
        )
    if not text:
        return Encoded((), ())
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"column {options.text_field!r} contains half a surrogate pair at character {error.start}, which is not "
            "valid text. Correct or remove such rows."
        ) from error
    tokens = list(tokenizer.encode_ids(text))
    add_bos = tokenizer.adds_bos if options.add_bos is None else options.add_bos
    if add_bos and first:
        if tokenizer.bos_id is None:
            raise ConfigError("add_bos is true, but the tokenizer defines no bos token. Remove add_bos.")
        tokens.insert(0, tokenizer.bos_id)
    if tokenizer.eos_id is not None and last:
        tokens.append(tokenizer.eos_id)
    return Encoded(tokens, [True] * len(tokens))


TEXT = DatasetFormatDef(
    name="text",
    summary="plain text, every token trained",
    options=TextOptions,
    matches=lambda columns: "text" in columns,
    fields=lambda options: (options.text_field,),
    encode=encode_text,
    encode_part=encode_text,
)
