"""AdamW with 8-bit moments: the specification's vectors, the distance to AdamW in fp64, hazards, skipped steps."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surogate_core.api import (
    Builder,
    ConfigError,
    Init,
    Matrix,
    ParamKind,
    Precision,
    Scalars,
    TrainedParam,
    UpdateContext,
    Value,
)
from surogate_core.api.param_update import update_table
from surogate_core.reference.rounding import TORCH_DTYPES, round_stochastic
from surogate_core.testing.programs import STANDARD_OPS, Buffers, ReferenceExecutor, initialize, plan_programs, verify
from surogate_optim_adamw_8bit.codes import BLOCK, ZERO, code_map
from surogate_optim_adamw_8bit.kernels import CHUNK_SIZE, scales_of
from surogate_optim_adamw_8bit.optimizer import ADAMW_8BIT, ADAMW_8BIT_OP, AdamW8bitOptions, is_quantized
from surogate_optim_adamw_8bit.reference import adamw_8bit, encoded

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
OPS = {definition.kind: definition for definition in (*STANDARD_OPS, ADAMW_8BIT_OP)}
SIGNED, UNSIGNED = (torch.tensor(code_map(signed)) for signed in (True, False))

Shapes = Mapping[str, tuple[tuple[int, ...], ParamKind]]
SHAPES: Shapes = {
    "matrix": ((96, 64), "matrix"),
    "odd": ((67, 65), "matrix"),  # the last block has 3 elements
    "small": ((63, 65), "matrix"),
    "embedding": ((128, 64), "embedding"),
    "head": ((128, 64), "head"),
    "norm": ((5000,), "vector"),
}
QUANTIZED = ("matrix", "odd")


class Updates:
    """The optimizer over params in planned buffers."""

    def __init__(
        self,
        shapes: Shapes = SHAPES,
        *,
        model: str = "fp32",
        master: str | None = None,
        grad: str = "fp32",
        weight_decay: float = 0.0,
        measured: bool = False,
        stored: bool = True,
        state: str = "fp32",
        **options: float,
    ) -> None:
        b = Builder(OPS, model)
        self.scalars = Scalars(
            b.input("lr", (), "fp32"),
            b.input("step", (), "int32"),
            b.input("micro_step", (), "int32"),
            b.input("seed", (), "int64"),
        )
        self.clip_coef = b.input("clip_coef", (), "fp32")
        self.params: dict[str, TrainedParam] = {}
        for name, (shape, kind) in shapes.items():
            param = b.param(name, shape, Init(kind="ones"))
            own = param if model == (master or model) else b.state(f"master.{name}", shape, master or model, None)
            self.params[name] = TrainedParam(
                param=param,
                grad=b.grad(param, grad),
                master=own,
                of_model=stored,
                kind=kind,
                matrices=(Matrix(name, shape[0]),) if len(shape) == 2 else (),
                amax=b.activation("amax", (), "fp32") if measured else None,
            )
        dtypes = {"model": model, "matmul": model, "gradient": model, "master": master or model, "adapter": model}
        context = UpdateContext(
            builder=b,
            params=tuple(self.params.values()),
            clip_coef=self.clip_coef,
            scalars=self.scalars,
            precision=Precision(**dtypes, param_grad=grad, optimizer_state=state),
            weight_decay=weight_decay,
            options=AdamW8bitOptions(**options),
        )
        with b.record("update"):
            ADAMW_8BIT.update(context)
            program = b.program("update", tuple(p.amax for p in self.params.values() if p.amax is not None))
        verify(program, OPS)
        self.ops = program.ops
        self.declared = {v.name: v for v in b.declared}
        self.buffers = Buffers(plan_programs([program], b.declared, lambda op: 0), poison=True)
        self.executor = ReferenceExecutor({"update": program}, OPS, self.buffers, poison=True)
        initialize((v for v in b.declared if v.init), self.buffers.persistent, seed=0)

    def __getitem__(self, value: Value | str) -> Tensor:
        return self.buffers.persistent(self.declared[value] if isinstance(value, str) else value)

    def draw(self, generator: torch.Generator) -> None:
        """Set the masters to random values of magnitude one, and the work copies to the rounded masters."""
        for p in self.params.values():
            self[p.master].copy_(torch.randn(p.param.shape, generator=generator))
            self[p.param].copy_(self[p.master])

    def step(self, grads: Sequence[Tensor], *, step: int, lr: float = 1e-3, coef: float = 1.0, seed: int = 0) -> None:
        for p, grad in zip(self.params.values(), grads, strict=True):
            self[p.grad].copy_(grad)
        scalars = self.scalars
        for value, content in ((scalars.lr, lr), (scalars.step, step), (scalars.seed, seed), (self.clip_coef, coef)):
            self[value].fill_(content)
        self.executor.run("update")

    def moment(self, name: str, param: str) -> Tensor:
        """Return a moment in fp32."""
        stored = self[f"adamw_8bit.{name}.{param}"]
        if stored.dtype != torch.uint8:
            return stored.clone()
        scales = self[f"adamw_8bit.{name}_scale.{param}"].repeat_interleave(BLOCK)[: stored.numel()]
        return (SIGNED if name == "m" else UNSIGNED)[stored.long()] * scales.view(stored.shape)

    def everything(self) -> dict[str, Tensor]:
        kept = {name: v for name, v in self.declared.items() if v.role in ("param", "state")}
        return {name: self[v].clone().reshape(-1).view(torch.uint8) for name, v in kept.items()}

    def random(self, seed: int, scale: float = 1.0) -> list[Tensor]:
        gen = torch.Generator().manual_seed(seed)
        return [scale * torch.randn(p.param.shape, generator=gen) for p in self.params.values()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(words: Sequence[str]) -> Tensor:
    return torch.tensor([struct.unpack(">f", bytes.fromhex(word))[0] for word in words])


def lcg(n: int, seed: int) -> Tensor:
    """The numbers of the vectors: from a 32-bit LCG, exact in bf16, with a heavy tail."""
    state, numbers = seed, []
    for _ in range(n):
        state = (1664525 * state + 1013904223) & 0xFFFFFFFF
        u = ((state >> 8) / 2**24) * 2 - 1
        numbers.append(u * u * u * 4)
    return torch.tensor(numbers).bfloat16().float()


# ------------------------------------------------------------------------------------------------------------- vectors


def test_the_first_step_is_that_of_the_specification() -> None:
    """Scales to the bit, params within one unit in the last place, codes within one."""
    vector = VECTORS["adamw8_step1"]
    n = vector["n"]
    blocks = -(-n // BLOCK)
    codes = [torch.full((n,), zero, dtype=torch.uint8) for zero in (ZERO, 0)]
    scalars = [torch.tensor(1.0), torch.tensor(1e-3), torch.tensor(1), torch.tensor(0)]
    p, m, v, m_scale, v_scale = adamw_8bit(
        *scalars,
        *(lcg(n, vector["g_seed"]), lcg(n, vector["p_seed"]), *codes, torch.zeros(blocks), torch.zeros(blocks)),
        n=1,
        quantized=(0,),
        copied=(),
        copy_dtypes=(),
        measured=(),
        weight_decay=(0.1,),
        streams=(0,),
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
    )
    expected = floats(vector["p_first4"])
    assert ((p[:4].view(torch.int32) - expected.view(torch.int32)).abs() <= 1).all()
    for found, name in ((m, "m8_first16"), (v, "v8_first16")):
        theirs = torch.tensor(list(bytes.fromhex(vector[name])))
        assert (found[:16].int() - theirs).abs().max() <= 1
    assert torch.equal(m_scale, floats(vector["absmax_m"])) and torch.equal(v_scale, floats(vector["absmax_v"]))


def test_stochastic_rounding_of_masters_is_that_of_the_specification() -> None:
    vector = VECTORS["bf16_sr"]
    x = floats(vector["x"])
    for random, bits in vector["bits"].items():
        ours = round_stochastic(x, torch.full(x.shape, int(random))).view(torch.int16).int() & 0xFFFF
        assert [f"{word:04x}" for word in ours.tolist()] == bits


# ---------------------------------------------------------------------------------------------------------- the states


def test_the_models_matrices_have_8_bit_moments_and_all_else_has_fp32() -> None:
    ours = Updates()
    assert {name for name, v in ours.declared.items() if v.dtype == "uint8"} == {
        f"adamw_8bit.{moment}.{name}" for moment in "mv" for name in QUANTIZED
    }
    assert ours.declared["adamw_8bit.m_scale.odd"].shape == (-(-67 * 65 // BLOCK),)
    states = sum(v.nbytes for v in ours.declared.values() if v.role == "state" and v.name.endswith("matrix"))
    assert states == 96 * 64 * (2 + 8 / BLOCK)
    assert not any(v.dtype == "uint8" for v in Updates(stored=False).declared.values())


@pytest.mark.parametrize(("rows", "stored", "expected"), [(4, True, True), (1023, False, False), (1024, False, True)])
def test_only_large_matrices_of_adapters_have_8_bit_moments(rows: int, stored: bool, expected: bool) -> None:
    """Those of all experts of a layer: A of one projection has less than a million elements."""
    param = Value("a", (rows, 1024), "fp32", "param")
    p = TrainedParam(param=param, grad=param, master=param, of_model=stored, kind="matrix", matrices=())
    assert is_quantized(p) == expected


def test_the_initial_moments_are_zero() -> None:
    ours = Updates()
    assert not any(ours.moment(moment, name).any() for moment in "mv" for name in SHAPES)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("signed", [True, False])
def test_the_error_of_a_code_is_half_the_distance_to_its_neighbours(signed: bool, size: int) -> None:
    x = torch.randn(size, generator=generator()) * torch.logspace(-6, 3, size)
    x = x if signed else x.square()
    codes, scales = encoded(x, signed=signed)
    numbers = (SIGNED if signed else UNSIGNED).double()
    per_element = scales.double().repeat_interleave(BLOCK)[:size]
    ratio = x.double() / per_element
    distances = (ratio[:, None] - numbers).abs()
    zero = (ZERO if signed else 0) == codes.long()
    assert not (zero & (x != 0)).any() and torch.equal(numbers[codes.long()].sign(), x.double().sign())
    nearest = distances.min(1)[0]
    ours = distances.gather(1, codes.long()[:, None])[:, 0]
    assert (ours <= torch.maximum(nearest + 2.0**-24, torch.tensor(5.5e-7))).all()
    assert torch.equal(scales, torch.stack([block.abs().max() for block in x.split(BLOCK)]))


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan])
def test_codes_of_a_block_that_is_not_finite_are_defined(special: float) -> None:
    x = torch.tensor([special, 1.0, -1.0, 0.0])
    codes, scales = encoded(x, signed=True)
    assert codes.tolist() == [ZERO + {torch.inf: 1, -torch.inf: -1}.get(special, 0), ZERO + 1, ZERO - 1, ZERO]
    assert not scales.isfinite().any()
    assert encoded(torch.tensor([abs(special), 1.0, 0.0]), signed=False)[0][1:].tolist() == [1, 0]


# --------------------------------------------------------------------------------------------------------- the formula


def test_wide_moments_give_the_steps_of_torch() -> None:
    """Betas that are exact in fp32, and the bound of the tests of `adamw`: about 13 roundings a step."""
    shapes: Shapes = {name: SHAPES[name] for name in ("small", "embedding", "head", "norm")}
    ours = Updates(shapes, weight_decay=0.1, adamw_beta1=0.875, adamw_beta2=0.96875, adamw_epsilon=1e-6)
    ours.draw(generator())
    theirs = [torch.nn.Parameter(ours[name].double()) for name in shapes]
    groups = [{"params": [p], "weight_decay": 0.1 if p.ndim >= 2 else 0.0} for p in theirs]
    optimizer = torch.optim.AdamW(groups, betas=(0.875, 0.96875), eps=1e-6)
    bound = 0.0
    for step in range(1, 21):
        lr, coef = 2.0**-8 * step / 32, 1.0 if step % 3 else 0.25
        grads = ours.random(step)
        ours.step(grads, step=step, lr=lr, coef=coef)
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = coef * grad.double()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        bound += 2.0**-24 * (3 * 5 + 12 * 4 * lr)
        for name, parameter in zip(shapes, theirs, strict=True):
            assert (ours[name] - parameter).abs().max() <= bound, name


def test_8_bit_moments_stay_within_the_bound_of_the_maps_of_adamw_in_fp64() -> None:
    """Gradients have magnitudes from 1 to 2, so that no second moment is far below the largest of its block.

    A code is off by at most half the widest gap of its map, (0.9 / 64) / 2 and (0.9 / 128) / 2 of the scale. Such an
    error decays with its beta, and others follow. An error e_m of m and e_v of v changes the update by at most
    lr (e_m / sqrt(v) + m e_v / (2 v^1.5)), with v and m after bias correction and v below by e_v.
    """
    beta1, beta2, lr = 0.875, 0.96875, 2.0**-8
    ours = Updates({"w": ((64, 128), "matrix")}, adamw_beta1=beta1, adamw_beta2=beta2)
    ours.draw(generator())
    p = ours["w"].double()
    m = v = torch.zeros_like(p)
    e_m = e_v = bound = 0.0
    worst = 0.0
    for step in range(1, 21):
        drawn = torch.rand(p.shape, generator=generator(step)) + 1
        grad = drawn * torch.randint(0, 2, p.shape, generator=generator(100 + step)).mul(2).sub(1)
        ours.step([grad], step=step, lr=lr)
        g = grad.double()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        c1, c2 = 1 - beta1**step, 1 - beta2**step
        p = p - lr * (m / c1) / ((v / c2).sqrt() + 1e-8)
        e_m, e_v = beta1 * e_m, beta2 * e_v  # the update uses the moments before they are quantized
        low = (float(v.min()) - e_v) / c2
        bound += lr * (e_m / c1 / low**0.5 + (float(m.abs().max()) / c1) * (e_v / c2) / (2 * low**1.5)) + 2.0**-22
        error = float((ours["w"] - p).abs().max())
        assert error <= bound, step
        worst = max(worst, error)
        e_m += (0.9 / 64 / 2) * (float(m.abs().max()) + e_m) * (1 + 1e-6)
        e_v += (0.9 / 128 / 2) * (float(v.max()) + e_v) * (1 + 1e-6)
    assert worst > 2.0**-18, "nothing was quantized"


def test_a_second_moment_that_is_not_zero_never_becomes_zero() -> None:
    """Row 0 has gradients 10^5 times as small as row 1 of the same blocks, and then none.

    Its second moment is 10^-10 of the scale. Stored as 0, it would make the next update m / eps.
    """
    ours = Updates({"w": ((64, 64), "matrix")}, adamw_epsilon=1e-12)
    grad = torch.ones(64, 64)
    grad[::2] = 1e-5
    ours.step([grad], step=1, lr=1e-3)
    assert (ours.moment("v", "w") > 0).all()
    before = ours["w"].clone()
    for step in range(2, 6):
        ours.step([torch.zeros(64, 64)], step=step, lr=1e-3)
    assert (ours["w"] - before).abs().max() <= 4 * 1e-3


def test_only_vectors_have_no_decay() -> None:
    ours = Updates(weight_decay=0.5)
    ours.draw(generator())
    before = {name: ours[name].clone() for name in SHAPES}
    ours.step([torch.zeros(p.param.shape) for p in ours.params.values()], step=1, lr=0.25)
    for name, old in before.items():
        assert torch.equal(ours[name], old if name == "norm" else old * (1 - 0.25 * 0.5)), name


def test_the_clip_coefficient_scales_the_gradient() -> None:
    clipped, scaled = Updates(), Updates()
    for step in range(1, 4):
        clipped.step(clipped.random(step), step=step, coef=0.125)
        scaled.step(scaled.random(step, 0.125), step=step)
    kept = scaled.everything()
    assert all(torch.equal(bits, kept[name]) for name, bits in clipped.everything().items())


# ------------------------------------------------------------------------------------------------- masters and amaxes

DTYPES = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")]


@pytest.mark.parametrize("coef", [1.0, float("nan")])
@pytest.mark.parametrize(("model", "master"), DTYPES)
def test_work_copy_and_amax_are_those_of_the_stored_master(model: str, master: str, coef: float) -> None:
    ours = Updates(model=model, master=master, measured=True)
    ours.draw(generator())
    for step in (1, 2):
        ours.step(ours.random(step), step=step, lr=0.5, coef=coef if step == 2 else 1.0)
    for p in ours.params.values():
        assert torch.equal(ours[p.param], ours[p.master].to(TORCH_DTYPES[model]))
        assert p.amax is not None and ours.buffers.view(p.amax, "update") == ours[p.param].abs().max()


def test_bf16_masters_are_rounded_up_and_down_without_bias() -> None:
    """An error is less than one unit. The mean of 100 seeds is within 6 standard deviations of at most 1/2 unit."""
    shapes: Shapes = {"w": ((64, 64), "matrix")}
    ours, exact = Updates(shapes, model="bf16"), Updates(shapes)
    start, (grad,) = torch.randn(64, 64, generator=generator()).bfloat16(), exact.random(1)
    exact["w"].copy_(start)
    exact.step([grad], step=1, lr=0.03)
    fresh, errors = ours.everything(), []
    for seed in range(100):
        for name, bits in fresh.items():
            ours[name].reshape(-1).view(torch.uint8).copy_(bits)
        ours["w"].copy_(start)
        ours.step([grad], step=1, lr=0.03, seed=seed)
        unit = torch.ldexp(torch.ones(64, 64), torch.frexp(exact["w"])[1] - 8)
        errors.append((ours["w"].float() - exact["w"]) / unit)
        assert torch.equal(ours["adamw_8bit.m.w"], exact["adamw_8bit.m.w"])
    error = torch.stack(errors)
    assert error.abs().max() < 1 and error.std() > 0.3
    assert error.mean(0).abs().max() < 6 * 0.5 / 100**0.5


# ------------------------------------------------------------------------------------------------------- options, table


def test_options_outside_their_range_are_rejected() -> None:
    for wrong in ({"adamw_beta1": 1.0}, {"adamw_beta2": -0.1}, {"adamw_epsilon": 0.0}, {"beta1": 0.9}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AdamW8bitOptions(**wrong)


@pytest.mark.parametrize("beta", ["adamw_beta1", "adamw_beta2"])
def test_a_beta_that_is_1_in_fp32_is_refused(beta: str) -> None:
    Updates(**{beta: 0.9999999})
    with pytest.raises(ConfigError, match=rf"^{beta}: 0.99999999 is 1 in fp32, .* use 0.9999999 or less, or optimizer"):
        Updates(**{beta: 0.99999999})


def test_a_dtype_of_the_moments_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"^optimizer_state_dtype: bf16 has no meaning .*Remove the key, or use"):
        Updates(state="bf16")


def test_the_table_of_the_kernel_has_the_addresses_of_each_tensor() -> None:
    shapes: Shapes = {"a": ((8,), "vector"), "b": ((CHUNK_SIZE, 2), "matrix"), "c": ((64, 64), "matrix")}
    ours = Updates(shapes, model="bf16", master="fp32", grad="bf16", weight_decay=0.5, measured=True)
    (op,) = ours.ops
    values = list(dict.fromkeys((*op.ins, *op.outs)))
    words, chunks = update_table(op, lambda value: 1000 + values.index(value), 0, CHUNK_SIZE, *scales_of(op))
    assert chunks == 4 and len(words) == 13 * len(shapes)
    for i, ((name, p), first) in enumerate(zip(ours.params.items(), (0, 1, 3), strict=True)):
        row = words[13 * i : 13 * (i + 1)]
        m, v, *scales = [ours.declared.get(f"adamw_8bit.{state}.{name}") for state in ("m", "v", "m_scale", "v_scale")]
        addressed = [p.grad, p.master, m, v, p.param, p.amax, *scales]
        addresses = [0 if value is None else 1000 + values.index(value) for value in addressed]
        assert row[:6] == addresses[:6] and row[11:] == addresses[6:]
        assert (row[11] == 0) == (name == "a")
        assert row[6:8] == [p.param.size, first]
        assert struct.unpack("<d", struct.pack("<q", row[8])) == (0.5 if i else 0.0,)
        assert row[9] >> 32 == 0b10001  # gradient and work copy are bf16


# ------------------------------------------------------------------------------------------------------------- a model
