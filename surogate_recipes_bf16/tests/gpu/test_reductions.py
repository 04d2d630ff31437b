"""Global norm and accumulation with stochastic rounding on the GPU, compared with their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference import ops as reference
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import same_bits
from surogate_recipes_bf16.kernels.reductions import CHUNK_SIZE, KERNELS

pytestmark = pytest.mark.gpu

NORM = Value(name="norm", shape=(), dtype="fp32", role="act")
CLIP_COEF = Value(name="clip_coef", shape=(), dtype="fp32", role="act")
TICK = Value(name="micro_step", shape=(), dtype="int32", role="input")
SEED = Value(name="seed", shape=(), dtype="int64", role="input")

SIZES = [1, 7, 8, 9, 2047, 2048, 2049, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5]
LARGE = 151_936 * 64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(name: str, size: int, dtype: str) -> Value:
    return Value(name=name, shape=(size,), dtype=dtype, role="grad")


# ------------------------------------------------------------------------------------------------------- global norm


def norm_of(grads: list[Tensor], max_norm: float, skew: int = 0) -> tuple[Tensor, Tensor]:
    names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
    values = [vector(f"g{i}", g.numel(), names[g.dtype]) for i, g in enumerate(grads)]
    op = Op("global_norm", tuple(values), (NORM, CLIP_COEF), {"max_norm": max_norm})
    norm, coef = run_kernel(KERNELS, op, dict(zip(values, grads, strict=True)), skew=skew)
    return norm, coef


def check_norm(grads: list[Tensor], max_norm: float, skew: int = 0) -> None:
    """A thread adds CHUNK_SIZE / 2048 = 32 squares in fp32; all other sums are fp64. So the error of the sum is at most
    32 half units, and that of the root half as large. The coefficient is the same function of the norm as in the
    reference, bit for bit."""
    norm, coef = norm_of(grads, max_norm, skew)
    truth = sum(float(g.double().square().sum()) for g in grads) ** 0.5
    assert float(norm) == pytest.approx(truth, rel=17 * 2.0**-24)
    assert same_bits(coef, torch.ones(()) if max_norm == 0 else (max_norm / (norm + 1e-6)).clamp(max=1.0))


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("dtypes", [("fp32",), ("bf16",), ("fp32", "bf16")])
@pytest.mark.parametrize("sizes", cases({"small": SIZES}, more={"large": [*SIZES, LARGE]}))
def test_norm_of_tensors_of_any_size_matches_fp64(sizes: list[int], dtypes: tuple[str, ...], skew: int) -> None:
    gen = generator()
    grads = [
        (torch.randn(size, generator=gen) * 10.0 ** (i % 5 - 2)).to(TORCH_DTYPES[dtypes[i % len(dtypes)]])
        for i, size in enumerate(sizes)
    ]
    check_norm(grads, 1.0, skew)
    for grad in grads:
        check_norm([grad], 1.0, skew)


def test_norm_of_more_tensors_than_threads_per_block_matches_fp64() -> None:
    gen = generator(1)
    check_norm([torch.randn(1 + 37 * i, generator=gen) for i in range(700)], 0.5)


@pytest.mark.parametrize("max_norm", [0.0, 1e-3, 1.0, 3.7, 1e9])
@pytest.mark.parametrize("scale", [0.0, 1e-8, 1.0, 1e6])
def test_the_clip_coefficient_matches_the_reference(max_norm: float, scale: float) -> None:
    check_norm([torch.randn(5000, generator=generator(2)) * scale], max_norm)


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_element_that_is_not_finite_makes_the_coefficient_nan(dtype: str, wrong: float, max_norm: float) -> None:
    grads = [torch.randn(size, generator=generator(3)).to(TORCH_DTYPES[dtype]) for size in (100, 3 * CHUNK_SIZE + 5, 9)]
    grads[1][-1] = wrong
    norm, coef = norm_of(grads, max_norm)
    assert not norm.isfinite()
    assert coef.isnan()


# ------------------------------------------------------------------------------------------------ accumulate_rounded


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("size", "skew"),
    [*((size, 0) for size in SIZES), (1000, 1), (1001, 3), pytest.param(LARGE, 0, marks=pytest.mark.exhaustive)],
)
def test_rounded_sums_are_bit_identical_to_the_reference(size: int, skew: int, dtype: str, in_place: bool) -> None:
    gen = generator(size)
    addend, total = vector("addend", size, dtype), vector("total", size, "bf16")
    out = total if in_place else vector("sum", size, "bf16")
    contents = {
        addend: (torch.randn(size, generator=gen) * 0.01).to(TORCH_DTYPES[dtype]),
        total: torch.randn(size, generator=gen).bfloat16(),
        TICK: torch.tensor(41 + size, dtype=torch.int32),
        SEED: torch.tensor(-(1 << 40) + 12345 + size),
    }
    attrs = {"stream": 0xDEADBEEF}
    op = Op("accumulate_rounded", (addend, total, TICK, SEED), (out,), attrs)
    (ours,) = run_kernel(KERNELS, op, contents, skew=skew)
    theirs = reference.accumulate_rounded(*(contents[v] for v in op.ins), **attrs)
    assert same_bits(ours, theirs)


def test_infinities_and_nan_are_preserved() -> None:
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 3.39e38, -3.39e38, 0.0, -0.0, 1e-40, 1.0])
    addend, total = vector("addend", 9, "fp32"), vector("total", 9, "bf16")
    contents = {
        addend: special,
        total: torch.zeros(9).bfloat16(),
        TICK: torch.tensor(1, dtype=torch.int32),
        SEED: torch.tensor(7),
    }
    op = Op("accumulate_rounded", (addend, total, TICK, SEED), (total,), {"stream": 5})
    (ours,) = run_kernel(KERNELS, op, contents)
    theirs = reference.accumulate_rounded(*(contents[v] for v in op.ins), stream=5)
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert same_bits(ours[1:], theirs[1:])  # the payload of a NaN is unspecified


# ------------------------------------------------------------------------------------------------------ wrong arguments


def test_errors_name_the_invalid_argument() -> None:
    from surogate_recipes_bf16 import _C

    x = torch.zeros(64, device="cuda", dtype=torch.int64)
    p, stream = x.data_ptr(), torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match="accumulate_rounded: total is a null pointer"):
        _C.accumulate_rounded(p, 0, p, p, p, 1, 8, 0, stream)
    with pytest.raises(ValueError, match="accumulate_rounded: addend must be fp32 or bf16, got int32"):
        _C.accumulate_rounded(p, p, p, p, p, 1, 8, 3, stream)
    with pytest.raises(ValueError, match="accumulate_rounded: size must be positive, got 0"):
        _C.accumulate_rounded(p, p, p, p, p, 1, 0, 0, stream)
    with pytest.raises(ValueError, match="global_norm: chunk_size must be a multiple of 8, got 12"):
        _C.global_norm(p, p, p, p, 1, 1, 12, 1.0, stream)
    with pytest.raises(ValueError, match="global_norm: partials must be aligned to 8 bytes"):
        _C.global_norm(p, p, p, p + 4, 1, 1, 8, 1.0, stream)
