from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from surogate.data import tokenizer as module
from surogate.data.divide import reading
from surogate.data.tokenizer import Tokenizer
from surogate.data.turn_ends import unknown_ends
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
    """The config.json of Qwen names a bos that its tokenizer never writes."""
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


def test_long_text_tokenized_in_pieces_has_the_tokens_of_the_whole(
    tokenizer: Tokenizer, play: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = play * 20 + "x" * 500
    whole = tokenizer.encode_ids(text)
    monkeypatch.setattr(module, "PIECE_CHARS", 50)
    assert len(list(tokenizer.pieces(reading(text)))) > 20
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
        ("tokenizer_config.json", "[1]", "must contain a JSON object, contains list"),
        ("tokenizer_config.json", "{", "is not valid JSON"),
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


@pytest.mark.parametrize("decoder", [False, True], ids=["before transformers 5", "with added_tokens_decoder"])
@pytest.mark.parametrize("with_config", [False, True])
def test_special_tokens_map_follows_the_rule_of_transformers(
    with_config: bool, decoder: bool, tokenizer_dir: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    config = tokenizer_dir / "tokenizer_config.json"
    config.unlink()
    if with_config:
        edit(config, eos_token="<|endoftext|>", pad_token="#")
    if decoder:
        edit(config, added_tokens_decoder={"0": {"content": "<|endoftext|>", "special": True}})
    edit(tokenizer_dir / "special_tokens_map.json", eos_token={"content": "!", "lstrip": False}, bos_token="$")
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    ours = Tokenizer(tokenizer_dir)
    assert (ours.bos_id, ours.eos_id, ours.pad_id) == (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id)
    assert (ours.eos_id == ours._backend.token_to_id("!")) is not decoder
    assert ours.size_in_transformers == len(theirs)


def test_a_missing_special_token_names_the_file_that_defines_it(tokenizer_dir: Path) -> None:
    edit(tokenizer_dir / "special_tokens_map.json", pad_token="<pad>")
    with pytest.raises(ConfigError, match=r"special_tokens_map\.json: pad_token '<pad>' is not in tokenizer\.json"):
        Tokenizer(tokenizer_dir)


@pytest.mark.parametrize(
    ("files", "added"),
    [
        ({"tokenizer_config.json": {"unk_token": "<unk>"}}, ("<unk>",)),
        ({"tokenizer_config.json": {"additional_special_tokens": ["<a>", "<b>", "!"]}}, ("<a>", "<b>")),
        ({"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<i>"}}}, ("<i>",)),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"900": {"content": "<d>", "special": False}}}}, ("<d>",)),
        ({"added_tokens.json": {"<j>": 900, "!": 1}}, ("<j>",)),
        ({"added_tokens.json": {"<j>": 900}, "tokenizer_config.json": {"added_tokens_decoder": {}}}, ()),
        ({"special_tokens_map.json": {"mask_token": "<m>", "additional_special_tokens": ["<n>"]}}, ("<m>", "<n>")),
        ({}, ()),
    ],
    ids=str,
)
def test_tokens_that_transformers_adds_on_load_are_listed(
    files: dict[str, dict[str, object]], added: tuple[str, ...], tokenizer_dir: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    for name, content in files.items():
        edit(tokenizer_dir / name, **content)
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_dir)
    ours = Tokenizer(tokenizer_dir)
    assert ours.added_by_transformers == added
    assert ours.size_in_transformers == len(theirs)
    assert set(added) <= set(theirs.get_vocab())


def test_a_file_at_which_the_library_panics_is_refused(tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A panic of the library is no Exception (mutated file 10333)."""

    class Panic(BaseException):
        pass

    def panics(path: str) -> None:
        raise Panic("range end index out of range")

    monkeypatch.setattr(module.tokenizers, "Tokenizer", type("Panics", (), {"from_file": panics}))
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read: range end index out of range"):
        Tokenizer(tokenizer_dir)


def test_a_stop_that_the_tokenizer_lacks_is_named_by_its_id(tokenizer_dir: Path) -> None:
    """The library cannot decode it (mutated files 14086 and 18442)."""
    edit(tokenizer_dir / "generation_config.json", eos_token_id=[1 << 70, -1])
    line = unknown_ends([1], Tokenizer(tokenizer_dir), tokenizer_dir)
    assert line is not None and f"the model stops at token {1 << 70}, token -1 (" in line
