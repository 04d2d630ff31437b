"""The program on damaged data, models, checkpoints and adapters: exit code 0 or 2, one message, no traceback.

SUROGATE_FUZZ_PROCESSES=<n> sets the number of cases (12, three seconds each), SUROGATE_FUZZ_SEED=<seed> the first.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from end_to_end.product import Workplace, make_workplace
from fuzzing.mutate import of_file, of_json, seeds
from fuzzing.test_data import ROWS, TEMPLATE, as_file

from surogate.checkpoints.manifest import MANIFEST

pytestmark = pytest.mark.slow

PROCESSES = int(os.environ.get("SUROGATE_FUZZ_PROCESSES", "12"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace with a trained model, its checkpoint, and an adapter for it."""
    workplace = make_workplace(tmp_path_factory.mktemp("whole"), warmup_steps=0, eval_steps=0)
    (workplace.root / "model/chat_template.jinja").write_text(TEMPLATE)
    for changes in (
        {"max_steps": 1, "save_steps": 1},
        {"lora": True, "from_scratch": False, "model": str(workplace.out), "max_steps": 1, "output_dir": "adapted"},
    ):
        done = workplace.surogate("train", workplace.write(**changes))
        assert done.returncode == 0, done.stderr
    return workplace


def arguments(kind: str, here: Workplace, choice: random.Random) -> list[str | Path]:
    """Damage something of that kind in `here`; return the arguments to call the program with."""
    out, root = here.out, here.root
    if kind == "data":
        type_, form = choice.choice(list(ROWS)), choice.choice(("jsonl", "json", "csv", "parquet"))
        path = root / f"data.{form}"
        path.write_bytes(as_file(of_json(ROWS[type_], choice), form))
        path.write_bytes(of_file(path, choice) if choice.random() < 0.4 and form != "json" else path.read_bytes())
        return ["tokenize", here.write(datasets=[{"path": str(path), "type": choice.choice((type_, "auto"))}])]
    if kind == "model":
        folder = root / "model" if choice.random() < 0.5 else out
        name = choice.choice(
            sorted(path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".jsonl")
        )
        (folder / name).write_bytes(of_file(folder / name, choice))
        verb = choice.choice(("plan", "tokenize", "train"))
        return [
            verb,
            here.write(model=str(folder), from_scratch=folder != out, max_steps=1, output_dir=str(root / "x")),
        ]
    if kind == "checkpoint":
        folder = out / "step_00000001"
        name = choice.choice((MANIFEST, MANIFEST, "model.safetensors", "config.json"))
        (folder / name).write_bytes(of_file(folder / name, choice))
        return ["train", here.write(max_steps=1, save_steps=1, resume_from_checkpoint=True)]
    folder = root / "adapted/adapter"
    name = choice.choice(sorted(path.name for path in folder.glob("adapter*")))
    (folder / name).write_bytes(of_file(folder / name, choice))
    return ["merge", folder, root / "merged", "--base", out, "--overwrite"]


def test_the_program_runs_or_refuses_with_any_damage(whole: Workplace, tmp_path: Path) -> None:
    kinds = ("data", "data", "model", "model", "checkpoint", "adapter")
    codes: dict[str, set[int]] = {kind: set() for kind in kinds}
    failures = []
    first = seeds(1)[0]
    for seed in range(first, first + PROCESSES):
        choice, kind = random.Random(seed), kinds[seed % len(kinds)]
        root = tmp_path / str(seed)
        shutil.copytree(whole.root, root)
        moved = {
            key: value.replace(str(whole.root), str(root))
            for key, value in whole.config.items()
            if isinstance(value, str)
        }
        datasets = [{"path": str(root / "documents.jsonl"), "type": "text"}]
        here = Workplace(root, {**whole.config, **moved, "datasets": datasets})
        done = here.surogate(*arguments(kind, here, choice))
        codes[kind].add(done.returncode)
        refused = done.returncode == 2 and "error: " in done.stderr
        if "Traceback" in done.stdout + done.stderr or not (done.returncode == 0 or refused):
            failures.append(f"seed {seed}: {kind}: {done.args}: exit {done.returncode}\n{done.stderr[-2000:]}")
        shutil.rmtree(root)
    assert not failures, "\n\n".join(failures[:5])
    if PROCESSES >= 100:
        assert all({0, 2} <= found for found in codes.values()), codes
