"""AdamW compared with torch's, and properties of bf16 masters and moments: unbiased, reproducible, skippable steps."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Builder, Init, Precision, Scalars, TrainedParam, UpdateContext, Value
from surogate_core.api.param_update import update_table
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.programs import STANDARD_OPS, Buffers, ReferenceExecutor, plan_programs, verify
from surogate_optim_adamw.adamw import ADAMW, ADAMW_OP, AdamWOptions
from surogate_optim_adamw.kernels import CHUNK_SIZE

OPS = {definition.kind: definition for definition in (*STANDARD_OPS, ADAMW_OP)}
SHAPES = [(), (1,), (7,), (64,), (1, 1), (33, 17), (3, 5, 7)]
SCALES = [1.0, 1e-2, 1e-5]
"""Magnitudes of the gradients, in turn for each shape. Relative to the last, an epsilon of 1e-6 is not small."""

STEPS = 20


class Updates:
    """AdamW over params in planned buffers. A param is named by its index; `draw` sets random contents."""

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        *,
        model: str = "fp32",
        master: str | None = None,
        grad: str | None = None,
        state: str = "fp32",
        weight_decay: float = 0.0,
        measured: bool = False,
        **options: float,
    ) -> None:
        b = Builder(OPS, model)
        self.measured = measured
        self.scalars = Scalars(
            b.input("lr", (), "fp32"),
            b.input("step", (), "int32"),
            b.input("micro_step", (), "int32"),
            b.input("seed", (), "int64"),
        )
        self.clip_coef = b.input("clip_coef", (), "fp32")
        self.params = [self._param(b, str(i), shape, grad or model, master or model) for i, shape in enumerate(shapes)]
        precision = Precision(
            model=model,
            matmul=model,
            gradient=model,
            master=master or model,
            adapter=model,
            param_grad=grad or model,
            optimizer_state=state,
        )
        context = UpdateContext(
            builder=b,
            params=self.params,
            clip_coef=self.clip_coef,
            scalars=self.scalars,
            precision=precision,
            weight_decay=weight_decay,
            options=AdamWOptions(**options),
        )
        with b.record("update"):
            ADAMW.update(context)
            program = b.program("update", tuple(p.amax for p in self.params if p.amax is not None))
        verify(program, OPS)
        self.ops = program.ops
        self.declared = {v.name: v for v in b.declared}
        memory = plan_programs([program], b.declared, lambda op: 0)
        self.buffers = Buffers(memory, poison=True)
        self.executor = ReferenceExecutor({"update": program}, OPS, self.buffers, poison=True)

    def _param(self, b: Builder, name: str, shape: tuple[int, ...], grad: str, master: str) -> TrainedParam:
        param = b.param(name, shape, Init(kind="ones"))
        own = param if param.dtype == master else b.state(f"master.{name}", shape, master, None)
        amax = b.activation("amax", (), "fp32") if self.measured else None
        return TrainedParam(
            param=param,
            grad=b.grad(param, grad),
            master=own,
            of_model=True,
            kind="matrix" if len(shape) > 1 else "vector",
            matrices=(),
            amax=amax,
        )

    def __getitem__(self, value: Value | str) -> Tensor:
        return self.buffers.persistent(self.declared[value] if isinstance(value, str) else value)

    def draw(self, generator: torch.Generator) -> None:
        """Set the masters to random values of magnitude one, and the work copies to the rounded masters."""
        for p in self.params:
            self[p.master].copy_(torch.randn(p.param.shape, generator=generator, dtype=torch.float64))
            self[p.param].copy_(self[p.master])

    def step(self, grads: Sequence[Tensor], *, step: int, lr: float = 1e-3, coef: float = 1.0, seed: int = 0) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            self[p.grad].copy_(grad)
        scalars = self.scalars
        for value, content in ((scalars.lr, lr), (scalars.step, step), (scalars.seed, seed), (self.clip_coef, coef)):
            self[value].fill_(content)
        self.executor.run("update")

    def everything(self) -> dict[str, Tensor]:
        """Return the bytes of params, masters and moments."""
        kept = {name: v for name, v in self.declared.items() if v.role in ("param", "state")}
        return {name: self[v].clone().reshape(-1).view(torch.uint8) for name, v in kept.items()}

    def amaxes(self) -> list[Tensor]:
        return [self.buffers.view(p.amax, "update") for p in self.params if p.amax is not None]

    def restore(self, bits: Mapping[str, Tensor]) -> None:
        for name, content in bits.items():
            self[name].reshape(-1).view(torch.uint8).copy_(content)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw_like(values: Sequence[TrainedParam], gen: torch.Generator) -> list[Tensor]:
    return [torch.randn(p.param.shape, generator=gen, dtype=torch.float64) for p in values]


def ulp(x: Tensor) -> Tensor:
    """Return the spacing of bf16 numbers at `x`."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - 8)


# --------------------------------------------------------------------------------------------------------- the formula


@pytest.mark.parametrize(("dtype", "eps"), [("fp32", 2.0**-24), ("fp64", 2.0**-53)])
def test_twenty_steps_match_torch(dtype: str, eps: float) -> None:
    """Only matrices have decay, gradients are scaled by the clip coefficient, and the rate changes at every step.

    A step rounds the param three times (decay, difference) and its update, of magnitude lr, about ten times, in a
    different order from torch. Each rounding has a relative error of eps. In fp64 the total is far below 1e-12.
    """
    ours = Updates(
        SHAPES, model=dtype, state=dtype, weight_decay=0.1, adamw_beta1=0.875, adamw_beta2=0.96875, adamw_epsilon=1e-6
    )
    gen = generator()
    ours.draw(gen)
    theirs = [torch.nn.Parameter(ours[p.param].clone()) for p in ours.params]
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim >= 2 else 0.0} for p in theirs]
    optimizer = torch.optim.AdamW(groups, betas=(0.875, 0.96875), eps=1e-6)
    bound = 0.0
    for step in range(1, STEPS + 1):
        lr, coef = 2.0**-8 * step / 32, 1.0 if step % 3 else 0.25  # both exact in fp32
        drawn = draw_like(ours.params, gen)
        grads = [(SCALES[i % 3] * g).to(TORCH_DTYPES[dtype]) for i, g in enumerate(drawn)]
        ours.step(grads, step=step, lr=lr, coef=coef)
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = coef * grad
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        bound += eps * (3 * 4.5 + 10 * 4 * lr)  # |param| < 4.5, |m| / sqrt(v) < 4
        for i, (p, parameter) in enumerate(zip(ours.params, theirs, strict=True)):
            assert (ours[p.param] - parameter).abs().max() <= min(bound, 1e-12 if dtype == "fp64" else 1), p.param
            state = optimizer.state[parameter]
            for name, key, size in (("m", "exp_avg", 5 * SCALES[i % 3]), ("v", "exp_avg_sq", (5 * SCALES[i % 3]) ** 2)):
                moment = ours[f"adamw.{name}.{p.param.name}"]
                assert (moment - state[key]).abs().max() <= 3 * step * eps * size  # three roundings per step


def test_the_first_step_is_lr_times_the_sign() -> None:
    """With bias correction, m / sqrt(v) = sign(g) for any gradient and any betas."""
    for size in (1e-3, 1.0, 1e4):
        ours = Updates([(256,)], adamw_epsilon=1e-12)
        grad = size * (torch.rand(256, generator=generator()) + 0.5)
        ours.step([grad], step=1, lr=0.5)
        torch.testing.assert_close(ours["0"], torch.full((256,), -0.5), rtol=1e-6, atol=0)


def test_only_matrices_decay() -> None:
    """With zero gradients, decay is the only change."""
    ours = Updates(SHAPES, weight_decay=0.5)
    ours.draw(generator())
    before = [ours[p.param].clone() for p in ours.params]
    ours.step([torch.zeros(shape) for shape in SHAPES], step=1, lr=0.25)
    for p, old in zip(ours.params, before, strict=True):
        assert torch.equal(ours[p.param], old * (1 - 0.25 * 0.5) if len(p.param.shape) >= 2 else old), p.param


def test_the_clip_coefficient_scales_the_gradient() -> None:
    clipped, scaled = Updates(SHAPES, model="fp64"), Updates(SHAPES, model="fp64")
    for step in range(1, 4):
        grads = draw_like(clipped.params, generator(step))
        clipped.step(grads, step=step, coef=0.125)
        scaled.step([g * 0.125 for g in grads], step=step)
    kept = scaled.everything()
    assert all(torch.equal(bits, kept[name]) for name, bits in clipped.everything().items())


def test_options_outside_their_range_are_rejected() -> None:
    for wrong in ({"adamw_beta1": 1.0}, {"adamw_beta2": -0.1}, {"adamw_epsilon": 0.0}, {"beta1": 0.9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AdamWOptions(**wrong)


# ------------------------------------------------------------------------------------------------------- skipped steps


# ----------------------------------------------------------------------------------------------------- dtypes of states


def test_the_work_copy_is_the_master_rounded_to_nearest() -> None:
    ours = Updates(SHAPES, model="bf16", master="fp32", grad="fp32", weight_decay=0.1)
    same = Updates(SHAPES, model="fp32", weight_decay=0.1)
    for updates in (ours, same):
        updates.draw(generator())
    for step in range(1, STEPS + 1):
        grads = draw_like(ours.params, generator(step))
        ours.step(grads, step=step, lr=1e-2)
        same.step(grads, step=step, lr=1e-2)
        for p, plain in zip(ours.params, same.params, strict=True):
            assert torch.equal(ours[p.master], same[plain.param])
            assert ours[p.param].dtype == torch.bfloat16
            assert torch.equal(ours[p.param], ours[p.master].bfloat16())


@pytest.mark.parametrize("coef", [1.0, float("nan")])
@pytest.mark.parametrize(("model", "master"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")])
def test_the_amax_is_that_of_the_param_after_the_step(model: str, master: str, coef: float) -> None:
    """Also after a skipped step, where the param is what it was before."""
    ours = Updates(SHAPES, model=model, master=master, grad="fp32", measured=True)
    ours.draw(generator())
    ours.step(draw_like(ours.params, generator(1)), step=1, lr=0.5)
    ours.step(draw_like(ours.params, generator(2)), step=2, lr=0.5, coef=coef)
    for p, amax in zip(ours.params, ours.amaxes(), strict=True):
        assert amax.shape == () and amax == ours[p.param].abs().max(), p.param


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
def test_an_amax_is_not_finite_if_the_param_is_not(special: float) -> None:
    ours = Updates([(33, 17)], model="bf16", measured=True)
    ours.draw(generator())
    ours["0"][5, 7] = special
    ours.step(draw_like(ours.params, generator(1)), step=1)
    torch.testing.assert_close(ours.amaxes()[0], torch.tensor(special).abs(), equal_nan=True)


def rounded_and_exact(seeds: int, **narrow: Any) -> tuple[Updates, Updates, dict[str, Tensor]]:
    """Run one step from equal states with `narrow` dtypes and in fp32.

    Returns both and {state: errors [seeds, elements] in units in the last place}.
    """
    shapes = [(16, 32)]
    gen = generator(5)
    ours, exact = Updates(shapes, grad="fp32", **narrow), Updates(shapes, grad="fp32")
    for updates in (ours, exact):
        updates.step([torch.ones(shapes[0])], step=1, lr=0.0)  # initializes the moments
    contents = {
        "0": torch.randn(shapes[0], generator=gen),
        "adamw.m.0": torch.randn(shapes[0], generator=gen),
        "adamw.v.0": torch.rand(shapes[0], generator=gen) + 0.5,
    }
    for name, content in contents.items():
        for updates in (ours, exact):
            updates[name].copy_(content.bfloat16())
    start, grads = ours.everything(), [torch.randn(shapes[0], generator=gen)]
    exact.step(grads, step=7, lr=0.03)
    errors: dict[str, list[Tensor]] = {name: [] for name in contents}
    for seed in range(seeds):
        ours.restore(start)
        ours.step(grads, step=7, lr=0.03, seed=seed)
        for name in contents:
            errors[name].append(((ours[name].float() - exact[name]) / ulp(exact[name])).flatten())
    return ours, exact, {name: torch.stack(error) for name, error in errors.items()}


@pytest.mark.parametrize(
    ("narrow", "states"),
    [
        ({"model": "bf16", "state": "fp32"}, ("0",)),
        ({"model": "fp32", "state": "bf16"}, ("adamw.m.0", "adamw.v.0")),
        ({"model": "bf16", "state": "bf16"}, ("0", "adamw.m.0", "adamw.v.0")),
    ],
    ids=["master", "moments", "both"],
)
def test_stochastic_rounding_is_unbiased(narrow: dict[str, Any], states: tuple[str, ...]) -> None:
    """A rounding error is less than one unit, with mean zero and a standard deviation of at most 1/2. The mean of all
    errors must be within 5 standard deviations, the mean over the seeds of each of the 512 elements within 6."""
    seeds = 200
    _, _, errors = rounded_and_exact(seeds, **narrow)
    for name, error in errors.items():
        if name not in states:
            assert not error.any(), name  # fp32 states are bit-identical, because the step uses the unrounded moments
            continue
        assert error.abs().max() < 1, name
        assert error.std() > 0.3, f"{name}: almost no value was rounded"
        assert abs(error.mean()) < 5 * 0.5 / error.numel() ** 0.5, name
        assert error.mean(0).abs().max() < 6 * 0.5 / seeds**0.5, name


def test_updates_far_below_half_a_unit_change_the_mean() -> None:
    """Takes 400 steps of 1e-5 down from 1, where bf16 numbers are 2^-8 apart. Rounding to nearest would stay at 1.

    A step changes an element by one unit with probability 1e-5 / 2^-8, so the sum of 400 steps has a variance of at
    most 400 x 1e-5 x 2^-8. The mean of 4096 elements must be within five standard deviations.
    """
    ours = Updates([(4096,)], model="bf16", grad="fp32", adamw_epsilon=1e-12)
    ours["0"].fill_(1.0)
    for step in range(1, 401):
        ours.step([torch.ones(4096)], step=step, lr=1e-5, seed=11)
    moved = 1 - float(ours["0"].float().mean())
    assert abs(moved - 400e-5) < 5 * (400 * 1e-5 * 2**-8 / 4096) ** 0.5


def bits_of_a_step(*, seed: int = 3, step: int = 5, clip: float = 1.0) -> dict[str, Tensor]:
    ours = Updates([(32, 32), (32, 32)], model="bf16", state="bf16", grad="fp32")
    ours.draw(generator())
    twin = torch.randn(32, 32, generator=generator(1))
    ours["1"].copy_(ours["0"])
    ours.step([twin, twin], step=step, seed=seed, coef=clip)
    return ours.everything()


def test_the_same_seed_and_step_give_the_same_bits() -> None:
    again = bits_of_a_step()
    assert all(torch.equal(bits, again[name]) for name, bits in bits_of_a_step().items())


def test_another_seed_rounds_everything_differently() -> None:
    one = bits_of_a_step()
    for seed in (4, 3 + (1 << 32), 3 - (1 << 40)):
        other = bits_of_a_step(seed=seed)
        assert all(not torch.equal(bits, other[name]) for name, bits in one.items()), seed


def test_another_step_rounds_differently() -> None:
    """The moments depend on the step number only through the random bits."""
    one, other = bits_of_a_step(step=5), bits_of_a_step(step=6)
    assert all(not torch.equal(one[f"adamw.{name}.0"], other[f"adamw.{name}.0"]) for name in "mv")


def test_equal_params_round_independently() -> None:
    bits = bits_of_a_step()
    for name in ("{}", "adamw.m.{}", "adamw.v.{}"):
        assert not torch.equal(bits[name.format(0)], bits[name.format(1)]), name


def test_master_and_moments_round_independently() -> None:
    """Errors from a common stream would have a correlation of 1/2, independent ones of about 1 / sqrt(N)."""
    _, _, errors = rounded_and_exact(40, model="bf16", state="bf16")
    correlation = torch.corrcoef(torch.stack([error.flatten() for error in errors.values()])) - torch.eye(3)
    assert correlation.abs().max() < 5 / errors["0"].numel() ** 0.5


# ------------------------------------------------------------------------------------------------------------ the table


def test_the_table_of_the_kernel_has_the_addresses_of_each_tensor() -> None:
    """Gradient, master, moments, work copy and amax, then the size, the first chunk, the decay and the flags."""
    shapes = [(8,), (CHUNK_SIZE, 2), (3, 3)]
    ours = Updates(shapes, model="bf16", master="fp32", grad="fp32", state="bf16", weight_decay=0.5, measured=True)
    (op,) = ours.ops
    values = list(dict.fromkeys((*op.ins, *op.outs)))
    words, chunks = update_table(op, lambda value: 1000 + values.index(value), 0, CHUNK_SIZE)
    assert chunks == 4 and len(words) == 11 * len(shapes)
    for i, (p, first) in enumerate(zip(ours.params, (0, 1, 3), strict=True)):
        row = words[11 * i : 11 * (i + 1)]
        moments = [ours.declared[f"adamw.{name}.{i}"] for name in "mv"]
        addressed = [p.grad, p.master, *moments, p.param, p.amax]
        assert row[:6] == [1000 + values.index(value) for value in addressed if value is not None]
        assert row[6:8] == [p.param.size, first]
        assert struct.unpack("<d", struct.pack("<q", row[8])) == (0.5 if i else 0.0,)
        assert row[9] >> 32 == 0b11100  # moments and work copy are bf16
