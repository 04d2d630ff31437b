"""Rows that their type refuses are counted and named together, or left out and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate.config.dataset_entry import DatasetEntry
from surogate.data import tokenize as module
from surogate.data.cache import TokenDataset
from surogate.data.formats import TEXT, TextOptions
from surogate.data.skipped_rows import cause
from surogate.data.tokenize import tokenize_dataset
from surogate.data.tokenizer import Tokenizer
from surogate_core.errors import ConfigError


def tokenized(path: Path, texts: list[Any], tokenizer: Tokenizer, notes: list[str], skip: bool) -> TokenDataset:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    entry = DatasetEntry(path=str(path))
    return tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, notice=notes.append, skip_bad=skip)


def test_all_bad_rows_are_counted_and_the_first_five_named(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = [n if n % 100 == 7 else "Speak." for n in range(900)]
    with pytest.raises(ConfigError, match="9 rows cannot be used") as error:
        tokenized(tmp_path / "a.jsonl", texts, tokenizer, [], skip=False)
    lines = str(error.value).splitlines()
    assert "bad_rows: skip" in lines[0]
    assert [line.split(": ")[0].rsplit(":")[-1] for line in lines[1:]] == ["8", "108", "208", "308", "408"]


def test_one_bad_row_is_told_how_to_be_left_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(
        ConfigError, match=r"a.jsonl:2: column 'text' .*Or set bad_rows: skip, which leaves such rows out"
    ):
        tokenized(tmp_path / "a.jsonl", ["Speak.", 1], tokenizer, [], skip=False)


def test_causes_do_not_quote_rows_and_are_few(tmp_path: Path, tokenizer: Tokenizer) -> None:
    notes: list[str] = []
    tokenized(tmp_path / "a.jsonl", ["Speak.", *range(200)], tokenizer, notes, skip=True)
    (note,) = notes
    assert "200 of 201 rows" in note
    error = ConfigError("message 3 (assistant) has weight 'a (b) \\' c' in column 'text': more. Correct 1 row.")
    assert cause(error, ["text"]).endswith("refuses them: message N has weight '...' in column 'text': more")


def test_counting_ends_at_a_limit(tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_BAD", 300)
    with pytest.raises(ConfigError, match="at least 512 rows cannot be used"):
        tokenized(tmp_path / "a.jsonl", [1] * 20_000, tokenizer, [], skip=False)


def test_skipped_rows_are_counted_also_from_the_cache(tmp_path: Path, tokenizer: Tokenizer) -> None:
    texts = ["Speak.", 1, "All.", None]
    for _ in range(2):
        notes: list[str] = []
        assert tokenized(tmp_path / "a.jsonl", texts, tokenizer, notes, skip=True).n_docs == 2
        assert [note.partition("refuses them: ")[2] for note in notes] == [
            "column 'text' holds a number, not text (first: a.jsonl:2)",
            "column 'text' holds null, not text (first: a.jsonl:4)",
        ]
    with pytest.raises(ConfigError, match="2 rows cannot be used"):
        tokenized(tmp_path / "a.jsonl", texts, tokenizer, [], skip=False)
