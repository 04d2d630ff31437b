"""A resumed run is bit-identical to one that was not interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end.product import environment, records, write_model
from safetensors.torch import load_file

from surogate import run
from surogate.checkpoints.manifest import read_manifest, write_manifest
from surogate_core import train
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from end_to_end.product import Workplace

pytestmark = pytest.mark.slow

TIMES = {"time", "duration_ms", "tokens_per_second"}
NARROW = {
    "model_dtype": "bf16",
    "master_dtype": "fp32",
    "optimizer": "adamw",
    "optimizer_state_dtype": "bf16",
    "param_grad_dtype": "bf16",
}

FP8 = {"recipe": "fp8-hybrid", "fp8_amax_history": 4, "sequence_len": 64, "model_dtype": None}

NVFP4 = {"recipe": "nvfp4", "model_dtype": None, "optimizer": "adamw"}


def go(config: Path, *overrides: str) -> list[str]:
    """Run to the end; return the lines that were printed."""
    message: list[str] = []
    run.train(run.load(config, overrides), notice=message.append)
    return message


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM in step `step` of the next runs of this process."""
    finish = train.finish

    def interrupted(done: Any, *given: Any) -> float:
        if done.step == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return finish(done, *given)

    monkeypatch.setattr(train, "finish", interrupted)


def told_steps(output: Path) -> list[dict[str, Any]]:
    """Return the records of steps and evaluations without times."""
    wanted = [record for record in records(output) if record["log"] not in ("run", "end")]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in wanted]


def same_bits(one: Path, other: Path) -> None:
    """Assert that two checkpoints have equal tensors, states included, and equal records up to there."""
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        left, right = load_file(one / file), load_file(other / file)
        assert left.keys() == right.keys() and left
        different = [name for name in left if not left[name].view(-1).equal(right[name].view(-1))]
        assert not different, (file, different)
    assert told_steps(one.parent) == told_steps(other.parent)


def straight_and_resumed(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, after: int = 10, split: Sequence[str] = (), **changes: Any
) -> tuple[Path, Path]:
    """Return the last checkpoints of a run of 20 steps and of one stopped after `after` and resumed with `split`."""
    config = here.write(max_steps=20, save_steps=20, eval_steps=5, **changes)
    go(config, "output_dir=straight")
    with monkeypatch.context() as patch:
        stop_after(after, patch)
        go(config, "output_dir=resumed")
    (saved,) = (here.root / "resumed").glob("step_*")  # a team may have launched one more step
    assert saved.name in (f"step_{after:08d}", f"step_{after + 1:08d}")
    message = go(config, "output_dir=resumed", "resume_from_checkpoint=true", *split)
    assert any(saved.name in line and "of 20" in line for line in message), message
    return here.root / "straight/step_00000020", here.root / "resumed/step_00000020"


EIGHT_BITS = {"optimizer": "adamw_8bit", "model_dtype": "bf16"}


@pytest.mark.parametrize(
    "dtypes",
    [
        {},
        NARROW,
        {"model_dtype": "bf16", "optimizer": "adamw"},
        FP8,
        NVFP4,
        EIGHT_BITS,
        NARROW | {"optimizer": "normuon"},
    ],
    ids=["fp32", "masters", "bf16", "fp8", "nvfp4", "adamw_8bit", "normuon"],
)
def test_ten_steps_and_ten_more_equal_twenty(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, dtypes: dict[str, str]
) -> None:
    straight, resumed = straight_and_resumed(here, monkeypatch, **dtypes)
    same_bits(straight, resumed)
    for name in ("model.safetensors", "config.json"):
        assert (straight.parent / name).read_bytes() == (resumed.parent / name).read_bytes()
    assert [record["step"] for record in records(resumed.parent, "step")] == list(range(1, 21))
    assert len(records(resumed.parent, "run")) == 2
    assert (resumed.parent / "loss.png").exists()


@pytest.mark.parametrize("dtypes", [{"model_dtype": "bf16"}, FP8], ids=["bf16", "fp8"])
def test_a_run_resumes_bit_identically_on_a_device_where_auto_chooses_other_recomputation(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, dtypes: dict[str, Any]
) -> None:
    """And nothing says otherwise: no key of recomputation changes a bit."""
    sizes = [
        run.plan(run.load(here.write(**dtypes), [f"recompute={word}"]), "cpu").report.device_bytes["total"]
        for word in ("false", "true")
    ]
    limit = f"device_memory_limit={sum(sizes) // 2}"
    planned = run.plan(run.load(here.write(**dtypes), [limit]), "cpu")
    assert planned.chosen is not None and planned.report.fits
    straight, resumed = straight_and_resumed(here, monkeypatch, split=[limit], **dtypes)
    same_bits(straight, resumed)
    assert (straight.parent / "model.safetensors").read_bytes() == (resumed.parent / "model.safetensors").read_bytes()


def test_a_resumed_run_tells_what_auto_chose_and_records_what_was_asked(here: Workplace) -> None:
    config = here.write(max_steps=2, save_steps=1)
    go(config)
    sizes = [
        run.plan(run.load(config, [f"recompute={word}"]), "cpu").report.device_bytes["total"]
        for word in ("false", "true")
    ]
    written_out = ["param_grad_dtype=fp32", "optimizer_state_dtype=fp32"]  # the dtypes that the run has without them
    limit = f"device_memory_limit={sum(sizes) // 2}"
    message = go(config, "resume_from_checkpoint=1", limit, "recompute_swiglu=true", *written_out)
    assert sum(line.startswith("recompute: auto chose ") and " saves " in line for line in message) == 1
    assert not any("not bit-identical" in line for line in message)
    written = run.load(here.out / "run.yaml").config
    assert (written.recompute, written.recompute_swiglu, written.recompute_block) == ("auto", True, False)
    assert written.device_memory_limit == sum(sizes) // 2
    with pytest.raises(
        ConfigError, match=r"needs .* GiB with everything recomputed, more than the .* \(device_memory_limit\)"
    ):
        go(config, "resume_from_checkpoint=1", f"device_memory_limit={sizes[1] - 4096}")


def test_a_checkpoint_has_masters_and_moments_but_not_the_loss_and_norm(here: Workplace) -> None:
    go(here.write(max_steps=2, save_steps=2, **NARROW))
    (saved,) = (here.out).glob("step_*")
    ((name, tensors),) = [(path.name, load_file(path)) for path in (saved / "training_state").iterdir()]
    assert name == "state-00001-of-00001.safetensors"
    assert any(key.startswith("master.") for key in tensors)
    assert not {"step_loss", "eval_loss", "grad_norm"} & tensors.keys()
    assert len(tensors) == 3 * sum(key.startswith("master.") for key in tensors)


def test_a_checkpoint_has_codes_and_scales_of_8_bit_moments(here: Workplace) -> None:
    go(here.write(max_steps=2, save_steps=2, **EIGHT_BITS))
    (path,) = here.out.glob("step_*/training_state/*.safetensors")
    tensors = load_file(path)
    codes = {name: t for name, t in tensors.items() if t.dtype == torch.uint8}
    assert codes and all(t.numel() >= 4096 for t in codes.values())
    for name, t in codes.items():
        start, moment, param = name.split(".", 2)
        assert tensors[f"{start}.{moment}_scale.{param}"].numel() == -(-t.numel() // 256)
    wide = [name for name, t in tensors.items() if t.dtype == torch.float32 and ".m." in name]
    assert any(name.endswith("embedding") for name in wide) and any(name.endswith("norm") for name in wide)


def test_a_team_resumes_bit_identically(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits(*straight_and_resumed(here, monkeypatch, after=7, ranks_per_gpu=2, **NARROW))


def test_another_split_of_the_same_rows_resumes_with_the_same_samples(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    split = ["per_device_train_batch_size=2", "gradient_accumulation_steps=4"]
    straight, resumed = straight_and_resumed(here, monkeypatch, split=split)
    for one, other in zip(records(straight.parent, "step"), records(resumed.parent, "step"), strict=True):
        assert (one["tokens"], one["valid_tokens"], one["epoch"]) == (
            other["tokens"],
            other["valid_tokens"],
            other["epoch"],
        )
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)  # ten steps of sums in another order


def test_a_run_killed_between_checkpoints_records_every_step_once(here: Workplace) -> None:
    """Killed at step 8, saved at 6: steps 7 and 8 are recorded once, by the resumed run."""
    config = here.write(max_steps=10, save_steps=3, eval_steps=4)
    go(config, "output_dir=straight")
    go(config)
    for late in ("step_00000009", "model.safetensors"):
        (here.out / late).rename(here.root / late)
    go(config, "resume_from_checkpoint=true")
    same_bits(here.root / "straight/step_00000009", here.out / "step_00000009")


def test_resuming_from_an_earlier_step_sets_later_checkpoints_aside(here: Workplace) -> None:
    config = here.write(max_steps=8, save_steps=2)
    go(config)
    before = (here.out / "model.safetensors").read_bytes()
    message = go(config, "resume_from_checkpoint=4")
    assert (here.out / "model.safetensors").read_bytes() == before
    aside = sorted(path.name for path in here.out.glob("*.set_aside"))
    assert aside == ["step_00000006.set_aside", "step_00000008.set_aside"]
    assert sum("set aside" in line for line in message) == 2
    assert [record["step"] for record in records(here.out, "step")] == list(range(1, 9))


def test_resuming_a_finished_run_takes_no_step(here: Workplace) -> None:
    config = here.write(max_steps=3, save_steps=3)
    go(config)
    recorded, weights = told_steps(here.out), (here.out / "model.safetensors").read_bytes()
    go(config, "resume_from_checkpoint=true")
    assert told_steps(here.out) == recorded
    assert (here.out / "model.safetensors").read_bytes() == weights


def test_resume_true_without_a_checkpoint_starts_a_new_run_and_prints_so(here: Workplace) -> None:
    message = go(here.write(max_steps=2), "resume_from_checkpoint=true")
    assert any("starting a new run" in line for line in message)
    assert [record["step"] for record in records(here.out, "step")] == [1, 2]


@pytest.fixture
def saved(here: Workplace) -> Path:
    """The config of a run with checkpoints after steps 2 and 4 of 4."""
    config = here.write(max_steps=4, save_steps=2)
    go(config)
    return config


def refusal(config: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        go(config, "resume_from_checkpoint=true", *overrides)
    return str(refused.value)


@pytest.mark.parametrize(
    ("change", "was", "is_"),
    [
        ("per_device_train_batch_size=8", "GPUs): 8", "this run: 16"),
        ("sequence_len=32", "sequence_len: 64", "this run: 32"),
        ("train_seed=7", "train_seed: 1234", "this run: 7"),
        ("model_dtype=bf16", "model_dtype: fp32", "this run: bf16"),
        ("optimizer=adamw", "optimizer: adamw_8bit", "this run: adamw"),
        ("max_steps=9", "max_steps or num_epochs): 4", "this run: 9"),
        ("datasets.0.samples=100", "training data: 107 rows", "this run: "),
    ],
)
def test_another_run_is_refused_with_both_values(saved: Path, here: Workplace, change: str, was: str, is_: str) -> None:
    before = (here.out / "metrics.jsonl").read_bytes()
    message = refusal(saved, change)
    assert was in message and is_ in message
    assert "step_00000004" in message
    assert (here.out / "metrics.jsonl").read_bytes() == before


def test_the_refusal_of_other_rows_says_which_settings_keep_them(saved: Path) -> None:
    kept = "gradient_accumulation_steps: 1 (and per_device_train_batch_size: 8) to keep the 8 rows of a step on 1 rank."
    assert kept in refusal(saved, "per_device_train_batch_size=8")
    assert "to keep the" not in refusal(saved, "train_seed=7")
    go(saved, "resume_from_checkpoint=2", "per_device_train_batch_size=8", "gradient_accumulation_steps=1")


def test_another_model_is_refused_with_both_values(saved: Path, here: Workplace) -> None:
    other = write_model(here.root / "other", intermediate_size=96)
    assert "config.json intermediate_size: 128 (this run: 96)" in refusal(saved, f"model={other}")


def test_another_learning_rate_is_reported(saved: Path) -> None:
    message = go(saved, "resume_from_checkpoint=2", "learning_rate=1e-3")
    assert any("learning_rate: 0.001 (saved: 0.003)" in line for line in message)


@pytest.mark.parametrize("change", ["param_grad_dtype=fp32", "torch_dtype=fp32", "attn_bwd_chunks=2"])
def test_keys_that_change_no_bit_are_not_reported(saved: Path, change: str) -> None:
    message = go(saved, "resume_from_checkpoint=true", change)
    assert not any("not bit-identical" in line for line in message), message


def test_another_version_of_a_plugin_is_reported_and_accepted(saved: Path, here: Workplace) -> None:
    folder = here.out / "step_00000002"
    manifest = read_manifest(folder)
    used = {"surogate-core", "surogate-models", "surogate-recipe-bf16", "surogate-optim-adamw-8bit"}
    assert used < manifest.versions.keys() and "surogate-lora" not in manifest.versions
    installed = manifest.versions["surogate-models"]
    write_manifest(folder, replace(manifest, versions={**manifest.versions, "surogate-models": "0.0.1"}))
    message = go(saved, "resume_from_checkpoint=2")
    assert any(f"surogate-models {installed} (saved: 0.0.1)" in line for line in message)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _gone(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [_truncated, _flipped, _gone])
@pytest.mark.parametrize(
    "file",
    ["model.safetensors", "training_state/state-00001-of-00001.safetensors", "config.json", "manifest.json"],
)
def test_damage_is_named_and_last_good_resumes_from_the_previous_checkpoint(
    file: str, damage: Any, saved: Path, here: Workplace
) -> None:
    path = here.out / "step_00000004" / file
    if (file, damage) == ("manifest.json", _flipped):
        damage = _truncated
    damage(path)
    if (file, damage) == ("manifest.json", _truncated):
        damage(path)  # its last byte is a line break
    message = refusal(saved)
    assert str(path) in message and "last-good" in message
    lines = go(saved, "resume_from_checkpoint=last-good")
    assert any("step_00000002 is the newest intact checkpoint" in line for line in lines)
    assert [record["step"] for record in records(here.out, "step")] == [1, 2, 3, 4]


def test_last_good_is_refused_if_all_checkpoints_are_damaged(saved: Path, here: Workplace) -> None:
    for checkpoint in here.out.glob("step_*"):
        _flipped(checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=r"every checkpoint in .* is damaged"):
        go(saved, "resume_from_checkpoint=last-good")


@pytest.mark.parametrize(("choice", "message"), [("7", "In .*: step_00000002, step_00000004"), ("out", "Name one: ")])
def test_a_missing_checkpoint_is_refused(saved: Path, choice: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        go(saved, f"resume_from_checkpoint={choice}")


def test_a_checkpoint_of_another_folder_can_be_given_as_a_path(saved: Path, here: Workplace) -> None:
    go(saved, "resume_from_checkpoint=out/step_00000002", "output_dir=elsewhere")
    final = [(folder / "model.safetensors").read_bytes() for folder in (here.out, here.root / "elsewhere")]
    assert final[0] == final[1]


def test_sigusr1_saves_and_training_continues(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = train.launch

    def asked(worker: Any, batch: Any, rate: Any, progress: Any) -> Any:
        if progress.launched == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return launch(worker, batch, rate, progress)

    monkeypatch.setattr(train, "launch", asked)
    go(here.write(max_steps=5, save_steps=0))
    assert [path.name for path in here.out.glob("step_*")] == ["step_00000003"]
    manifest = json.loads((here.out / "step_00000003/manifest.json").read_text())
    assert manifest["step"] == 3 and len(records(here.out, "step")) == 5


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from surogate import run
from surogate.checkpoints.folders import list_checkpoints
from surogate.checkpoints.manifest import read_manifest, verify_files
from surogate.reporting.metrics import read_metrics

def begin(*overrides):
    child = os.fork()
    if child == 0:
        run.train(run.load("run.yaml", overrides), notice=lambda line: None)
        os._exit(0)
    return child

def recorded():
    file = Path("killed/metrics.jsonl")
    return file.read_bytes().count(b'"log": "step"') if file.exists() else 0

def newest_complete():
    # Every checkpoint with its final name is complete, and each step up to it is recorded once.
    complete = [read_manifest(path).step for path in list_checkpoints(Path("killed"))]
    for path in list_checkpoints(Path("killed")):
        verify_files(path, read_manifest(path))
    if complete:
        steps = [record["step"] for record in read_metrics(Path("killed/metrics.jsonl")) if record["log"] == "step"]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) >= complete[-1], (steps, complete)
    return max(complete, default=0)

assert os.waitpid(begin("output_dir=straight"), 0)[1] == 0
rng, killed, newest = random.Random(1234), 0, 0
most, before_step = map(int, sys.argv[1:])
while killed < most and newest < before_step:  # the last run needs steps of its own
    before, more = recorded(), rng.randrange(4)
    child = begin("output_dir=killed", "resume_from_checkpoint=true")
    deadline = time.monotonic() + rng.uniform(0, 1)
    while recorded() < before + more if more else time.monotonic() < deadline:
        time.sleep(0.002)
        assert os.waitpid(child, os.WNOHANG)[0] == 0, "the run ended before it was killed"
        if recorded() < before:  # the resumed run has truncated its records
            before = recorded()
    time.sleep(rng.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
    before, newest = newest, newest_complete()
    assert newest >= before, "a checkpoint that was complete is gone"
print("killed", killed)
assert os.waitpid(begin("output_dir=killed", "resume_from_checkpoint=true"), 0)[1] == 0
"""


def test_a_run_that_is_killed_repeatedly_ends_with_the_same_weights(workplace: Workplace) -> None:
    """Kills come while it loads, trains or saves: some before its first step, most after one to three steps."""
    most, least, steps = 14, 5, 90
    small = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1}
    workplace.write(max_steps=steps, save_steps=1, save_total_limit=2, eval_steps=5, **small, **NARROW)
    done = subprocess.run(
        [sys.executable, "-c", "import torch, matplotlib.figure\n" + KILLED, str(most), str(steps // 2)],
        cwd=workplace.root,
        env=environment(workplace.root),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (killed,) = re.findall(r"^killed (\d+)$", done.stdout, re.MULTILINE)
    assert least <= int(killed) <= most
    last = f"step_{steps:08d}"
    same_bits(workplace.root / "straight" / last, workplace.root / "killed" / last)


def test_a_shorter_history_is_refused_by_its_key(here: Workplace) -> None:
    go(here.write(max_steps=4, save_steps=2, **FP8))
    changed = here.write(max_steps=4, resume_from_checkpoint=2, **FP8 | {"fp8_amax_history": 8})
    message: list[str] = []
    with pytest.raises(ConfigError, match=r"fp8\.history.*saved settings: fp8_amax_history: 4 \(now 8\)"):
        run.train(run.load(changed), notice=message.append)
    assert not any("fp8_amax_history" in line for line in message), "announced as accepted"


def test_a_run_with_a_constant_rate_is_extended_by_more_max_steps(here: Workplace) -> None:
    config = here.write(max_steps=6, save_steps=3, eval_steps=0, lr_scheduler_type="constant", warmup_steps=2)
    go(config, "output_dir=straight")
    go(config, "max_steps=3")
    go(config, "resume_from_checkpoint=true")
    one, other = (
        load_file(folder / "step_00000006/model.safetensors") for folder in (here.root / "straight", here.out)
    )
    assert all(one[name].view(-1).equal(other[name].view(-1)) for name in one)


def test_more_max_steps_are_refused_where_rates_depend_on_them(here: Workplace) -> None:
    go(here.write(max_steps=3, save_steps=3, lr_scheduler_type="cosine"))
    longer = here.write(max_steps=6, resume_from_checkpoint=3, lr_scheduler_type="cosine")
    with pytest.raises(
        ConfigError, match="lr_scheduler_type: constant or inverse_sqrt and no cooldown can get more steps"
    ):
        go(longer)
