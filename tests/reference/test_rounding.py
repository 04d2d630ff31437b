"""Philox and stochastic rounding, bit-exact against published test vectors and an independent implementation."""

from __future__ import annotations

import struct
from fractions import Fraction
from random import Random

import pytest
import torch
from torch import Tensor

from surogate_core.reference.rounding import philox4x32, random_16_bits, round_stochastic, store

ONES = 0xFFFFFFFF


def philox_in_python(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox4x32-10 with Python integers, as in the paper: ten rounds with a key update between them."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(c[0] * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c[2] * 0xCD9E8D57, 1 << 32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % (1 << 32), (k[1] + 0xBB67AE85) % (1 << 32)]
    return tuple(c)


def words(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    tensors = tuple(torch.tensor([word], dtype=torch.int64) for word in counter)
    return tuple(int(word) for word in philox4x32(tensors, key))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_matches_published_test_vectors(counter: tuple[int, ...], key: tuple[int, int], expected: str) -> None:
    assert " ".join(f"{word:08x}" for word in words(counter, key)) == expected
    assert " ".join(f"{word:08x}" for word in philox_in_python(counter, key)) == expected


def test_philox_on_tensors_agrees_with_python_integers() -> None:
    rng = Random(0)
    for _ in range(200):
        counter = tuple(rng.getrandbits(32) for _ in range(4))
        key = (rng.getrandbits(32), rng.getrandbits(32))
        assert words(counter, key) == philox_in_python(counter, key), (counter, key)


def test_random_bits_are_laid_out_as_documented() -> None:
    """Key (seed low, high), counter (block low, high, stream, step). Element e uses half e % 2 of word e // 2."""
    seed, stream, step = 0x0123456789ABCDEF, 0xDEADBEEF, 77
    bits = random_16_bits(21, seed=seed, stream=stream, step=step).tolist()
    for element, value in enumerate(bits):
        block, place = divmod(element, 8)
        word = philox_in_python((block, 0, stream, step), (0x89ABCDEF, 0x01234567))[place // 2]
        assert value == (word >> (16 * (place % 2))) & 0xFFFF, element


def test_random_bits_of_a_prefix_are_a_prefix() -> None:
    long = random_16_bits(1000, seed=1, stream=2, step=3)
    for count in (0, 1, 7, 8, 9, 999):
        assert torch.equal(random_16_bits(count, seed=1, stream=2, step=3), long[:count])


@pytest.mark.parametrize("change", [{"seed": 2}, {"seed": 1 + (1 << 32)}, {"seed": -1}, {"stream": 3}, {"step": 4}])
def test_random_bits_depend_on_seed_stream_and_step(change: dict[str, int]) -> None:
    """Two independent sequences of 4096 numbers agree in 4096 / 2^16 = 0.06 positions on average."""
    given = {"seed": 1, "stream": 2, "step": 3}
    same = random_16_bits(4096, **given) == random_16_bits(4096, **(given | change))
    assert int(same.sum()) <= 3


def test_random_bits_are_uniform() -> None:
    """2^16 draws in 256 bins give 256 +- 16 per bin. The bound is 6 sigma of chi squared, 255 degrees of freedom."""
    bits = random_16_bits(1 << 16, seed=9, stream=1, step=1)
    for part in (bits >> 8, bits & 0xFF):
        counts = torch.bincount(part, minlength=256).double()
        assert abs(float(((counts - 256) ** 2 / 256).sum()) - 255) < 6 * (2 * 255) ** 0.5


# ----------------------------------------------------------------------------------------------------------- rounding


def from_bits(patterns: list[int]) -> Tensor:
    return torch.tensor([struct.unpack("<f", struct.pack("<I", p))[0] for p in patterns], dtype=torch.float32)


def bf16_bits(x: Tensor) -> list[int]:
    return [int(v) & 0xFFFF for v in x.view(torch.int16)]


@pytest.mark.parametrize(
    ("random", "expected"),
    [
        (0x0000, [0x3F80, 0x3F80, 0xBF80, 0x4049, 0x0DA2, 0x477F]),
        (0x4000, [0x3F80, 0x3F80, 0xBF80, 0x4049, 0x0DA2, 0x4780]),
        (0x8000, [0x3F80, 0x3F80, 0xBF80, 0x4049, 0x0DA2, 0x4780]),
        (0xFFFF, [0x3F80, 0x3F81, 0xBF81, 0x404A, 0x0DA3, 0x4780]),
    ],
)
def test_stochastic_rounding_matches_known_results(random: int, expected: list[int]) -> None:
    x = from_bits([0x3F800000, 0x3F8020C5, 0xBF8020C5, 0x40490FD0, 0x0DA24260, 0x477FE000])
    assert bf16_bits(round_stochastic(x, torch.full((6,), random))) == expected


def test_stochastic_rounding_is_exactly_unbiased() -> None:
    """The mean of the results over all 2^16 random numbers is exactly x, also for subnormal and negative numbers."""
    every = torch.arange(1 << 16)
    for pattern in (0x3F8020C5, 0xBF8020C5, 0x40490FD0, 0x477FE000, 0x00012345, 0x80000001, 0x7F000001):
        x = from_bits([pattern])
        rounded = round_stochastic(x.expand(1 << 16), every).double()
        values, counts = rounded.unique(return_counts=True)
        mean = sum(Fraction(v) * n for v, n in zip(values.tolist(), counts.tolist(), strict=True)) / (1 << 16)
        assert mean == Fraction(x.double().item()), hex(pattern)
        assert len(values) <= 2


def test_numbers_representable_in_bf16_are_unchanged() -> None:
    x = torch.randn(1000).bfloat16().float()
    assert torch.equal(round_stochastic(x, torch.full((1000,), 0xFFFF)).float(), x)


def test_infinities_and_nan_are_preserved() -> None:
    """A carry must not turn NaN into infinity or infinity into NaN."""
    x = from_bits([0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF])
    for random in (0, 0xFFFF):
        rounded = round_stochastic(x, torch.full((5,), random))
        assert rounded[:2].tolist() == [float("inf"), float("-inf")]
        assert rounded[2:].isnan().all()


def test_rounding_accepts_any_shape_and_strides() -> None:
    x = torch.randn(6, 4).T
    bits = random_16_bits(24, seed=1, stream=1, step=1)
    assert torch.equal(round_stochastic(x, bits), round_stochastic(x.reshape(-1), bits).view(4, 6))


def test_store_rounds_stochastically_only_to_a_narrower_dtype() -> None:
    x = torch.randn(64)
    key = {"seed": 1, "stream": 2, "step": 3}
    assert torch.equal(store(x, torch.float32, **key), x)
    assert torch.equal(store(x, torch.bfloat16, **key), round_stochastic(x, random_16_bits(64, **key)))
    assert not torch.equal(store(x, torch.bfloat16, **key), x.bfloat16())
