"""The learning-rate schedule: points computed by hand, continuity, agreement with transformers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from surogate.config.schema import TrainConfig
from surogate.training.schedule import Kind, Schedule
from surogate_core.errors import ConfigError, ProgramError


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
    for kind in get_args(Kind):
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


@given(
    kind=st.sampled_from(get_args(Kind)),
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
        ("lr_scheduler_type", "polynomial"),
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
    ],
)
def test_a_run_gets_more_steps_only_if_no_rate_depends_on_their_number(options: dict[str, Any], extends: bool) -> None:
    given = {"kind": "constant", "base_lr": 1e-3} | options
    short, long = (Schedule.build(total_steps=n, **given) for n in (10, 20))
    assert long.extends(10) == extends and not short.extends(20)
    if extends:
        assert [long.lr(step) for step in range(1, 11)] == [short.lr(step) for step in range(1, 11)]
