"""The learning-rate schedule: points computed by hand, continuity, agreement with transformers."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from surogate.config.schema import TrainConfig
from surogate.training.schedule import Kind, Schedule
from surogate_core.errors import ConfigError, ProgramError

OWN: tuple[Kind, ...] = ("linear", "cosine", "wsd", "constant")
"""Kinds that need no settings and whose warmup, decay and cooldown are ours."""


def build(kind: Kind, total_steps: int, **keys: Any) -> Schedule:
    return Schedule.build(kind, keys.pop("base_lr", 1.0), total_steps, **keys)


def lrs(schedule: Schedule) -> list[float]:
    return [schedule.lr(step) for step in range(1, schedule.total_steps + 1)]


def test_linear_at_points_computed_by_hand() -> None:
    schedule = build("linear", 12, warmup_steps=4, final_lr_fraction=0.2)
    assert lrs(schedule) == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])


def test_cosine_at_points_computed_by_hand() -> None:
    schedule = build("cosine", 10, warmup_steps=2, final_lr_fraction=0.1)
    assert schedule.lr(2) == 1.0
    assert schedule.lr(4) == pytest.approx(0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)  # a quarter of the decay
    assert schedule.lr(6) == pytest.approx(0.55)  # half
    assert schedule.lr(10) == pytest.approx(0.1)


def test_wsd_is_flat_then_one_minus_sqrt_over_the_last_tenth() -> None:
    schedule = build("wsd", 40, warmup_steps=10)
    assert lrs(schedule)[9:36] == [1.0] * 27
    assert lrs(schedule)[36:] == pytest.approx([1 - math.sqrt(k / 4) for k in (1, 2, 3, 4)])


def test_wsd_decays_over_cooldown_steps_when_given() -> None:
    schedule = build("wsd", 40, cooldown_steps=16, wsd_decay_steps_fraction=0.5, final_lr_fraction=0.5)
    assert lrs(schedule)[:24] == [1.0] * 24
    assert schedule.lr(28) == pytest.approx(0.75)  # 4 of 16: sqrt is a half of the way to 0.5
    assert schedule.lr(40) == 0.5


def test_wsd_without_decay_is_constant() -> None:
    assert lrs(build("wsd", 9, wsd_decay_steps_fraction=0.0)) == [1.0] * 9


def test_constant_ignores_the_final_fraction_until_there_is_a_cooldown() -> None:
    assert lrs(build("constant", 4, final_lr_fraction=0.1)) == [1.0] * 4
    schedule = build("constant", 8, cooldown_steps=4, final_lr_fraction=0.2)
    assert lrs(schedule) == pytest.approx([1.0] * 4 + [0.8, 0.6, 0.4, 0.2])


def test_cooldown_starts_at_the_current_rate_not_at_the_final_one() -> None:
    plain, cooled = build("cosine", 100), build("cosine", 100, cooldown_steps=20)
    assert lrs(cooled)[:80] == lrs(plain)[:80]
    start = cooled.lr(80)
    assert start > 0.09
    assert lrs(cooled)[80:] == pytest.approx([start * (20 - k) / 20 for k in range(1, 21)])


def test_cooldown_leaves_linear_unchanged() -> None:
    keys = {"warmup_steps": 7, "final_lr_fraction": 0.1}
    assert lrs(build("linear", 50, cooldown_steps=20, **keys)) == pytest.approx(lrs(build("linear", 50, **keys)))


def test_cooldown_may_be_the_whole_run() -> None:
    assert lrs(build("constant", 4, cooldown_steps=4)) == pytest.approx([0.75, 0.5, 0.25, 0.0])


def test_without_warmup_the_first_step_has_the_base_rate_even_if_it_is_the_last() -> None:
    for kind in OWN:
        assert build(kind, 30).lr(1) == 1.0
    assert build("linear", 1).lr(1) == build("cosine", 1).lr(1) == 1.0


def test_warmup_steps_override_warmup_ratio() -> None:
    assert build("linear", 100, warmup_steps=5, warmup_ratio=0.5).warmup_steps == 5
    assert build("linear", 100, warmup_ratio=0.5).warmup_steps == 50


@pytest.mark.parametrize(("ratio", "total", "steps"), [(0.07, 100, 7), (0.03, 50, 2), (0.1, 30, 3), (1.0, 9, 9)])
def test_warmup_ratio_rounds_up_but_not_by_float_noise(ratio: float, total: int, steps: int) -> None:
    assert build("constant", total, warmup_ratio=ratio).warmup_steps == steps


@pytest.mark.parametrize("warmup", [1, 10, 33])
def test_linear_and_cosine_equal_those_of_transformers_from_index_1(warmup: int) -> None:
    torch = pytest.importorskip("torch")
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    makers = {"linear": get_linear_schedule_with_warmup, "cosine": get_cosine_schedule_with_warmup}
    for kind, make in makers.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
        (factor,) = make(optimizer, num_warmup_steps=warmup, num_training_steps=200).lr_lambdas
        ours = build(kind, 200, base_lr=3e-4, warmup_steps=warmup)
        assert lrs(ours) == pytest.approx([3e-4 * factor(step) for step in range(1, 201)], rel=1e-12, abs=1e-18)


SETTINGS: tuple[tuple[Kind, dict[str, Any]], ...] = (
    ("linear", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 2e-5}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.75}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.5}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 40}),
    ("warmup_stable_decay", {"num_decay_steps": 30}),
    ("warmup_stable_decay", {"num_decay_steps": 40, "num_stable_steps": 20, "min_lr_ratio": 0.1}),
    *(
        ("warmup_stable_decay", {"num_decay_steps": 50, "warmup_type": up, "decay_type": down, "min_lr_ratio": 0.2})
        for up, down in (("linear", "1-sqrt"), ("cosine", "linear"), ("1-sqrt", "cosine"))
    ),
)


def rates_of_transformers(kind: Kind, warmup: int, total: int, settings: dict[str, Any]) -> list[float]:
    """Return the rates of `total` + 1 indices, 0 first, stepped as Trainer steps the schedule."""
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    schedule = get_scheduler(kind, optimizer, warmup, total, settings)
    rates = []
    for _ in range(total + 1):
        rates.append(float(schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("warmup", [1, 10, 33])
@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=str)
def test_each_kind_equals_that_of_transformers_step_by_step(kind: Kind, settings: dict[str, Any], warmup: int) -> None:
    ours = lrs(build(kind, 120, base_lr=3e-4, warmup_steps=0 if kind == "constant" else warmup, settings=settings))
    assert ours == pytest.approx(rates_of_transformers(kind, warmup, 120, settings)[1:], rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("more", [{}, {"warmup_lr_rate": 0.25}])
def test_the_kind_that_warms_up_from_above_zero_equals_that_of_transformers(warmup: int, more: dict[str, Any]) -> None:
    settings = {"min_lr_rate": 0.1} | more
    ours = lrs(build("cosine_warmup_with_min_lr", 60, base_lr=3e-4, warmup_steps=warmup, settings=settings))
    theirs = rates_of_transformers("cosine_warmup_with_min_lr", warmup, 60, settings)[:60]
    assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {"patience": 1},
        {"patience": 0, "factor": 0.5, "cooldown": 2},
        {"patience": 1, "threshold": 0.3, "threshold_mode": "abs", "min_lr": 2e-5},
        {"patience": 0, "eps": 1e-4},
    ],
    ids=str,
)
def test_the_plateau_schedule_equals_that_of_torch_after_each_evaluation(settings: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = get_scheduler("reduce_lr_on_plateau", optimizer, scheduler_specific_kwargs=settings)
    ours = build("reduce_lr_on_plateau", 40, base_lr=3e-4, settings=settings)
    losses = [3.0, 2.0, 2.1, 2.2, 2.3, 1.9, math.nan, 1.8999, 1.5, 1.6, 1.6, 1.7, 1.7, 1.1, 1.3, 1.4, 1.5, 1.6]
    assert ours.lr(1) == 3e-4
    seen = set()
    for number, loss in enumerate(losses, 1):
        theirs.step(loss)
        seen.add(ours.lr(20, losses[:number]))
        assert ours.lr(20, losses[:number]) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)
    assert len(seen) > 1 or "eps" in settings


def test_restarts_begin_at_the_peak_again_and_end_at_the_final_rate() -> None:
    schedule = build("cosine_with_restarts", 41, final_lr_fraction=0.1, settings={"num_cycles": 4})
    assert [step for step in range(1, 42) if schedule.lr(step) == 1.0] == [1, 11, 21, 31]
    assert schedule.lr(41) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [
        ("linear", {"num_cycles": 2}, "lr_scheduler_kwargs: lr_scheduler_type: linear has no settings"),
        ("cosine_with_restarts", {"num_cycles": 2.5}, "lr_scheduler_kwargs.num_cycles"),
        ("cosine_with_restarts", {"num_cycle": 2}, "did you mean num_cycles"),
        ("cosine_with_min_lr", {}, "needs min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 0.0, "min_lr_rate": 0.1}, "not both"),
        ("polynomial", {"power": True}, "lr_scheduler_kwargs.power: must be a number"),
        ("warmup_stable_decay", {}, "lr_scheduler_kwargs.num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "decay_type": "step"}, "lr_scheduler_kwargs.decay_type"),
        ("warmup_stable_decay", {"num_decay_steps": 90, "num_stable_steps": 20}, "20 of stable rate"),
        ("reduce_lr_on_plateau", {"factor": 1.5}, "lr_scheduler_kwargs.factor"),
    ],
)
def test_settings_that_a_kind_has_not_are_refused(kind: Kind, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        build(kind, 100, settings=settings)


@given(
    kind=st.sampled_from(OWN),
    total=st.integers(1, 300),
    warmup=st.floats(0, 1),
    cooldown=st.floats(0, 1),
    final=st.floats(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_every_schedule_rises_to_base_then_never_rises_and_ends_at_its_final_rate(
    kind: str, total: int, warmup: float, cooldown: float, final: float
) -> None:
    warmup_steps = int(warmup * total)
    cooldown_steps = int(cooldown * (total - warmup_steps))
    try:
        schedule = build(kind, total, warmup_steps=warmup_steps, cooldown_steps=cooldown_steps, final_lr_fraction=final)
    except ConfigError:
        assert kind == "wsd" and cooldown_steps == 0  # only the default decay of a tenth can fail to fit
        return
    values, slack = lrs(schedule), 1e-12
    rising, falling = values[: schedule.warmup_steps], values[max(schedule.warmup_steps - 1, 0) :]
    assert all(a < b for a, b in pairwise(rising))
    assert all(a >= b - slack for a, b in pairwise(falling))
    assert all(0 < value <= 1 + slack for value in rising)
    if warmup_steps:
        assert values[warmup_steps - 1] == 1.0
    decays = schedule.cooldown_steps > 0 or (kind in ("linear", "cosine") and total > max(warmup_steps, 1))
    assert values[-1] == pytest.approx(final if decays else 1.0)


def test_phases_that_do_not_fit_are_refused_with_their_numbers() -> None:
    with pytest.raises(ConfigError, match=r"900 steps of warmup \(warmup_ratio: 0\.9\) and 200 of .* 1100 .* 1000"):
        build("cosine", 1000, warmup_ratio=0.9, cooldown_steps=200)
    with pytest.raises(ConfigError, match=r"100 steps of warmup \(warmup_steps: 100\) do not fit: .* the run has 50"):
        build("linear", 50, warmup_steps=100)
    with pytest.raises(ConfigError, match=r"5 of cooldown \(wsd_decay_steps_fraction: 0\.1\)"):
        build("wsd", 50, warmup_steps=48)


def test_a_run_without_steps_has_no_schedule() -> None:
    with pytest.raises(ConfigError, match="0 steps"):
        build("linear", 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr_scheduler_type", "greedy"),
        ("learning_rate", math.nan),
        ("learning_rate", -1e-4),
        ("warmup_steps", -1),
        ("cooldown_steps", -3),
        ("warmup_ratio", 1.5),
        ("final_lr_fraction", -0.1),
        ("wsd_decay_steps_fraction", math.nan),
    ],
)
def test_values_out_of_range_are_refused_with_the_key(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        TrainConfig.model_validate({"model": "m", "output_dir": "o", key: value})


@pytest.mark.parametrize("step", [0, -1, 11])
def test_a_step_outside_the_run_is_a_program_error(step: int) -> None:
    with pytest.raises(ProgramError, match=rf"step {step}, but the run has steps 1 to 10"):
        build("linear", 10).lr(step)


@pytest.mark.parametrize(
    ("options", "extends"),
    [
        ({}, True),
        ({"warmup_steps": 3}, True),
        ({"warmup_ratio": 0.1}, False),
        ({"cooldown_steps": 2}, False),
        ({"kind": "linear"}, False),
        ({"kind": "inverse_sqrt", "warmup_steps": 3}, True),
        ({"kind": "cosine_with_restarts"}, False),
    ],
)
def test_a_run_gets_more_steps_only_if_no_rate_depends_on_their_number(options: dict[str, Any], extends: bool) -> None:
    given = {"kind": "constant", "base_lr": 1e-3} | options
    short, long = (Schedule.build(total_steps=n, **given) for n in (10, 20))
    assert long.extends(10) == extends and not short.extends(20)
    if extends:
        assert [long.lr(step) for step in range(1, 11)] == [short.lr(step) for step in range(1, 11)]
