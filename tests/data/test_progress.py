"""Long work is not silent, and says what an interrupt keeps."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from surogate.checkpoints.hf import write_merged
from surogate.config.dataset_entry import DatasetEntry
from surogate.data import tokenize as module
from surogate.data.formats import TEXT, TextOptions
from surogate.data.tokenize import tokenize_dataset
from surogate.data.tokenizer import Tokenizer
from surogate.machine import progress as progress_module
from surogate.machine.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_begins_after_two_seconds_with_a_line_every_fifteen() -> None:
    now, notes = [0.0], list[str]()
    with Progress("datasets.0: tokenizing", "rows", 2000, notes.append, lambda: now[0]) as progress:
        for second in range(40):
            now[0] = second
            progress(second * 50, f" ({second * 1000:,} tokens)")
    assert [note.split()[2] for note in notes] == ["100", "850", "1,600"]
    assert notes[0] == "datasets.0: tokenizing: 100 of 2,000 rows (2,000 tokens)"


def test_a_terminal_gets_a_bar_and_no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    now, notes = [0.0], list[str]()
    with Progress("datasets.0: tokenizing", "rows", 2000, notes.append, lambda: now[0]) as progress:
        progress(1)
        assert not sys.stderr.getvalue()
        now[0] = 3
        progress(100)
        progress(2000)
    shown = sys.stderr.getvalue()
    assert "datasets.0: tokenizing" in shown and "2000/2000" in shown and not notes


def test_an_interrupt_says_which_shards_are_kept(
    tmp_path: Path, tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARD_TOKENS", 100)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": f"{n}{play}"}) + "\n" for n in range(600)))
    entry = DatasetEntry(path=str(tmp_path / "a.jsonl"))
    notes: list[str] = []

    def stop(what: str) -> None:
        if what.endswith("row 512"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, moved=stop, notice=notes.append)
    assert notes == ["datasets: interrupted; 2 finished shards are kept: the next run continues there"]
    tokenize_dataset(entry, TEXT, TextOptions(), tokenizer, notice=notes.append)
    assert "continuing after 2 shards" in notes[1]


def test_rewriting_a_checkpoint_counts_its_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base, output = tmp_path / "base", tmp_path / "new"
    for folder in (base, output):
        folder.mkdir()
    save_file({name: torch.zeros(2) for name in "abc"}, base / "model.safetensors")
    (base / "config.json").write_text("{}")
    monkeypatch.setattr(progress_module, "_SILENT_SECONDS", 0.0)
    write_merged(output, base, {"b": lambda tensor: tensor + 1})
    assert capsys.readouterr().err == f"{base}: rewriting: 1 of 3 tensors\n"
    assert load_file(output / "model.safetensors")["b"].tolist() == [1, 1]
