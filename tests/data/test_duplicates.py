"""Documents that occur more than once are counted, and those that are validated and trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surogate.config.dataset_entry import DatasetEntry
from surogate.config.schema import TrainConfig
from surogate.data.corpora import load_corpora
from surogate.data.tokenizer import Tokenizer
from surogate.plugin import surogate_dataset_formats

FORMATS = {definition.name: definition for definition in surogate_dataset_formats()}


def printed(tmp_path: Path, tokenizer: Tokenizer, texts: dict[str, list[str]], **keys: Any) -> list[str]:
    entries = {}
    for name, rows in texts.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
        entries[name] = [DatasetEntry(path=str(tmp_path / f"{name}.jsonl"), type="text")]
    notes: list[str] = []
    config = TrainConfig(**{"model": "model", "sequence_len": 64, **entries, **keys})
    load_corpora(config, FORMATS, tokenizer.directory, tokenizer.vocab_size, notes.append)
    return notes


def test_duplicates_are_counted_also_across_the_validation_set(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = [f"document {n % 20:02d}" for n in range(200)]
    expected = ["datasets: 180 of 200 documents are duplicates; 20 of 20 in the validation set are trained too"]
    for _ in ("tokenized", "from the cache"):
        assert printed(tmp_path, tokenizer, {"datasets": texts}, validation_split_ratio=0.1) == expected
    once = [f"document {n:02d}" for n in range(90)]
    assert printed(tmp_path, tokenizer, {"datasets": once}, validation_split_ratio=0.1) == []


def test_a_validation_set_of_its_own_is_compared_with_what_is_trained(tmp_path: Path, tokenizer: Tokenizer) -> None:
    notes = printed(tmp_path, tokenizer, {"datasets": ["a", "b", "c"], "validation_datasets": ["b", "d"]})
    assert notes == ["datasets: 1 of 2 in the validation set are trained too"]


def test_a_document_that_is_cut_for_validation_is_no_duplicate(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert printed(tmp_path, tokenizer, {"datasets": ["word " * 300]}, validation_split_ratio=0.3) == []
