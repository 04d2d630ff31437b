"""A dataset type for Surogate: a question, which the model reads, and an answer, which it learns"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import ConfigError, DatasetFormatDef, Encoded, Tokenizer, provides

SUROGATE_API = {"dataset_formats": 1}


class Options(BaseModel):
    """Keys of an entry of `datasets:` with this type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    question_field: str = Field("question", description="Column of the text that the model reads.")
    answer_field: str = Field("answer", description="Column of the text that the model learns to produce.")


def encode(row: Mapping[str, Any], tokenizer: Tokenizer, options: Options) -> Encoded:
    """Return a document: its tokens, and for each of them whether it is trained."""
    texts = row[options.question_field], row[options.answer_field]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"question and answer must be text, found {texts}. Correct or remove such rows.")
    question, answer = (list(tokenizer.encode_ids(text)) for text in texts)
    if tokenizer.eos_id is not None:
        answer.append(tokenizer.eos_id)
    return Encoded(question + answer, [False] * len(question) + [True] * len(answer))


surogate_dataset_formats = provides(
    [
        DatasetFormatDef(
            name="acme_toy",
            summary="a question that is read and an answer that is trained",
            options=Options,
            matches=lambda columns: {"question", "answer"} == set(columns),
            fields=lambda options: (options.question_field, options.answer_field),
            encode=encode,
            truncation="delete",
        )
    ]
)
