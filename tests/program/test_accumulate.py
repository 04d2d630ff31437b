"""Gradient accumulation: micro_first writes, micro_next adds; the result is the sum over micro-batches in order."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from random_programs import Family, Run, family
from small_programs import INIT, Trained, train
from torch import Tensor

from surogate_core.api import Value
from surogate_core.program.builder import Builder
from surogate_core.reference.ops import accumulate_rounded

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


def _input(trained: Trained, name: str) -> Tensor:
    inputs = trained.buffers._plan.segments["input"].offsets
    return trained.buffers.persistent(next(v for v in inputs if v.name == name))


def _one_weight(b: Builder) -> Value:
    y = b.apply("linear", b.input("x", (32, 16), "bf16"), b.param("w", (16, 16), INIT))
    return b.apply("toy_dot", y, b.input("direction", (32, 16), "bf16"))


def test_bf16_accumulation_is_unbiased() -> None:
    """Compares with the sums of rounded contributions in fp32. A rounding error of a sum is below one unit in the last
    place (ulp), with mean zero and a standard deviation of at most 1/2 ulp. The mean of N independent errors exceeds
    5 x 0.5 / sqrt(N) with a probability of 1 in 2e6."""
    exact, rounded = (train(_one_weight, dtype="bf16", grad_dtype=g) for g in ("fp32", "bf16"))
    batches = [torch.randn(32, 16, generator=torch.Generator().manual_seed(seed)) for seed in (5, 6)]

    def run(trained: Trained, program: str, batch: int) -> Tensor:
        _input(trained, "x").copy_(batches[batch])
        return trained.run(program)["w"].float()

    first, second = (run(exact, "micro_first", batch).bfloat16().float() for batch in (0, 1))
    errors = []
    for i in range(200):
        run(rounded, "micro_first", 0)
        _input(rounded, "micro_step").fill_(i)
        errors.append((run(rounded, "micro_next", 1) - (first + second)) / _ulp(first + second))
    error = torch.stack(errors)
    assert error.abs().max() < 1
    assert error.std() > 0.1, "no value was rounded, so the test checks nothing"
    assert abs(error.mean()) < 5 * 0.5 / error.numel() ** 0.5


def test_contributions_of_products_are_in_bf16_and_others_in_fp32() -> None:
    """Also of a second op that adds to a gradient in the first micro-step."""

    def build(b: Builder) -> Value:
        tokens, tied = b.input("tokens", (32,), "int32"), b.param("tied", (8, 16), INIT)
        y = b.apply("linear", b.apply("embedding", tokens, tied), b.param("w", (16, 16), INIT))
        norm, _ = b.emit("rmsnorm", y, b.param("norm", (16,), INIT), eps=1e-6)
        return b.apply(
            "toy_dot", b.apply("linear", norm, tied, b.param("bias", (8,), INIT)), b.input("d", (32, 8), "bf16")
        )

    programs = train(build, dtype="bf16", grad_dtype="bf16").programs
    added = {
        name: {
            op.kind: op.outs[-1].dtype
            for op in programs[name].ops
            if any(o.kind == "accumulate_rounded" and o.ins[0] in op.outs for o in programs[name].ops)
        }
        for name in ("micro_first", "micro_next")
    }
    products = {"linear_wgrad": "bf16", "embedding_bwd": "bf16"}
    assert added == {
        "micro_first": {"embedding_bwd": "bf16"},
        "micro_next": products | {"rmsnorm_bwd": "fp32", "linear_bgrad": "fp32"},
    }


def test_rounding_contributions_adds_little_to_the_error_of_their_sum() -> None:
    """Eight micro-steps: the sums' own rounding is relative to a larger number each time."""
    parts = torch.randn(8, 1 << 14, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def error(contributions: Tensor) -> float:
        total = parts[0].bfloat16()
        for i, part in enumerate(contributions[1:]):
            total = accumulate_rounded(part, total, torch.tensor(i), torch.tensor(1), stream=1)
        return float((total.double() - parts.sum(0)).norm())

    exact, rounded = error(parts.float()), error(parts.bfloat16())
    assert exact < rounded < 1.1 * exact


def test_small_addends_are_not_lost_in_a_large_bf16_gradient() -> None:
    """Adds 2^-12 to 1 two thousand times. With rounding to nearest, the sum would remain 1."""

    def build(b: Builder) -> Value:
        return b.apply("toy_dot", b.param("p", (256,), INIT), b.input("direction", (256,), "bf16"))

    trained = train(build, dtype="bf16", grad_dtype="bf16", contents={"direction": torch.ones(256)})
    trained.run()
    _input(trained, "direction").fill_(2**-12)
    for i in range(2000):
        _input(trained, "micro_step").fill_(i)
        trained.executor.run("micro_next")
    mean = float(trained.results()["p"].float().mean())
    expected = float(1 + 2000 * Fraction(1, 4096))
    assert abs(mean - expected) < 0.01  # mean of 256 elements, each with a variance of at most 2000 x 2^-12 x 2^-7
