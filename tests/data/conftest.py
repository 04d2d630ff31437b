"""Small tokenizers and the text of the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from surogate.data.tokenizer import Tokenizer

PLAY = (
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n\n"
    "First Citizen:\nYou are all resolved rather to die than to famish?\n"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def play() -> str:
    return PLAY


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    """Byte-level BPE of 300 tokens; <|endoftext|> is eos and pad."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([PLAY], trainer)
    return write_tokenizer(tmp_path / "tokenizer", backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


@pytest.fixture
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer(tokenizer_dir)


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Callable[[int], Tokenizer]:
    """A tokenizer whose words are "w0", "w1", ... with these ids."""

    def make(n_words: int) -> Tokenizer:
        backend = tokenizers.Tokenizer(models.WordLevel({f"w{i}": i for i in range(n_words)}, unk_token="w0"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return Tokenizer(write_tokenizer(tmp_path / f"words{n_words}", backend))

    return make


def write_tokenizer(directory: Path, backend: tokenizers.Tokenizer, **settings: object) -> Path:
    directory.mkdir()
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory
