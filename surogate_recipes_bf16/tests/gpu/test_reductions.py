"""Global norm and accumulation with stochastic rounding on the GPU, compared with their references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from sharding.parts import divided, joined
from torch import Tensor

from surogate_core.api import Op, Shard, Value, chunk_size, part_size
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


# ------------------------------------------------------------------------------------------------------ sums of chunks


def shares(sizes: Sequence[int], dtypes: Sequence[str] = ("fp32", "bf16")) -> tuple[Op, dict[Value, Tensor]]:
    """Return `square_sums` of random values of these sizes, and the values."""
    gen = generator(4)
    values = [vector(f"g{i}", size, dtypes[i % len(dtypes)]) for i, size in enumerate(sizes)]
    contents = {
        v: (torch.randn(v.size, generator=gen) * 10.0 ** (i % 5 - 2)).to(TORCH_DTYPES[v.dtype])
        for i, v in enumerate(values)
    }
    return sums_of(values, [chunk_size(size) for size in sizes]), contents


def sums_of(values: Sequence[Value], chunks: Sequence[int]) -> Op:
    count = sum(-(-v.size // chunk) for v, chunk in zip(values, chunks, strict=True))
    out = Value(name="sums", shape=(count,), dtype="fp64", role="act")
    return Op("square_sums", tuple(values), (out,), {"chunks": tuple(chunks)})


def norm_from(sums: Tensor, **attrs: Any) -> list[Tensor]:
    value = Value(name="sums", shape=tuple(sums.shape), dtype="fp64", role="act")
    op = Op("norm_of_sums", (value,), (NORM, CLIP_COEF), {"max_norm": 1.0, **attrs})
    return run_kernel(KERNELS, op, {value: sums})


DIVIDED = [600, 5000, 131_071, 131_072, 300_001, 3_000_000, 33_600_003]
"""Their chunks have from 256 to 65536 elements."""


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("sizes", cases({"small": [1, 7, 9, *DIVIDED[:5]]}, more={"large": DIVIDED}))
def test_sums_of_chunks_match_fp64(sizes: list[int], skew: int) -> None:
    """The error is that of a thread's sum of at most 32 squares in fp32."""
    op, contents = shares(sizes)
    (sums,) = run_kernel(KERNELS, op, contents, skew=skew)
    truth = [
        float(chunk.double().square().sum())
        for value, size in zip(op.ins, op.attrs["chunks"], strict=True)
        for chunk in contents[value].split(size)
    ]
    torch.testing.assert_close(sums, torch.tensor(truth, dtype=torch.float64), rtol=33 * 2.0**-24, atol=0)


@pytest.mark.parametrize("parts", [2, 3, 4, 5])
@pytest.mark.parametrize("sizes", cases({"small": DIVIDED[:5]}, more={"large": DIVIDED}))
def test_the_norm_of_parts_has_the_bits_of_the_norm_of_wholes(sizes: list[int], parts: int) -> None:
    """The last value is not divided: all ranks have its sums."""
    op, contents = shares([*sizes, 700])
    *wholes, shared = op.ins
    chunks, own = op.attrs["chunks"], Op("square_sums", tuple(wholes), (), {})
    counts = [-(-v.size // chunk) for v, chunk in zip(op.ins, chunks, strict=True)]
    (whole,) = run_kernel(KERNELS, op, contents)
    ranks = []
    for part, held in divided(own, {v: contents[v] for v in wholes}, parts):
        of_rank = sums_of([*part.ins, shared], chunks)
        ranks += run_kernel(KERNELS, of_rank, {**held, shared: contents[shared]})
    held = [*(part_size(v.size, parts) // chunk for v, chunk in zip(wholes, chunks, strict=False)), counts[-1]]
    ranges = [
        (rank * sum(held) + first, min(count, n - rank * count))
        for first, count, n in zip(accumulate(held, initial=0), held, counts, strict=False)
        for rank in range(-(-n // count))
    ]
    sums = torch.cat(ranks)
    assert same_bits(torch.cat([sums[first : first + count] for first, count in ranges]), whole)
    expected = norm_from(whole, ranges=((0, len(whole)),))
    assert all(map(same_bits, norm_from(sums, ranges=tuple(ranges)), expected))


@pytest.mark.parametrize("count", [1, 31, 1023, 1024, 1025, 4096, 100_003])
def test_the_norm_does_not_depend_on_how_many_ranks_have_the_sums(count: int) -> None:
    """Each rank has sums of other values too."""
    sums = torch.rand(count, generator=generator(5), dtype=torch.float64)
    expected = norm_from(sums, ranges=((0, count),))
    assert float(expected[0]) == pytest.approx(float(sums.sum().sqrt()), rel=2.0**-23)
    for parts in (2, 3, 5):
        of_ranks = [torch.nn.functional.pad(part, (0, 3), value=torch.nan) for part in sums.chunk(parts)]
        firsts = accumulate((len(part) for part in of_ranks), initial=0)
        ranges = tuple((first, len(part) - 3) for first, part in zip(firsts, of_ranks, strict=False))
        assert all(map(same_bits, norm_from(torch.cat(of_ranks), ranges=ranges), expected))


def test_the_global_norm_is_that_of_the_sums_of_chunks() -> None:
    op, contents = shares([*SIZES, *DIVIDED[:6]])
    grads = [contents[v] for v in op.ins]
    (sums,) = run_kernel(KERNELS, sums_of(op.ins, [CHUNK_SIZE] * len(op.ins)), contents)
    found = norm_from(sums, ranges=((0, len(sums)),))
    assert all(map(same_bits, found, norm_of(grads, 1.0)))


# ------------------------------------------------------------------------------------------------ accumulate_rounded


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_parts_of_a_rounded_sum_have_the_bits_of_the_whole(parts: int, dtype: str) -> None:
    for size in (300, 5000, 3_000_001):
        op, contents = rounded_sum(size, dtype)
        (whole,) = run_kernel(KERNELS, op, contents)
        ranks = [
            run_kernel(KERNELS, part, held, rank=rank) for rank, (part, held) in enumerate(divided(op, contents, parts))
        ]
        ((_, found),) = joined(op, ranks)
        assert same_bits(found, whole), size


def test_the_random_bits_of_a_part_that_begins_beyond_2_to_the_35_are_the_references() -> None:
    """There the second word of the Philox counter is not 0."""
    op, contents = rounded_sum(1 << 16, "fp32")
    rank = (1 << 20) + 3
    part = {v: replace(v, shard=Shard((rank + 1, v.size), rank + 1)) for v in op.outs}
    op, contents = op.on(part), {part.get(v, v): x for v, x in contents.items()}
    (ours,) = run_kernel(KERNELS, op, contents, rank=rank)
    theirs = reference.accumulate_rounded(*(contents[v] for v in op.ins), **op.attrs, firsts=(rank << 16,))
    assert same_bits(ours, theirs)


def rounded_sum(size: int, dtype: str, in_place: bool = True) -> tuple[Op, dict[Value, Tensor]]:
    gen = generator(size)
    addend, total = vector("addend", size, dtype), vector("total", size, "bf16")
    out = total if in_place else vector("sum", size, "bf16")
    contents = {
        addend: (torch.randn(size, generator=gen) * 0.01).to(TORCH_DTYPES[dtype]),
        total: torch.randn(size, generator=gen).bfloat16(),
        TICK: torch.tensor(41 + size, dtype=torch.int32),
        SEED: torch.tensor(-(1 << 40) + 12345 + size),
    }
    return Op("accumulate_rounded", (addend, total, TICK, SEED), (out,), {"stream": 0xDEADBEEF}), contents


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("size", "skew"),
    [*((size, 0) for size in SIZES), (1000, 1), (1001, 3), pytest.param(LARGE, 0, marks=pytest.mark.exhaustive)],
)
def test_rounded_sums_are_bit_identical_to_the_reference(size: int, skew: int, dtype: str, in_place: bool) -> None:
    op, contents = rounded_sum(size, dtype, in_place)
    (ours,) = run_kernel(KERNELS, op, contents, skew=skew)
    theirs = reference.accumulate_rounded(*(contents[v] for v in op.ins), **op.attrs)
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
        _C.accumulate_rounded(p, 0, p, p, p, 1, 0, 8, 0, stream)
    with pytest.raises(ValueError, match="accumulate_rounded: addend must be fp32 or bf16, got int32"):
        _C.accumulate_rounded(p, p, p, p, p, 1, 0, 8, 3, stream)
    with pytest.raises(ValueError, match="accumulate_rounded: size must be positive, got 0"):
        _C.accumulate_rounded(p, p, p, p, p, 1, 0, 0, 0, stream)
    for first in (12, -8):
        with pytest.raises(ValueError, match=f"first must be a multiple of 8 and not negative, got {first}"):
            _C.accumulate_rounded(p, p, p, p, p, 1, first, 8, 0, stream)
    with pytest.raises(ValueError, match="square_sums: sums must be aligned to 8 bytes"):
        _C.square_sums(p, p + 4, 1, 1, stream)
    with pytest.raises(ValueError, match="norm_of_sums: order must be aligned to 8 bytes"):
        _C.norm_of_sums(p, p + 4, p, p, 1, 1.0, stream)
    with pytest.raises(ValueError, match="norm_of_sums: max_norm must not be negative, got -1"):
        _C.norm_of_sums(p, 0, p, p, 1, -1.0, stream)
