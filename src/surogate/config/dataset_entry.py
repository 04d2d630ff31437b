"""The keys of an entry of `datasets:`, whatever its type."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from .values import Bytes, Int, Keys, Number, Text

MAX_ROW_BYTES: Final = 1 << 26
MAX_DOCUMENT_BYTES: Final = 1 << 34


class DatasetEntry(Keys):
    """One entry of `datasets:` or `validation_datasets:`. The keys of the dataset's type stand in the same mapping."""

    path: Text = Field(description="A file, a folder or a URL of either, or a dataset of the Hugging Face Hub.")
    type: Text = Field("auto", description="Dataset type; auto: the first type that fits the columns.")
    subset: Text | None = Field(None, description="Subset (configuration) of a Hub dataset.")
    split: Text = Field("train", description="Split of a Hub dataset.")
    samples: Annotated[Int, Field(ge=1)] | None = Field(None, description="Use only the first N rows; null: all.")
    weight: Annotated[Number, Field(gt=0, le=1000)] | None = Field(
        None, description="Times each document is trained per epoch: 2 is twice, 0.5 a random half; null: once."
    )
    bad_rows: Literal["error", "skip"] = Field(
        "error", description="A row that its type refuses: error (all are counted, the first named), or skip it."
    )
    max_row_bytes: Bytes = Field(MAX_ROW_BYTES, description="Largest row of a file, decompressed; others are refused.")
    max_document_bytes: Bytes = Field(
        MAX_DOCUMENT_BYTES, description="Largest .txt file that is one document, decompressed; others are refused."
    )
    options: dict[str, Any] = Field({}, description="The keys of the type, validated by it.", exclude=True)
