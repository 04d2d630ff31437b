"""Bounds of what files of others may ask for, each named when it is met."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from end_to_end.product import EXAMPLES

from surogate.checkpoints.stored_weights import INDEX, WEIGHTS, locate
from surogate.data.tokenizer import Tokenizer
from surogate.reporting.metrics import parsed_record
from surogate_core.api import bounded_pattern
from surogate_core.api.peft import _selection
from surogate_core.errors import ConfigError


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLES / "tiny-qwen3" / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("number", [2**31, (1 << 24) + 1, 10**30])
@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_an_id_of_a_token_above_the_highest_is_refused_before_the_library_reads_it(
    tokenizer: Path, number: int, place: str
) -> None:
    path = tokenizer / "tokenizer.json"
    spec = json.loads(path.read_text())
    if place == "vocab":
        spec["model"]["vocab"][next(iter(spec["model"]["vocab"]))] = number
    else:
        spec["added_tokens"][0]["id"] = number
    path.write_text(json.dumps(spec))
    with pytest.raises(ConfigError, match=rf"has the id {number}, and the highest that is read is 16,777,216"):
        Tokenizer(tokenizer)


def test_a_long_number_in_the_text_of_a_token_is_no_id(tokenizer: Path) -> None:
    path = tokenizer / "tokenizer.json"
    spec = json.loads(path.read_text())
    vocab = spec["model"]["vocab"]
    last = max(vocab, key=lambda text: int(vocab[text]))
    vocab["x: 99999999999"] = vocab.pop(last)
    path.write_text(json.dumps(spec))
    try:
        Tokenizer(tokenizer)
    except ConfigError as error:  # a merge may need the token that was replaced
        assert "has the id" not in str(error)


@pytest.mark.parametrize("name", ["x" * 5000 + ".safetensors", "a\0b.safetensors"])
def test_a_shard_of_a_name_that_no_file_can_have_is_missing(tmp_path: Path, name: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ConfigError, match=r"which .* lacks"):
        locate(tmp_path)


def test_weights_that_are_a_named_pipe_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read: it is a named pipe"):
        locate(tmp_path)


def test_a_line_of_metrics_that_nests_too_deeply_is_no_record() -> None:
    assert parsed_record("[" * 100_000) is None


def test_an_adapter_whose_expression_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_pattern, "LONGEST_SECONDS", 0.5)
    selects = _selection(Path("adapter_config.json"), "(([a-z_.0-9])+)+Z")
    with pytest.raises(ConfigError, match=r"regular expression .* Write it without repetitions inside of repetitions"):
        selects("model.layers.0.self_attn.q_proj.and.more.of.it")
