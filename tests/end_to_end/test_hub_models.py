"""Models by their hub name, offline: taken from the hub's cache, or refused with a remedy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from end_to_end.product import assert_refused, records, write_model

if TYPE_CHECKING:
    from end_to_end.conftest import Finished
    from end_to_end.product import Workplace

pytestmark = pytest.mark.slow

REVISION = "0123456789abcdef0123456789abcdef01234567"


def put_into_hub_cache(files: Path, home: Path, repo: str) -> Path:
    """Copy a directory into the cache below `home` as the snapshot of `repo`: blobs and links to them."""
    base = home / "hf/hub" / f"models--{repo.replace('/', '--')}"
    snapshot = base / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir()
    (base / "refs").mkdir()
    (base / "refs/main").write_text(REVISION)
    for number, path in enumerate(sorted(path for path in files.iterdir() if path.is_file())):
        blob = base / "blobs" / f"{number:040x}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_a_model_in_the_hubs_cache_is_planned_and_trained(finished: Finished, workplace: Workplace) -> None:
    files = workplace.root / "files"
    shutil.copytree(finished.out, files, ignore=shutil.ignore_patterns("step_*", "metrics*", "loss*", "run*"))
    put_into_hub_cache(files, workplace.root, "someone/tiny-qwen3")
    config = workplace.write(model="someone/tiny-qwen3", from_scratch=False, learning_rate=0, max_steps=2)
    planned = workplace.surogate("plan", config, "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["fits"]
    trained = workplace.surogate("train", config)
    assert trained.returncode == 0, trained.stderr
    first, last = records(workplace.out, "step")[0]["loss"], records(finished.out, "step")[-1]["loss"]
    assert first == pytest.approx(last, abs=0.2)
    assert (workplace.out / "model.safetensors").read_bytes() == (finished.out / "model.safetensors").read_bytes()
    assert not (workplace.out / "model.safetensors").is_symlink()
    assert not (workplace.out / "tokenizer.json").is_symlink()


def test_planning_a_hub_model_needs_only_its_config(workplace: Workplace) -> None:
    files = write_model(workplace.root / "files")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (files / name).unlink()
    put_into_hub_cache(files, workplace.root, "someone/config-only")
    config = workplace.write(model="someone/config-only")
    assert workplace.surogate("plan", config).returncode == 0
    assert_refused(workplace.surogate("train", config), "tokenizer.json")
    assert not workplace.out.exists()


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_a_model_that_is_not_in_the_cache_is_refused_with_the_remedy(workplace: Workplace, verb: str) -> None:
    done = workplace.surogate(verb, workplace.write(model="someone/absent"))
    assert_refused(done, "someone/absent", "HF_HUB_OFFLINE", "local path")
    assert not workplace.out.exists()
