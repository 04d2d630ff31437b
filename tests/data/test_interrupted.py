"""Ctrl-C while data is tokenized ends it at once, and says what is kept."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from surogate.config.dataset_entry import DatasetEntry
from surogate.data import tokenize as module
from surogate.data.chat import render_budget
from surogate.data.chat.conversation import CONVERSATION, ConversationOptions
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.formats import TEXT, TextOptions
from surogate.data.row import Row
from surogate.data.sources import FileSource
from surogate.data.tokenize import tokenize_dataset

ENTRY = DatasetEntry(path="rows.jsonl")


class Endless(FileSource):
    """Rows without end."""

    def content_hash(self) -> str:
        return "endless"

    def rows(self, columns: object, optional: object = (), divide: object = None) -> Iterator[Row]:
        values = {
            "text": "Speak.",
            "messages": [{"role": "user", "content": "Speak."}, {"role": "assistant", "content": "No."}],
        }
        return (Row(f"rows.jsonl:{number}", values, number) for number in itertools.count())


@pytest.fixture
def interrupted() -> Iterator[None]:
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    yield
    timer.cancel()


@pytest.mark.usefixtures("interrupted")
def test_a_first_interrupt_ends_tokenizing_and_says_that_nothing_is_kept(tokenizer_dir: Path) -> None:
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        tokenize_dataset(
            ENTRY, TEXT, TextOptions(), RowTokenizer(tokenizer_dir), notice=notes.append, source=Endless((), "", None)
        )
    assert notes == ["datasets: interrupted; no shard was finished, so nothing is kept: the next run starts anew"]


@pytest.mark.usefixtures("interrupted")
def test_finished_shards_are_named(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 100)
    notes: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        tokenize_dataset(
            ENTRY, TEXT, TextOptions(), RowTokenizer(tokenizer_dir), notice=notes.append, source=Endless((), "", None)
        )
    assert notes[-1].startswith("datasets: interrupted; ")
    assert notes[-1].endswith(" finished shards are kept: the next run continues there")


@pytest.mark.usefixtures("interrupted")
def test_an_interrupt_does_not_wait_for_a_rendering(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_budget, "SECONDS", 3600)
    endless = "{% macro m(n) %}{% if n < 60 %}{{ m(n + 1) }}{{ m(n + 1) }}{% endif %}{% endmacro %}{{ m(0) }}"
    monkeypatch.setattr(render_budget, "MOST_WORK", 1 << 60)
    (tokenizer_dir / "chat_template.jinja").write_text(endless)
    with pytest.raises(KeyboardInterrupt):
        tokenize_dataset(
            ENTRY,
            CONVERSATION,
            ConversationOptions(),
            RowTokenizer(tokenizer_dir),
            notice=lambda line: None,
            source=Endless((), "", None),
        )
