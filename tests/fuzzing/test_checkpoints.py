"""A run resumes from a damaged checkpoint or refuses it with one error, also if the hashes match the damage."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from end_to_end.product import Workplace
from fuzzing.mutate import both_sides, of_file, refused, seeds

from surogate import run
from surogate.checkpoints.manifest import MANIFEST, hash_file
from surogate.checkpoints.resume import choose_checkpoint
from surogate.checkpoints.saved_run import SavedRun
from surogate_core.api.sealed import SEAL, sealed
from surogate_core.machine.devices import cpu


@pytest.fixture
def saved(here: Workplace) -> Iterator[tuple[SavedRun, Path]]:
    """A run that stopped after its first step, and the folder of its checkpoint."""
    config = here.write(max_steps=1, warmup_steps=0, save_steps=1, model_dtype="bf16", master_dtype="fp32")
    run.train(run.load(config), notice=lambda line: None)
    whole = here.out / "step_00000001"
    manifest = json.loads((whole / MANIFEST).read_text())
    opened = run.open_run(run.load(config))
    plan = run.plan(opened, cpu())
    metrics = here.out / "metrics.jsonl"
    yield (
        SavedRun(
            run=opened,
            plan=plan,
            extends=lambda total: False,
            facts=manifest["facts"],
            versions=manifest["versions"],
            metrics=metrics,
        ),
        whole,
    )


def damage(folder: Path, choice: random.Random) -> None:
    """Damage one or two files; half of the time, with hashes that match."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    for _ in range(choice.choice((1, 1, 2))):
        name = choice.choice((MANIFEST, *names, *(n for n in names if n.endswith("safetensors"))))
        if choice.random() < 0.05:
            (folder / name).unlink(missing_ok=True)
        elif (folder / name).exists():
            (folder / name).write_bytes(of_file(folder / name, choice))
            if choice.random() < 0.6:
                content = json.loads((folder / MANIFEST).read_text())
                content.pop(SEAL)
                if name != MANIFEST:
                    entry = {"bytes": (folder / name).stat().st_size, "xxh3_128": hash_file(folder / name)}
                    content["files"][name] = entry
                (folder / MANIFEST).write_text(json.dumps(sealed(content)))


def refusals(saved_run: SavedRun, whole: Path, root: Path, cases: range) -> list[bool]:
    worker = run.make_worker(saved_run.run, saved_run.plan)
    checkpoints = root / "damaged"
    outcomes = []
    for seed in cases:
        shutil.rmtree(checkpoints, ignore_errors=True)
        folder = shutil.copytree(whole, checkpoints / whole.name)
        choice = random.Random(seed)
        with suppress(
            OSError, ValueError, LookupError, TypeError, AttributeError
        ):  # the manifest may be damaged already
            damage(folder, choice)

        def resume(named: bool = bool(seed % 3), folder: Path = folder) -> None:
            resumed = choose_checkpoint(checkpoints, True if named else str(folder), "run.yaml", lambda line: None)
            assert resumed is not None
            saved_run.check(resumed)
            progress = saved_run.restore(resumed, worker)
            assert progress.tokens + progress.seconds >= 0 and progress.step >= 0
            assert all(f"{loss:.3f} {labels:,} {at:,}" for at, loss, labels in progress.evaluations)
            assert progress.loss is None or f"{progress.loss:.3f}"

        outcomes.append(refused(seed, resume))
    return outcomes


def test_a_damaged_checkpoint_is_resumed_or_refused(saved: tuple[SavedRun, Path], tmp_path: Path) -> None:
    both_sides(refusals(*saved, tmp_path, seeds(200)))


@pytest.mark.slow
def test_many_damaged_checkpoints_are_resumed_or_refused(saved: tuple[SavedRun, Path], tmp_path: Path) -> None:
    both_sides(refusals(*saved, tmp_path, seeds(600)))
