"""Early stopping, cadences, and which checkpoints stay: rules without a run."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surogate.checkpoints.best import Best
from surogate.checkpoints.folders import list_checkpoints, prune_checkpoints, save_checkpoint, step_folder
from surogate.runs.plan import refuse_unmeasured
from surogate.training.best_rule import BestRule
from surogate.training.cadence import Cadence, cadence_of, evaluations_of, steps_of
from surogate_core.errors import ConfigError, RunStopped


def rule(**changes: Any) -> BestRule:
    return BestRule(**{"metric": "loss", "greatest": False, **changes})


def judged(rule: BestRule, values: list[float]) -> tuple[Best, int]:
    """Return the best, and the number of evaluations after which the run has ended, of one every ten steps."""
    best = rule.begun(None, print)
    for count, value in enumerate(values, start=1):
        best = rule.after(best, 10 * count, value, [], [])
        if rule.ends(best):
            break
    return best, count


def of_transformers(values: list[float], greatest: bool, patience: int, threshold: float) -> tuple[int, float, int]:
    """Return the best step, its value and the number of evaluations of transformers' Trainer and its callback."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerControl, TrainerState, TrainingArguments

    names: dict[str, Any] = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    args = TrainingArguments("unused", metric_for_best_model="m", greater_is_better=greatest, use_cpu=True, **names)
    callback, state, control = EarlyStoppingCallback(patience, threshold), TrainerState(), TrainerControl()
    trainer: Any = SimpleNamespace(args=args, state=state)
    for count, value in enumerate(values, start=1):
        state.global_step = 10 * count
        callback.on_evaluate(args, state, control, {"eval_m": value})
        Trainer._determine_best_metric(trainer, {"eval_m": value}, None)
        if control.should_training_stop:
            break
    assert state.best_metric is not None and state.best_global_step is not None
    return state.best_global_step, state.best_metric, count


@pytest.mark.parametrize("greatest", [False, True])
def test_the_best_step_and_the_end_are_those_of_the_callback_of_transformers(greatest: bool) -> None:
    draw = random.Random(5)
    ends = set()
    for _ in range(60):
        values = [round(draw.uniform(0, 1), 1) for _ in range(12)]  # some are equal
        patience, threshold = draw.randint(1, 4), draw.choice([0.0, 0.15])
        best, count = judged(rule(greatest=greatest, patience=patience, threshold=threshold), values)
        assert (best.step, best.value, count) == of_transformers(values, greatest, patience, threshold), values
        ends.add(count)
    assert len(ends) > 4, "the sequences must end at different evaluations"


def test_a_small_improvement_is_the_best_but_does_not_count_against_patience() -> None:
    best, count = judged(rule(patience=2, threshold=0.5), [3.0, 2.9, 2.8, 1.0])
    assert (best.step, best.value, best.waited, count) == (30, 2.8, 2, 3)


def test_nan_is_never_the_best_and_is_waited_for() -> None:
    best, count = judged(rule(patience=3), [math.nan, 2.0, math.nan, math.inf, math.nan])
    assert (best.step, best.value, count) == (20, 2.0, 5)
    none, count = judged(rule(patience=2, loads=True), [math.nan] * 9)
    assert (none.step, count) == (0, 2)
    with pytest.raises(RunStopped, match="no evaluation had a finite loss"):
        rule(loads=True).refuse_none(none)
    rule(loads=False).refuse_none(none)


def test_a_better_evaluation_is_of_this_run_though_the_one_before_was_of_another() -> None:
    elsewhere = Best("loss", False, step=4, value=2.0, folder="/runs/first")
    assert elsewhere.after(6, 2.0, 0.0).folder == "/runs/first", "an equal value is no better one"
    assert elsewhere.after(6, 1.0, 0.0) == Best("loss", False, step=6, value=1.0)


def test_another_metric_is_looked_for_anew_when_a_run_resumes() -> None:
    said: list[str] = []
    saved = Best("loss", False, step=40, value=1.5, waited=1)
    assert rule().begun(saved, said.append, 60) == saved and not said
    assert rule(metric="accuracy", greatest=True).begun(saved, said.append, 60) == Best("accuracy", True)
    assert rule().begun(None, said.append, 60) == Best("loss", False)
    assert [line.split(": ")[1] for line in said] == ["before, the run looked for the least loss",
                                                       "before, the run did not look for one"]  # fmt: skip


def test_a_metric_that_is_not_measured_is_refused_with_those_that_are() -> None:
    measured = ["loss", "rewards/margins", "rewards/accuracies"]
    refuse_unmeasured(SimpleNamespace(best_metric="rewards/margins"), measured)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as caught:
        refuse_unmeasured(SimpleNamespace(best_metric="accuracy"), measured)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "metric_for_best_model: the evaluations of this run do not measure accuracy. Use one of loss, rewards/margins, "
        "rewards/accuracies."
    )


@pytest.mark.parametrize(("epoch", "times"), [(10, 1), (10, 3), (7, 7), (7, 2), (1, 1), (101, 4)])
def test_n_times_an_epoch_is_n_times_at_equal_distances_and_at_its_end(epoch: int, times: int) -> None:
    cadence = Cadence(times=times, epoch=epoch)
    due = [step for step in range(1, 3 * epoch + 1) if cadence.due(step)]
    assert len(due) == 3 * times
    assert {epoch, 2 * epoch, 3 * epoch} <= {*due}
    gaps = {after - before for before, after in zip([0, *due], due, strict=False)}
    assert max(gaps) - min(gaps) <= 1
    assert list(cadence.within(3 * epoch)) == due[:-1]


def test_a_run_of_more_evaluations_than_memory_holds_names_each_when_it_is_asked() -> None:
    """`num_epochs: 1e9` with `evals_per_epoch` took memory until it ended."""
    total, somewhere = 30 * 10**12, 2 * 10**13
    for cadence in (Cadence(times=7, epoch=30), Cadence(5), Cadence(times=7, epoch=30, first=10**13)):
        due = cadence.within(total)
        at = bisect_right(due, somewhere)
        following = [step for step in range(somewhere + 1, somewhere + 100) if cadence.due(step)]
        assert due[at : at + len(following)] == following
        assert due[at - 1] <= somewhere and cadence.due(due[at - 1])
        assert cadence.due(due[-1]) and not any(map(cadence.due, range(due[-1] + 1, total)))
        assert cadence.due(due[0]) and not any(map(cadence.due, range(max(1, due[0] - 30), due[0])))
        evaluated = replace(due, last=(total,))
        assert evaluated[-2:] == [due[-1], total] and len(evaluated) == len(due) + 1


def test_steps_are_whole_or_a_part_of_the_run_as_transformers_rounds_it() -> None:
    assert [steps_of(given, 100) for given in (0, 7, 0.07, 0.255, 0.001)] == [0, 7, 7, 26, 1]
    assert list(Cadence(4).within(12)) == [4, 8] and list(Cadence().within(12)) == []


@pytest.mark.parametrize(("delay", "keys", "evaluated"), [
    (0, {}, [20, 40, 60, 80]),
    (40, {}, [40, 60, 80]),
    (41, {}, [60, 80]),
    (1, {"eval_strategy": "epoch"}, [30, 60, 90]),
    (1.5, {"eval_strategy": "epoch"}, [60, 90]),
    (0.5, {"evals_per_epoch": 3}, [20, 30, 40, 50, 60, 70, 80, 90]),
    (100, {}, []),
])  # fmt: skip
def test_evaluations_begin_after_the_delay_in_steps_or_epochs(
    delay: float, keys: dict[str, Any], evaluated: list[int]
) -> None:
    """100 steps, 30 an epoch. An evaluation at the delay itself is one, as in transformers."""
    cadence = evaluations_of(config(**{"eval_steps": 20, "eval_delay": delay} | keys), 100, 30)
    assert [*cadence.within(100)] == evaluated == [step for step in range(1, 100) if cadence.due(step)]


def config(**keys: Any) -> Any:
    known = {
        f"{what}_{key}": value for what in ("eval", "save") for key, value in (("strategy", "steps"), ("steps", 50))
    }
    known |= {"evals_per_epoch": None, "saves_per_epoch": None} | keys
    in_epochs = known["eval_strategy"] == "epoch" or known["evals_per_epoch"] is not None
    return SimpleNamespace(**known, counts_epochs=in_epochs)


def test_cadences_follow_from_the_keys() -> None:
    assert cadence_of(config(), "save", 400, 100) == Cadence(50)
    assert cadence_of(config(eval_steps=0.1), "eval", 400, 100) == Cadence(40)
    assert cadence_of(config(eval_strategy="epoch"), "eval", 400, 100) == Cadence(times=1, epoch=100)
    assert cadence_of(config(evals_per_epoch=4), "eval", 400, 100) == Cadence(times=4, epoch=100)
    for strategy in ("no", "best"):
        assert cadence_of(config(save_strategy=strategy), "save", 400, 100) == Cadence()
    with pytest.raises(
        ConfigError, match=r"evals_per_epoch: is 5, but an epoch of this data has 4 steps\. Use 4 or less"
    ):
        cadence_of(config(evals_per_epoch=5), "eval", 400, 4)


@pytest.mark.parametrize(
    ("keep", "best", "every", "kept"),
    [
        (3, None, 0, [70, 80, 90]),
        (3, 20, 0, [20, 80, 90]),
        (3, 80, 0, [70, 80, 90]),
        (1, 20, 0, [20, 90]),
        (1, 90, 0, [90]),
        (2, 20, 40, [20, 40, 80, 90]),
        (2, 40, 40, [40, 70, 80, 90]),
        (0, 20, 0, list(range(10, 100, 10))),
        (3, 999, 0, [70, 80, 90]),
    ],
)
def test_the_best_and_those_for_ever_stay_whatever_the_limit(
    tmp_path: Path, keep: int, best: int | None, every: int, kept: list[int]
) -> None:
    for step in range(10, 100, 10):
        save_checkpoint(tmp_path, step, lambda folder: None)
    save_checkpoint(tmp_path, 200, lambda folder: None)  # of an earlier run
    prune_checkpoints(tmp_path, keep, newest=90, best=best, keep_every=every)
    assert list_checkpoints(tmp_path) == [step_folder(tmp_path, step) for step in (*kept, 200)]
