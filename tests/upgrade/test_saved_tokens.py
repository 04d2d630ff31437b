"""A run whose tokens a mended fault changes is refused by the name of the fault, or goes on with the saved tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from upgrade.runs import HALF, HERE, STEP, losses, write

from surogate import run
from surogate.checkpoints.manifest import read_manifest
from surogate.checkpoints.other_tokens import other_tokens
from surogate.data import tokenize
from surogate.data.chat.conversation import CONVERSATION
from surogate.data.formats import TEXT
from surogate_core.api import DatasetFormatDef, Encoded
from surogate_core.api.proven_file import DamagedFile
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

FAULT = "the end of a text was trained twice"
OLD_CACHE = HERE / "0.2.0/cache/tokens"
(OLD_NAME,) = (path.parent.name for path in OLD_CACHE.glob("*/manifest.json"))


def mended_text(row: Mapping[str, Any], tokenizer: Any, options: Any) -> Encoded:
    found = TEXT.encode(row, tokenizer, options)
    assert isinstance(found, Encoded)
    return replace(found, tokens=[*found.tokens[:-2], found.tokens[-1]], trained=found.trained[:-1])


@pytest.fixture
def tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the token caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    return tmp_path / "xdg/surogate/tokens"


def install(monkeypatch: pytest.MonkeyPatch, type: DatasetFormatDef[Any]) -> None:
    """Make it the dataset type `text`."""
    installed = Registry.dataset_formats
    monkeypatch.setattr(Registry, "dataset_formats", lambda registry: {**installed(registry), "text": type})


@pytest.fixture
def mended(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, replace(TEXT, encode=mended_text, version=3, mended={2: FAULT, 3: "another"}))


def half_way(root: Path, version: str) -> Path:
    """Return the config of a run that `version` saved half-way, in `root`/out."""
    config = write(root, "full", HERE)
    shutil.copytree(HERE / version / "full" / STEP, root / "out" / STEP)
    return config


def resumed(config: Path, *keys: str) -> list[str]:
    notices: list[str] = []
    run.train(run.load(config, ["resume_from_checkpoint=true", *keys]), notices.append)
    return notices


def refusal(config: Path, *keys: str) -> str:
    with pytest.raises(ConfigError) as refused:
        resumed(config, *keys)
    return str(refused.value)


@pytest.mark.parametrize("version", ["0.1.0", "0.2.0"])
def test_a_run_of_an_earlier_version_goes_on_with_the_tokens_of_its_cache(
    version: str, tmp_path: Path, tokens: Path, mended: None
) -> None:
    config = half_way(tmp_path, version)
    message = refusal(config)
    assert "was saved with training data: 86 rows, 1,677 tokens" in message
    assert (
        f"Faults of dataset types were mended since: {FAULT}; another. resume_with_saved_tokens: true goes" in message
    )
    gone = refusal(config, "resume_with_saved_tokens=true")
    assert f"datasets.0: resume_with_saved_tokens: the token cache of these data in {tokens}" in gone
    assert (
        f"is gone. Copy it from where it is, resume with the version that saved the checkpoint (surogate-core {version}"
        in gone
    )
    shutil.copytree(OLD_CACHE / OLD_NAME, tokens / OLD_NAME)
    resumed(config, "resume_with_saved_tokens=true")
    there = json.loads((HERE / version / "full/losses.json").read_text())
    assert losses(tmp_path / "out") == pytest.approx(there[HALF:], rel=1e-4)
    facts = read_manifest(tmp_path / "out/step_00000004").facts
    assert facts["token_caches"] == [{"cache": OLD_NAME, "version": 1, "type": "text"}]


def test_a_run_goes_on_with_the_tokens_of_the_cache_that_its_checkpoint_names(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, mended: None
) -> None:
    config = write(tmp_path, "full", HERE)
    with monkeypatch.context() as before:
        install(before, TEXT)
        run.train(run.load(config), lambda line: None)
    straight = losses(tmp_path / "out")
    keys = [f"resume_from_checkpoint={tmp_path}/out/{STEP}", f"output_dir={tmp_path}/on"]
    ((cache),) = read_manifest(tmp_path / "out" / STEP).facts["token_caches"]
    assert (cache["type"], cache["version"]) == ("text", 1) and (tokens / cache["cache"]).is_dir()
    assert f"mended since: {FAULT}; another. resume_with_saved_tokens" in refusal(config, *keys)
    resumed(config, *keys, "resume_with_saved_tokens=true")
    assert losses(tmp_path / "on") == straight[HALF:]

    keys[1] = f"output_dir={tmp_path}/other"
    saved = [*keys, "resume_with_saved_tokens=true"]
    assert "is of other data, options" in refusal(config, *saved, "datasets.0.samples=50")
    tokens_file = tokens / cache["cache"] / "tokens.bin"
    content = bytearray(tokens_file.read_bytes())
    content[99] ^= 1
    tokens_file.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"tokens.bin: bytes 0 to .* This version cannot make these tokens: copy"):
        resumed(config, *saved)
    assert f"the token cache is damaged: {tokens_file}: bytes 0" in refusal(config, *saved)
    shutil.rmtree(tokens_file.parent)
    assert f"the token cache {tokens_file.parent}, which" in refusal(config, *saved)


def test_equal_tokens_of_a_newer_version_resume(tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault was in rows that these data do not have."""
    install(monkeypatch, replace(TEXT, version=2, mended={2: FAULT}))
    resumed(half_way(tmp_path, "0.2.0"))
    (cache,) = read_manifest(tmp_path / "out/step_00000004").facts["token_caches"]
    assert cache["version"] == 2


def test_the_key_is_for_a_run_that_resumes(tmp_path: Path, tokens: Path) -> None:
    message = refusal(write(tmp_path, "full", HERE), "resume_from_checkpoint=false", "resume_with_saved_tokens=true")
    assert "resume_with_saved_tokens: true, but resume_from_checkpoint: false starts a new run" in message


def test_old_caches_are_read_without_hashes_and_nothing_is_tokenized(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(OLD_CACHE, tokens)
    monkeypatch.setattr(tokenize, "_write", None)
    notices = resumed(half_way(tmp_path, "0.2.0"))
    assert not any("damaged" in line for line in notices)
    assert {path.name for path in tokens.iterdir()} == {OLD_NAME, "columns"}


def test_faults_of_the_types_and_of_the_conversations_that_they_encode_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs: DatasetFormatDef[Any] = replace(TEXT, name="pairs", version=2, mended={2: "pairs fault"})
    monkeypatch.setattr(
        "surogate.checkpoints.other_tokens.CONVERSATION", replace(CONVERSATION, version=3, mended={3: "chat fault"})
    )
    data = {"data": {"content": "a"}}
    now = {**data, "token_caches": [{"type": "pairs", "version": 2, "conversation": 3}]}

    def named(conversation: int, version: int, type: str = "pairs") -> str:
        then = {**data, "token_caches": [{"type": type, "version": version, "conversation": conversation}]}
        return other_tokens(then, now, {"pairs": pairs}, False)

    assert "since: pairs fault; chat fault. resume_with" in named(2, 1)
    assert "since: chat fault. " in named(2, 2)
    assert named(3, 2) == named(1, 1, "text") == ""
    assert "since: pairs fault; version 2 of dataset type conversation makes other tokens; chat" in other_tokens(
        data, now, {"pairs": pairs}, False
    )
    assert other_tokens(data, now, {"pairs": pairs}, True) == ""
    same = {**data, "token_caches": [{"type": "pairs", "version": 1}]}
    assert "kept no hash of the tokens" in other_tokens({"data": {"identity": "a"}}, same, {"pairs": pairs}, False)
