"""Gradient accumulation: micro_first writes, micro_next adds; the result is the sum over micro-batches in order."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from random_programs import Family, Run, family
from small_programs import INIT, train
from torch import Tensor

from surogate_core.api import Value
from surogate_core.program.builder import Builder

MICRO_STEPS = 3


def _separate(given: Family) -> list[dict[str, Tensor]]:
    """Return the results of each micro-batch, run on its own."""
    results = []
    run = Run(given)
    for batch in range(MICRO_STEPS):
        run.micro_step("micro_first", batch)
        results.append(run.results())
    return results


def _accumulated(
    given: Family, *, micro_step: int = 0, seed: int = 1234, steps: int = MICRO_STEPS
) -> dict[str, Tensor]:
    run = Run(given)
    for batch in range(steps):
        run.micro_step("micro_next" if batch else "micro_first", batch, micro_step=micro_step + batch, seed=seed)
    return run.results()


def _contributions(given: Family, name: str) -> int:
    """Return the number of ops that write the gradient of the param `name`."""
    gradient = next(g for p, g in given.gradients.items() if p.name == name)
    return sum(gradient in op.outs for op in given.trained.ops)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", range(12))
def test_micro_steps_accumulate_in_order(seed: int, dtype: str) -> None:
    """The result is bit-identical if one op writes the gradient. Contributions of several ops are added one by one, so
    their order differs from that of adding whole gradients; the tolerance is a few eps of the largest partial sum."""
    given = family(seed, dtype=dtype)
    parts = _separate(given)
    for name, value in _accumulated(given).items():
        expected = parts[0][name].clone()
        for part in parts[1:]:
            expected += part[name]
        if name == "loss" or _contributions(given, name) == 1:
            assert torch.equal(value, expected), f"seed {seed}: {name}"
        else:
            size = sum(float(part[name].norm()) for part in parts)
            assert (value - expected).norm() <= 1e-6 * size + 1e-12, f"seed {seed}: {name}"


def test_the_first_micro_step_overwrites_gradients() -> None:
    given = family(1)
    run = Run(given)
    run.micro_step("micro_first")
    fresh = run.results()
    run.micro_step("micro_next", 1)
    run.micro_step("micro_first")
    for name, value in run.results().items():
        assert torch.equal(value, fresh[name]), name


# --------------------------------------------------------------------------------------------------- bf16 gradients


def _ulp(x: Tensor) -> Tensor:
    """Return the spacing of bf16 numbers at `x`. The mantissa has 8 bits, one of them implicit."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - 8)


@pytest.mark.parametrize("seed", range(6))
def test_bf16_gradients_are_determined_by_micro_step_and_seed(seed: int) -> None:
    given = family(seed, dtype="bf16", grad_dtype="bf16")
    once, again, other = (_accumulated(given, micro_step=micro_step) for micro_step in (0, 0, 100))
    other_seed = _accumulated(given, seed=99)
    assert all(torch.equal(value, again[name]) for name, value in once.items()), f"seed {seed}"
    assert any(not torch.equal(value, other[name]) for name, value in once.items()), f"seed {seed}"
    assert any(not torch.equal(value, other_seed[name]) for name, value in once.items()), f"seed {seed}"


def test_rounding_depends_on_the_high_bits_of_the_seed() -> None:
    given = family(0, dtype="bf16", grad_dtype="bf16")
    low, high = _accumulated(given, seed=1), _accumulated(given, seed=1 + (1 << 40))
    assert any(not torch.equal(value, high[name]) for name, value in low.items())


def _one_weight(b: Builder) -> Value:
    y = b.apply("linear", b.input("x", (32, 16), "bf16"), b.param("w", (16, 16), INIT))
    return b.apply("toy_dot", y, b.input("direction", (32, 16), "bf16"))


def test_bf16_accumulation_is_unbiased() -> None:
    """Compares with the same sums in fp32. A rounding error is below one unit in the last place (ulp), with mean zero
    and a standard deviation of at most 1/2 ulp. The mean of N independent errors exceeds 5 x 0.5 / sqrt(N) with a
    probability of 1 in 2e6."""
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))
    exact, rounded = (train(_one_weight, dtype="bf16", grad_dtype=g, contents={"x": x}) for g in ("fp32", "bf16"))
    contribution = exact.run()["w"]
    start = contribution.bfloat16().float()
    micro_step = next(v for v in rounded.buffers._plan.segments["input"].offsets if v.name == "micro_step")
    errors = []
    for i in range(200):
        rounded.run()
        rounded.buffers.persistent(micro_step).fill_(i)
        got = rounded.run("micro_next")["w"].float()
        errors.append((got - (start + contribution)) / _ulp(start + contribution))
    error = torch.stack(errors)
    assert error.abs().max() < 1
    assert error.std() > 0.1, "no value was rounded, so the test checks nothing"
    assert abs(error.mean()) < 5 * 0.5 / error.numel() ** 0.5


def test_small_addends_are_not_lost_in_a_large_bf16_gradient() -> None:
    """Adds 2^-12 to 1 two thousand times. With rounding to nearest, the sum would remain 1."""

    def build(b: Builder) -> Value:
        return b.apply("toy_dot", b.param("p", (256,), INIT), b.input("direction", (256,), "bf16"))

    trained = train(build, dtype="bf16", grad_dtype="bf16", contents={"direction": torch.ones(256)})
    inputs = {v.name: trained.buffers.persistent(v) for v in trained.buffers._plan.segments["input"].offsets}
    trained.run()
    inputs["direction"].fill_(2**-12)
    for i in range(2000):
        inputs["micro_step"].fill_(i)
        trained.executor.run("micro_next")
    mean = float(trained.results()["p"].float().mean())
    expected = float(1 + 2000 * Fraction(1, 4096))
    assert abs(mean - expected) < 0.01  # mean of 256 elements, each with a variance of at most 2000 x 2^-12 x 2^-7
