"""The references of the NVFP4 ops against a slow twin, which is written block by block.

It searches in tables of all codes, and rounds after each operation, because NumPy's numbers of 32 bits do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from surogate_core.reference.e2m1 import LEVELS
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import check_op
from surogate_recipes_nvfp4.formats import scales_shape
from surogate_recipes_nvfp4.ops import OPS
from surogate_recipes_nvfp4.reference import SIGNS

SEED, MICRO_STEP = (42 << 33) - 7, 5
Form = tuple[Tensor, ...]
f32 = np.float32


def quantize(x: Tensor, *random: Tensor, **attrs: Any) -> Form:
    return check_op(OPS[0], x, *random, **{"rows": True, **attrs})


def unpacked(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), dim=-1).view(len(packed), -1)


def scale_offset(row: int, block: int, columns: int) -> int:
    """Return the byte of the scale of a row's block."""
    atom = row // 128 * (scales_shape(1, columns)[1] // 4) + block // 4
    return atom * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


E4M3 = [(m if e == 0 else 8 + m) * 2.0 ** (max(e, 1) - 10) for e in range(16) for m in range(8) if (e, m) != (15, 7)]


def nearest(x: float, table: list[float] | tuple[float, ...]) -> int:
    """Return the code of the nearest number, the even code of two."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - x), code % 2))


def philox(counter: list[int], key: list[int]) -> bytes:
    for _ in range(10):
        p, q = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [q >> 32 ^ counter[1] ^ key[0], q & 0xFFFFFFFF, p >> 32 ^ counter[3] ^ key[1], p & 0xFFFFFFFF]
        key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
    return b"".join(word.to_bytes(4, "little") for word in counter)


def twin_code(x: np.float32, factor: np.float32, byte: int | None) -> int:
    magnitude = min(abs(x * factor), f32(6))
    if byte is not None:
        step = f32(0.5) if magnitude < 2 else f32(1) if magnitude < 4 else f32(2)
        raised = f32(f32(byte / 256) * step + magnitude)
        code = max(code for code, level in enumerate(LEVELS) if level <= raised)
    else:
        code = nearest(float(magnitude), LEVELS)
    return code | 8 * bool(np.signbit(x))


class Twin:
    """The form of a matrix, slowly: `codes`, `scales` (E4M3 codes), `amax`."""

    def __init__(
        self, x: np.ndarray, stream: int | None = None, square: bool = False, four_over_six: bool = False
    ) -> None:
        self.x, self.stream, self.high, self.four_over_six = x, stream, 16 if square else 1, four_over_six
        self.amax, self.limit = f32(np.abs(x).max()), f32(256 if four_over_six else 448)
        largest = np.finfo(f32).max
        self.encode = min(self.limit * f32(6) / self.amax, largest) if self.amax > 0 else f32(1)
        self.decode = f32(1) / self.encode
        rows, columns = x.shape
        self.codes = np.zeros((rows, columns), np.uint8)
        self.scales = np.zeros((rows, columns // 16), np.uint8)
        for row in range(0, rows, self.high):
            for block in range(columns // 16):
                self._write(row, block)

    def _write(self, row: int, block: int) -> None:
        part = self.x[row : row + self.high, 16 * block : 16 * block + 16]
        top = np.abs(part).max()
        if self.four_over_six:
            base = top / f32(6) * self.encode
            six, four = (nearest(float(min(base * f32(k), f32(448))), E4M3) for k in (1, 1.5))
            scale = four if self._error(part, four) < self._error(part, six) else six
        else:
            scale = nearest(float(top * (self.encode * (f32(1) / f32(6)))), E4M3)
        for i, numbers in enumerate(part):
            random = self._random((row + i) * self.x.shape[1] // 16 + block)
            self.scales[row + i, block] = scale
            for e, x in enumerate(numbers):
                self.codes[row + i, 16 * block + e] = twin_code(x, self._factor(scale), random[e])

    def _random(self, index: int) -> list[int] | list[None]:
        if self.stream is None:
            return [None] * 16
        counter = [index & 0xFFFFFFFF, index >> 32, self.stream, MICRO_STEP]
        return list(philox(counter, [SEED & 0xFFFFFFFF, SEED >> 32]))

    def _factor(self, scale: int) -> np.float32:
        return min(f32(1) / (f32(E4M3[scale]) * self.decode), np.finfo(f32).max)

    def _error(self, part: np.ndarray, scale: int) -> np.float32:
        rows = []
        for numbers in part:
            error = f32(0)
            for x in numbers:
                level = f32(LEVELS[twin_code(x, self._factor(scale), None) & 7]) * f32(-1 if np.signbit(x) else 1)
                d = level * f32(E4M3[scale]) * self.amax / (f32(6) * self.limit) - x
                error = error + d * d
            rows.append(error)
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [a + b for a, b in zip(rows[:half], rows[half:], strict=True)]
        return rows[0]

    def check(self, form: Form) -> None:
        packed, scales, amax = form
        assert np.array_equal(unpacked(packed).numpy(), self.codes)
        expected = np.zeros(scales.numel(), np.uint8)
        for row, codes in enumerate(self.scales):
            for block, code in enumerate(codes):
                expected[scale_offset(row, block, self.x.shape[1])] = code
        assert np.array_equal(scales.view(torch.uint8).numpy().ravel(), expected)
        assert amax.tolist() == [float(self.amax), float(self.limit)]


def twin_hadamard(x: np.ndarray) -> np.ndarray:
    """Return RHT(x^T), by additions in the order of strides 1, 2, 4 and 8."""
    y = np.ascontiguousarray(x.T).reshape(-1, 16) * np.array(SIGNS, f32)
    for stride in (1, 2, 4, 8):
        y = np.stack([y[:, i ^ stride] - y[:, i] if i & stride else y[:, i] + y[:, i ^ stride] for i in range(16)], 1)
    return torch.from_numpy(y * f32(0.25)).bfloat16().float().numpy().reshape(x.shape[::-1])


def numbers(kind: str, rows: int, columns: int) -> Tensor:
    """Both zeros are among them."""
    gen = torch.Generator().manual_seed(rows + columns)
    x = torch.randn(rows, columns, generator=gen)
    x = {
        "normal": lambda: x,
        "heavy tails": lambda: x / torch.rand(rows, columns, generator=gen).clamp(min=1e-3) ** 2,
        "rows": lambda: x * torch.logspace(-6, 2, rows)[:, None],
        "subnormal": lambda: x * 2.0**-128,
        "huge": lambda: x * 2.0**122,
    }[kind]()
    x[0, :2], x[16:32, :16] = torch.tensor([0.0, -0.0]), 0.0
    return x.bfloat16()


KINDS = ("normal", "heavy tails", "rows", "subnormal", "huge")
ATTRS: dict[str, dict[str, Any]] = {
    "plain": {},
    "4/6": {"four_over_six": True},
    "square": {"square": True},
    "square 4/6": {"square": True, "four_over_six": True},
    "hadamard": {"hadamard": True},
    "hadamard 4/6": {"hadamard": True, "four_over_six": True},
    "stochastic": {"stochastic": True},
    "hadamard stochastic 4/6": {"hadamard": True, "stochastic": True, "four_over_six": True},
}


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("attrs", ATTRS.values(), ids=ATTRS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_are_those_of_the_twin(kind: str, attrs: dict[str, Any]) -> None:
    """48 x 80: neither the rows nor the scales of a row are whole atoms."""
    x = numbers(kind, 48, 80)
    random = (torch.tensor(MICRO_STEP, dtype=torch.int32), torch.tensor(SEED)) if attrs.get("stochastic") else ()
    forms = quantize(x, *random, columns=True, stream=3, **attrs)
    wide = x.float().numpy()
    turns = attrs.get("hadamard", False)
    turned = twin_hadamard(wide) if turns else np.ascontiguousarray(wide.T)
    own = {name: attrs[name] for name in ("square", "four_over_six") if name in attrs}
    Twin(wide, 3 if random else None, **own).check(forms[:3])
    Twin(turned, 4 if random else None, **own).check(forms[3:])
    for name, form in (("rows", forms[:3]), ("columns", forms[3:])):
        one = {"rows": False, "columns": False, name: True, "hadamard": turns and name == "columns"}
        alone = quantize(x, *random, stream=3, **{**attrs, **one})
        assert all(map(same_bits, alone, form))


def test_division_by_three_corrected_by_its_remainder_is_exact_for_all_mantissas() -> None:
    """Kernels divide by 1536 so. In fp64 the products are exact, and the last sum never lies between two fp32 numbers.

    So rounding it to fp64 before does not matter.
    """
    v = (np.arange(1 << 23, dtype=np.uint32) | np.uint32(127 << 23)).view(np.float32)
    third = f32(1) / f32(3)
    quotient = v * third
    remainder = (v.astype(np.float64) - 3 * quotient.astype(np.float64)).astype(np.float32)
    total = remainder.astype(np.float64) * float(third) + quotient
    assert not ((total.view(np.uint64) & 0x1FFFFFFF) == 0x10000000).any()
    assert np.array_equal(total.astype(np.float32), v / f32(3))
