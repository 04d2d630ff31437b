"""Runs that overfit: they stop early, and their outputs have the weights of the best evaluation.

After step 4 the loss of the evaluations, every second step, only rises.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.product import assert_refused, contents, documents, invoke, records, write_jsonl
from end_to_end.several import several
from end_to_end.test_resume import TIMES, stop_after
from safetensors.torch import load_file

from surogate import run
from surogate.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
from surogate.training import evaluation
from surogate.training.result import BestEvaluation, TrainResult
from surogate_core.api import EvalReport, Report
from surogate_core.errors import ConfigError, RunStopped

if TYPE_CHECKING:
    from end_to_end.product import Workplace

WEIGHTS = "model.safetensors"
BEST, LAST = "step_00000004", "step_00000010"


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def place(here: Workplace) -> Workplace:
    """Five rows to train on, two steps an epoch, and others to evaluate: the run ends after step 10."""
    few = write_jsonl(here.root / "few.jsonl", documents(16))
    held = write_jsonl(here.root / "held_out.jsonl", documents(20, skip=300))
    keys = {
        "datasets": [{"path": str(few), "type": "text"}],
        "validation_datasets": [{"path": str(held), "type": "text"}],
        "learning_rate": 0.01,
        "lr_scheduler_type": "constant",
        "gradient_accumulation_steps": 1,
        "max_steps": 30,
        "eval_steps": 2,
        "save_steps": 50,
        "early_stopping_patience": 3,
    }
    return dataclasses.replace(here, config={**here.config, **keys})


def go(place: Workplace, listen: Any = None, **keys: Any) -> tuple[TrainResult, list[str]]:
    said: list[str] = []
    return run.train(run.load(place.write(**keys)), said.append, listen=listen), said


def told(out: Path) -> list[dict[str, Any]]:
    """Return the records of steps, evaluations and outputs without times."""
    found = [record for record in records(out) if record["log"] not in ("run", "gpu", "end")]
    return [{key: value for key, value in record.items() if key not in TIMES} for record in found]


def results(out: Path) -> dict[str, bytes]:
    """Return the output files but those that name folders or times."""
    found = {name: data for name, data in contents(out).items() if "/" not in name and name != "plan.json"}
    return {name: data for name, data in found.items() if name.endswith(("json", "tensors"))}


def test_a_run_stops_when_the_loss_has_not_improved_and_its_outputs_are_the_best_weights(place: Workplace) -> None:
    result, said = go(place, eval_on_start=True)
    assert (result.steps, result.total_steps, result.weights_step) == (10, 30, 4)
    losses = {step: loss for step, loss, _ in result.evaluations}
    assert [*losses] == [0, 2, 4, 6, 8, 10] and min(losses, key=lambda step: losses[step]) == 4
    assert result.best == BestEvaluation(4, "loss", losses[4])
    out = place.out
    assert (out / WEIGHTS).read_bytes() == (out / BEST / WEIGHTS).read_bytes() != (out / LAST / WEIGHTS).read_bytes()
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        assert (out / name).read_bytes() == (out / BEST / name).read_bytes()
    why = f"early stopping: loss has not improved in 3 evaluations in a row (best: loss {losses[4]:.4f}, after step 4)"
    assert result.stop_reason == why and f"{why}: the run ends after step 10 of 30" in said
    assert f"outputs: the weights after step 4, the best by loss {losses[4]:.4f}" in said
    assert [record.get("best_step") for record in records(out, "eval")] == [None, 2, 4, 4, 4, 4]
    (end,) = records(out, "outputs")
    del end["time"]
    assert end == {"log": "outputs", "step": 10, "weights_step": 4, "metric": "loss", "best_step": 4,
                   "best_value": losses[4], "stop_reason": why}  # fmt: skip
    card = (out / "README.md").read_text()
    for row in (
        "| optimizer steps | 10 |",
        f"| ended by | {why} |",
        f"| weights | after step 4, the best by loss ({losses[4]:.4f}) |",
        f"| validation loss | {losses[4]:.4f} |",
    ):
        assert row in card, card


def test_console_and_json_say_what_was_best_and_why_the_run_ended(place: Workplace) -> None:
    done = invoke("train", place.write())
    assert done.returncode == 0, done.stdout + done.stderr
    printed = " ".join(done.stdout.split())
    assert (
        "best evaluation: the least loss, whose weights become the outputs; the run ends after 3 evaluations" in printed
    )
    assert "the best so far" in printed and "best at step 4" in printed
    assert "ended by early stopping: loss has not improved" in printed and "30 steps were planned" in printed
    assert "(weights after step 4)" in printed
    shutil.rmtree(place.out)
    found = json.loads(invoke("train", place.write(), "--json").stdout)
    assert found["best"]["step"] == found["weights_step"] == 4 and found["best"]["metric"] == "loss"
    assert found["stop_reason"].startswith("early stopping") and found["steps"] == 10


def test_without_patience_all_steps_are_trained_and_the_last_weights_are_a_checkpoint(place: Workplace) -> None:
    keys = {"early_stopping_patience": None, "max_steps": 9, "save_total_limit": 1}
    result, _ = go(place, load_best_model_at_end=True, **keys)
    assert (result.steps, result.weights_step, result.stop_reason) == (9, 4, "")
    assert [step for step, _, _ in result.evaluations] == [2, 4, 6, 8, 9]
    assert sorted(path.name for path in place.out.glob("step_*")) == [BEST, "step_00000009"]
    assert (place.out / WEIGHTS).read_bytes() == (place.out / BEST / WEIGHTS).read_bytes()
    last, _ = go(place, output_dir=str(place.root / "last"), **keys)
    assert (last.weights_step, last.best) == (9, None)
    at_9 = (place.root / "last" / WEIGHTS).read_bytes()
    assert at_9 == (place.out / "step_00000009" / WEIGHTS).read_bytes()


def test_the_last_evaluation_may_be_the_best(place: Workplace) -> None:
    result, _ = go(place, max_steps=4)
    assert result.weights_step == 4 and result.stop_reason == ""
    assert (place.out / WEIGHTS).read_bytes() == (place.out / BEST / WEIGHTS).read_bytes()


def test_patience_without_the_best_weights_writes_the_last_ones(place: Workplace) -> None:
    result, _ = go(place, load_best_model_at_end=False)
    assert (result.steps, result.weights_step) == (10, 10) and result.best is not None and result.best.step == 4
    assert not (place.out / BEST).exists()
    assert (place.out / WEIGHTS).read_bytes() == (place.out / LAST / WEIGHTS).read_bytes()


@pytest.mark.parametrize("key", [{"save_steps": 1}, slow({"saves_per_epoch": 2}), slow({"save_strategy": "best"})])
def test_the_limit_never_deletes_the_best(place: Workplace, key: dict[str, Any]) -> None:
    go(place, save_total_limit=1, save_keep_every=6, **key)
    assert sorted(path.name for path in place.out.glob("step_*")) == [BEST, "step_00000006", LAST]


def test_checkpoints_are_saved_at_the_end_of_epochs_and_a_run_may_have_a_part_of_one(place: Workplace) -> None:
    keys = {"max_steps": -1, "early_stopping_patience": None, "eval_steps": None}
    result, _ = go(place, num_epochs=2.5, save_strategy="epoch", evals_per_epoch=2, **keys)
    assert result.steps == 5
    assert [step for step, _, _ in result.evaluations] == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in place.out.glob("step_*")) == ["step_00000002", BEST]


@pytest.mark.parametrize("keys", [{}, slow({"recipe": "fp8-hybrid", "model_dtype": None})])
def test_an_evaluation_before_the_first_step_changes_no_bit(place: Workplace, keys: dict[str, Any]) -> None:
    """Nor do evaluations between steps, the search for the best, and checkpoints."""
    plain = {"max_steps": 5, "early_stopping_patience": None, **keys}
    go(place, output_dir=str(place.root / "plain"), eval_strategy="no", eval_steps=None, **plain)
    go(place, eval_on_start=True, metric_for_best_model="loss", save_strategy="best", **plain)
    assert [record["step"] for record in records(place.out, "eval")] == [0, 2, 4, 5]
    assert (place.out / WEIGHTS).read_bytes() == (place.root / "plain" / WEIGHTS).read_bytes()


# -------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("step", [4, 5, 10, *map(slow, (1, 6, 9))])
def test_a_run_that_is_stopped_and_resumed_ends_at_the_same_step_with_the_same_bytes(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Also where the signal comes in the step of the best evaluation, or of the one that ends the run."""
    go(place, output_dir=str(place.root / "straight"))
    with monkeypatch.context() as patch:
        stop_after(step, patch)
        stopped, _ = go(place)
    assert stopped.signal_exit == 143 and stopped.steps in (step, step + 1)
    result, _ = go(place, resume_from_checkpoint=True)
    assert (result.steps, result.weights_step) == (10, 4)
    assert results(place.out) == results(place.root / "straight")
    assert told(place.out) == told(place.root / "straight")


@pytest.mark.parametrize("step", [3, 10, *map(slow, (4, 6, 8))])
def test_a_run_that_was_killed_ends_alike_from_any_of_its_checkpoints(place: Workplace, step: int) -> None:
    go(place, save_steps=1, save_total_limit=0)
    before, records_before = results(place.out), told(place.out)
    (place.out / WEIGHTS).unlink()
    result, said = go(place, save_steps=1, save_total_limit=0, resume_from_checkpoint=step)
    assert (result.steps, result.weights_step) == (10, 4), said
    assert results(place.out) == before and told(place.out) == records_before


@pytest.mark.slow
def test_samples_follow_the_step_after_which_the_run_ends(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"sample_prompts": ["a", "b"], "sample_every": 0, "sample_max_new_tokens": 3}
    go(place, **keys, output_dir=str(place.root / "straight"))
    whole = records(place.root / "straight", "sample")
    assert [(record["step"], record["index"]) for record in whole] == [(0, 0), (0, 1), (10, 0), (10, 1)]
    with monkeypatch.context() as patch:
        stop_after(10, patch)
        go(place, **keys)
    for _ in range(2):  # the second time from a checkpoint that has them
        go(place, **keys, resume_from_checkpoint=True)
        found = records(place.out, "sample")
        assert [(r["step"], r["text"]) for r in found] == [(r["step"], r["text"]) for r in whole]


@pytest.mark.slow
def test_more_patience_trains_a_run_on_that_has_stopped(place: Workplace) -> None:
    go(place)
    result, _ = go(place, early_stopping_patience=5, resume_from_checkpoint=True)
    assert (result.steps, result.weights_step) == (14, 4)
    straight, _ = go(place, early_stopping_patience=5, output_dir=str(place.root / "straight"))
    assert straight.evaluations == result.evaluations
    assert [record for record in told(place.out) if record["log"] != "outputs"] == [
        record for record in told(place.root / "straight") if record["log"] != "outputs"
    ]


def test_a_run_resumed_in_another_folder_finds_the_best_in_the_first_one(place: Workplace) -> None:
    go(place, save_steps=1, save_total_limit=0)
    there, here = place.out, place.root / "there"
    result, _ = go(place, output_dir=str(here), resume_from_checkpoint=str(there / "step_00000007"))
    assert (result.steps, result.weights_step) == (10, 4)
    assert (here / WEIGHTS).read_bytes() == (there / BEST / WEIGHTS).read_bytes()
    again, _ = go(place, output_dir=str(here), resume_from_checkpoint=True)
    assert again.weights_step == 4 and (here / WEIGHTS).read_bytes() == (there / BEST / WEIGHTS).read_bytes()


# ------------------------------------------------------------------------------------------------------- bad input


def at(step: int, do: Any) -> Any:
    def listen(report: Report) -> None:
        if isinstance(report, EvalReport) and report.step == step:
            do()

    return listen


def test_a_best_checkpoint_that_is_deleted_while_the_run_trains_is_named_and_the_last_weights_are_kept(
    place: Workplace,
) -> None:
    with pytest.raises(RunStopped) as caught:
        go(place, listen=at(8, lambda: shutil.rmtree(place.out / BEST)))
    text = str(caught.value)
    assert (
        f"the best checkpoint, {place.out / BEST}, is gone" in text
        and f"last weights are in {place.out / LAST}" in text
    )
    assert "\n" not in text and not (place.out / WEIGHTS).exists()
    load_file(place.out / LAST / WEIGHTS)
    with pytest.raises(ConfigError, match=rf"the best checkpoint of the run, \S+{BEST} \(loss .*missing") as caught_two:
        go(place, resume_from_checkpoint=True)
    assert "set load_best_model_at_end: false" in str(caught_two.value)
    result, _ = go(place, resume_from_checkpoint=True, load_best_model_at_end=False)
    assert result.weights_step == 10


def test_a_resumed_run_that_looks_for_another_metric_needs_no_best_of_before(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        stop_after(5, patch)
        go(place)
    (saved,) = (path for path in place.out.glob("step_*") if path.name > BEST)
    shutil.rmtree(place.out / BEST)
    manifest = read_manifest(saved)
    of_another = {**manifest.position, "best": {**manifest.position["best"], "metric": "accuracy"}}
    write_manifest(saved, dataclasses.replace(manifest, position=of_another))
    result, said = go(place, resume_from_checkpoint=True)
    assert any("the best evaluation is looked for from step" in line for line in said)
    assert result.best is not None and result.best.step == result.weights_step == 6 and result.steps == 12


def test_a_damaged_best_checkpoint_becomes_no_output(place: Workplace) -> None:
    def damage() -> None:
        with (place.out / BEST / WEIGHTS).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")

    with pytest.raises(RunStopped, match=r"is gone or damaged \(.*its content differs"):
        go(place, listen=at(8, damage))
    assert not (place.out / WEIGHTS).exists()


def test_a_run_without_a_finite_evaluation_writes_no_output_and_keeps_its_last_weights(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = evaluation.sum_losses
    nan = [math.nan]
    monkeypatch.setattr(evaluation, "sum_losses", lambda *given: dataclasses.replace(sums(*given), totals=nan))
    with pytest.raises(RunStopped, match="no evaluation had a finite loss, so none is the best"):
        go(place)
    assert not (place.out / WEIGHTS).exists()
    load_file(place.out / "step_00000006" / WEIGHTS)  # after three evaluations


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"metric_for_best_model": "accuracy"}, ["do not measure accuracy", "Use loss"]),
        ({"eval_steps": 30}, ["early_stopping_patience", "evaluated after the last one alone", "eval_steps is 30"]),
        ({"eval_delay": 30}, ["evaluated after the last one alone (eval_delay is 30)", "Set a smaller eval_delay"]),
        ({"evals_per_epoch": 3, "eval_steps": None}, ["evals_per_epoch: is 3, but an epoch of this data has 2 steps"]),
        ({"saves_per_epoch": 3}, ["saves_per_epoch: is 3, but an epoch of this data has 2 steps"]),
        ({"early_stopping_threshold": -1}, ["early_stopping_threshold", "at least 0"]),
        ({"validation_datasets": None, "validation_split_ratio": 0}, ["early_stopping_patience: needs evaluations"]),
        ({"save_strategy": "no"}, ["load_best_model_at_end", "save_strategy is no"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line_before_the_first_step(
    place: Workplace, keys: dict[str, Any], words: list[str]
) -> None:
    assert_refused(invoke("train", place.write(load_best_model_at_end=True, **keys)), *words)
    if "metric_for_best_model" in keys:
        assert_refused(invoke("plan", place.write(**keys)), *words)
    assert not (place.out / "metrics.jsonl").exists()


# ------------------------------------------------------------------------------------------------- adapters and ranks


def test_the_adapter_and_the_merged_model_are_those_of_the_best_evaluation(place: Workplace) -> None:
    base = place.root / "base"
    run.train(run.load(place.write(output_dir=str(base), max_steps=2, early_stopping_patience=None)), lambda line: None)
    keys = {"model": str(base), "from_scratch": False, "adapter": "lora", "learning_rate": 0.1}
    result, _ = go(place, merge_adapter=True, **keys)
    assert result.best is not None and 0 < result.weights_step < result.steps < 30
    best = place.out / f"step_{result.weights_step:08d}"
    adapter = {path.name: path.read_bytes() for path in (place.out / "adapter").iterdir() if path.suffix != ".md"}
    assert adapter == {name: (best / name).read_bytes() for name in adapter}
    assert MANIFEST not in adapter and "adapter_model.safetensors" in adapter
    merged = contents(place.out / "merged")
    assert invoke("merge", best, place.root / "merged", "--base", base).returncode == 0
    assert merged[WEIGHTS] == (place.root / "merged" / WEIGHTS).read_bytes()


OFFLOADED = {"offload_weights": 1, "offload_optimizer": True, "recompute": "true"}


@pytest.mark.parametrize("keys", [{"ranks_per_gpu": 2, "zero_level": 3}, slow({"ranks_per_gpu": 2}), OFFLOADED])
def test_ranks_and_offloading_stop_at_the_same_step_as_one_rank(place: Workplace, keys: dict[str, Any]) -> None:
    rows = {"per_device_train_batch_size": 4 // keys.get("ranks_per_gpu", 1)}
    result, _ = go(place, **keys, **rows)
    assert (result.steps, result.weights_step) == (10, 4)
    assert (place.out / WEIGHTS).read_bytes() == (place.out / BEST / WEIGHTS).read_bytes()


@pytest.mark.parametrize("level", [slow(1), 3])
def test_processes_agree_on_the_end_and_write_the_best_weights(place: Workplace, level: int) -> None:
    with several(place, 2, max_steps=30, per_device_train_batch_size=2, zero_level=level) as processes:
        assert processes.statuses() == [0, 0], processes.texts()
    (end,) = records(place.out, "outputs")
    assert (end["step"], end["weights_step"]) == (10, 4)
    model = place.root / "exported"
    assert invoke("export", place.out / BEST, model).returncode == 0
    assert (place.out / WEIGHTS).read_bytes() == (model / WEIGHTS).read_bytes()
    assert "outputs: the weights after step 4" in processes.output(0)
