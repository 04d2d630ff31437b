"""`manifest.json` of a checkpoint proves itself, and is read as earlier versions wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from surogate.checkpoints import facts
from surogate.checkpoints.manifest import DamagedCheckpoint, Manifest, read_manifest, write_manifest
from surogate.checkpoints.resume import Resumed, refuse_another_run
from surogate_core.api.sealed import BrokenSeal, sealed, unsealed
from surogate_core.errors import ConfigError

UPGRADE = Path(__file__).parent / "upgrade"
DATA = {"rows": 1074, "tokens": 9, "content": "ab"}
FACTS = {"model": "m", "model_config.hidden_size": 8, facts.ROWS: 4, facts.TOTAL_STEPS: 3, facts.DATA: DATA}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint after step 3 of which only the manifest matters."""
    folder = tmp_path / "step_00000003"
    folder.mkdir()
    position = {"loss": float("nan"), "tokens": 7, "seconds": 0.1}
    write_manifest(folder, Manifest(step=3, position=position, facts=FACTS, config={}, versions={}, files={}))
    return folder


def test_every_bit_of_a_manifest_is_proved(folder: Path) -> None:
    path = folder / "manifest.json"
    whole, manifest = path.read_bytes(), read_manifest(folder)
    assert (manifest.step, manifest.facts) == (3, FACTS)
    for at in range(len(whole)):
        for bit in (1, 2, 4):
            path.write_bytes(bytes([*whole[:at], whole[at] ^ bit, *whole[at + 1 :]]))
            try:
                found = read_manifest(folder)
            except DamagedCheckpoint as damage:
                assert str(path) in str(damage)
            else:
                assert whole[at : at + 1].isspace() and (found.step, found.facts) == (3, FACTS), whole[at - 9 : at + 9]


@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_of_another_step_than_its_folder_is_damaged(folder: Path, step: int) -> None:
    """Its run would train steps twice, or never."""
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 3', f'"step": {step}'))
    with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: its content differs from what was written"):
        read_manifest(folder)
    write_manifest(folder, Manifest(step=step, position={}, facts={}, config={}, versions={}, files={}))
    with pytest.raises(DamagedCheckpoint, match=f"is of step {step}, its folder is step_00000003"):
        read_manifest(folder)
    link = folder.with_name("latest")
    link.symlink_to(folder)
    with pytest.raises(DamagedCheckpoint, match="its folder is step_00000003"):
        read_manifest(link)
    assert read_manifest(folder.rename(folder.with_name("mine"))).step == step


def test_a_manifest_without_its_hash_is_damaged_and_one_of_an_earlier_version_has_none(folder: Path) -> None:
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    del content["xxh3_128"]
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match="its hash is missing"):
        read_manifest(folder)
    for saved in sorted(UPGRADE.glob("0.[12].0/*/step_*")):
        assert read_manifest(saved).format == 1
        copy = shutil.copytree(saved, folder.parent / saved.parent.parent.name / saved.parent.name / "step_00000003")
        with pytest.raises(DamagedCheckpoint, match="is of step 2, its folder is step_00000003"):
            read_manifest(copy)
    path.write_text(json.dumps({**content, "format": 3}))
    with pytest.raises(DamagedCheckpoint, match="format 3, this version reads 1 to 2"):
        read_manifest(folder)


def test_the_sentences_of_earlier_versions_become_ids() -> None:
    old = read_manifest(UPGRADE / "0.1.0/adapter/step_00000002").facts
    newer = read_manifest(UPGRADE / "0.2.0/adapter/step_00000002").facts
    for found in (old, newer):
        assert not [fact for fact in found if " " in fact]
        assert (found[facts.ROWS], found[facts.TOTAL_STEPS], found["model_config.vocab_size"]) == (4, 4, 2048)
        assert (found[facts.FILES], found[facts.FROZEN]) == (facts.UNQUANTIZED, "bf16")
    assert old[facts.DATA] == {"rows": 86, "tokens": 1677, "identity": "9e49fc575b9a1933"}
    assert newer[facts.DATA] == {**old[facts.DATA], "content": "0b7708ec67dd5afd"}


def test_rewording_a_message_changes_no_file_and_refuses_no_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**changed: Any) -> str:
        resumed = Resumed(folder, read_manifest(folder))
        try:
            refuse_another_run(resumed, {**FACTS, **changed}, {}, "run.yaml", 1, 4)
        except ConfigError as error:
            return str(error)
        return ""

    before = (folder / "manifest.json").read_bytes()
    assert refused() == "" and "steps in all (max_steps or num_epochs): 3 (this run: 9)" in refused(total_steps=9)
    assert "config.json hidden_size: 8 (this run: 9)" in refused(**{"model_config.hidden_size": 9})
    other = refused(data={**DATA, "content": "cd"})
    assert "training data: 1,074 rows, 9 tokens, ab (this run: 1,074 rows, 9 tokens, cd)" in other
    monkeypatch.setattr(facts, "_TEXTS", {fact: f"reworded {fact}" for fact in facts._TEXTS})
    assert refused() == "" and "reworded total_steps: 3 (this run: 9)" in refused(total_steps=9)
    write_manifest(folder, read_manifest(folder))
    assert (folder / "manifest.json").read_bytes() == before


def test_a_hash_is_of_the_content_and_not_of_its_text() -> None:
    content = {"b": [1, 2.5, None], "a": {"nested": float("nan")}}
    again = json.loads(json.dumps(dict(reversed(sealed(content).items())), indent=3))
    assert json.dumps(unsealed(again), sort_keys=True) == json.dumps(content, sort_keys=True)
    for broken in ({**again, "c": 1}, {**again, "b": [1, 2.5]}, {"b": 1}, [1]):
        with pytest.raises(BrokenSeal):
            unsealed(broken)
