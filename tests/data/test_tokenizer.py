from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from surogate_core.data import tokenizer as module
from surogate_core.data.tokenizer import Tokenizer
from surogate_core.errors import ConfigError


def edit(path: Path, **changes: object) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**content, **changes}))


def test_special_tokens_come_from_tokenizer_config(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.padding_id) == (None, 0, 0, 0)
    assert not tokenizer.adds_bos


def test_eos_falls_back_to_generation_config_then_config(tokenizer_dir: Path) -> None:
    (tokenizer_dir / "tokenizer_config.json").write_text("{}")
    edit(tokenizer_dir / "config.json", eos_token_id=5, pad_token_id=7)
    assert Tokenizer(tokenizer_dir).eos_id == 5
    edit(tokenizer_dir / "generation_config.json", eos_token_id=[6, 5])
    found = Tokenizer(tokenizer_dir)
    assert (found.eos_id, found.pad_id) == (6, 7)


def test_bos_of_config_json_is_ignored_when_the_tokenizer_is_configured(tokenizer_dir: Path) -> None:
    """Qwen's config.json names a bos that its tokenizer never writes."""
    edit(tokenizer_dir / "config.json", bos_token_id=0)
    assert Tokenizer(tokenizer_dir).bos_id is None
    (tokenizer_dir / "tokenizer_config.json").unlink()
    assert Tokenizer(tokenizer_dir).bos_id == 0


def test_bos_is_added_when_the_tokenizer_itself_adds_it(tokenizer_dir: Path) -> None:
    edit(tokenizer_dir / "tokenizer_config.json", bos_token="<|endoftext|>")
    assert not Tokenizer(tokenizer_dir).adds_bos
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing("<|endoftext|> $A", None, [("<|endoftext|>", 0)])
    backend.save(str(tokenizer_dir / "tokenizer.json"))
    assert Tokenizer(tokenizer_dir).adds_bos
    edit(tokenizer_dir / "tokenizer_config.json", add_bos_token=False)
    assert not Tokenizer(tokenizer_dir).adds_bos


def test_truncation_and_padding_of_the_file_are_switched_off(tokenizer_dir: Path, play: str) -> None:
    whole = Tokenizer(tokenizer_dir).encode_ids(play)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=1000)
    backend.save(str(tokenizer_dir / "tokenizer.json"))
    assert Tokenizer(tokenizer_dir).encode_ids(play) == whole


def test_long_text_read_in_pieces_has_the_tokens_of_the_whole(
    tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = play * 20 + "x" * 500
    whole = tokenizer.encode_ids(text)
    monkeypatch.setattr(module, "PIECE_CHARS", 50)
    assert len(list(module._pieces(text, 50))) > 20
    assert tokenizer.encode_ids(text) == whole


def test_token_bytes_add_up_to_the_text(tokenizer: Tokenizer, play: str) -> None:
    text = play + "é€😀<|endoftext|>"
    size = tokenizer.token_bytes[np.array(tokenizer.encode_ids(text))].sum()
    assert size == len((play + "é€😀").encode())  # a special token is no text


def test_fingerprint_changes_with_the_files(tokenizer_dir: Path) -> None:
    first = Tokenizer(tokenizer_dir).fingerprint
    assert Tokenizer(tokenizer_dir).fingerprint == first
    edit(tokenizer_dir / "tokenizer_config.json", eos_token=None)
    assert Tokenizer(tokenizer_dir).fingerprint != first


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "[1]", "holds a list"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "'<nope>' is not in"),
    ],
)
def test_unusable_files_are_named(tokenizer_dir: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (tokenizer_dir / file).unlink()
    else:
        (tokenizer_dir / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer(tokenizer_dir)
