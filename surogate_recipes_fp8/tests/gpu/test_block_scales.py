"""Products of operands whose blocks have scales of their own: e2m1 in blocks of 16, and FP8 in blocks of 32.

No card of SM100 or newer has run them yet; the checks of their arguments run on every GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.cases import cases
from surogate_core.testing.devices import training_device
from surogate_core.testing.kernels import UNIT, Guarded, guarded, guarded_copy, same_bits

SM = training_device().sm or 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(SM < 89, reason="needs a GPU of SM89 or later")]
multiplies = pytest.mark.skipif(SM < 100, reason="needs SM100, compiled, not run")

LIBRARY = 64 << 20
TOLERANCE = 2e-3
"""Allowed relative rms error. The order in which these GPUs add is not known."""

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
BLOCKS = {"e2m1": 16, "e4m3": 32, "e5m2": 32}
PAIRS = (("e2m1", "e2m1"), ("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))


def code(dtype: str) -> int:
    return DTYPES[dtype].code


def stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def decoded(stored: Tensor, dtype: str) -> Tensor:
    """Return the numbers of a matrix that is stored as bytes, in fp64."""
    if dtype == "e2m1":
        return E2M1.to(stored.device)[torch.stack((stored & 15, stored >> 4), -1).flatten(1).long()]
    return stored.view(TORCH_DTYPES[dtype]).double()


def tiled(scales: Tensor) -> Tensor:
    """Return scales [rows, blocks], bytes, in the order in which products read them, with zeros where there is none."""
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    parts = padded.view(-(-rows // 128), 4, 32, -(-blocks // 4), 4)
    return parts.permute(0, 3, 2, 1, 4).flatten().contiguous()


def test_scales_of_tiles_of_128_rows_and_4_blocks_are_adjacent() -> None:
    for row, block, blocks, offset in (
        (33, 1, 4, 21),
        (127, 3, 4, 511),
        (0, 4, 8, 512),
        (128, 0, 8, 1024),
        (5, 2, 6, 82),
    ):
        scales = torch.zeros(200, blocks, dtype=torch.uint8)
        scales[row, block] = 1
        order = tiled(scales)
        assert order.numel() == 2 * -(-blocks // 4) * 512 and order.nonzero().tolist() == [[offset]]


@dataclass
class Operand:
    """A matrix [rows, k] as products read it, and its numbers in fp64."""

    stored: Guarded
    scales: Guarded
    contents: tuple[Tensor, Tensor]
    numbers: Tensor

    @classmethod
    def random(cls, rows: int, k: int, dtype: str) -> Operand:
        block = BLOCKS[dtype]
        stored = torch.randint(256, (rows, k * DTYPES[dtype].bits // 8), dtype=torch.uint8, device="cuda")
        if dtype != "e2m1":  # no NaN and inf: exponents below the largest
            stored &= 0xBF
        low, high = (0x20, 0x50) if dtype == "e2m1" else (120, 134)
        scales = torch.randint(low, high, (rows, k // block), dtype=torch.uint8, device="cuda")
        factors = scales.view(torch.float8_e4m3fn).double() if dtype == "e2m1" else torch.exp2(scales.double() - 127)
        numbers = decoded(stored, dtype) * factors.repeat_interleave(block, 1)
        contents = stored, tiled(scales)
        return cls(*(guarded(x.shape, torch.uint8) for x in contents), contents, numbers)

    def fill(self) -> None:
        for buffer, content in zip((self.stored, self.scales), self.contents, strict=True):
            buffer.tensor.copy_(content)


def construct(*pointers: int, **changes: Any) -> Any:
    """Return the product of e2m1 matrices [64, 64], or with these changes; without pointers it is not timed."""
    from surogate_recipes_fp8 import _C

    arguments = {"m": 64, "n": 64, "k": 64, "trans_b": True, "dtype_a": "e2m1", "dtype_b": "e2m1", "dtype_d": "bf16"}
    arguments |= {"scale_block": 16, "library_bytes": LIBRARY, "stream": stream()} | changes
    codes = {name: code(value) if name.startswith("dtype") else value for name, value in arguments.items()}
    return _C.Gemm(*(pointers or (0, 0, 0, 0, 0, 256, 256, 256)), **codes)


FP8 = {"dtype_a": "e4m3", "dtype_b": "e5m2", "scale_block": 32}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 48}, "k must be a multiple of 32 with scales of blocks, got 48"),
        ({"trans_a": True}, r"need A as \[m,k\] and B as \[n,k\], got A as \[k,m\] and B as \[n,k\]"),
        ({**FP8, "trans_b": False}, r"need A as \[m,k\] and B as \[n,k\], got A as \[m,k\] and B as \[k,n\]"),
        ({"scale_block": 8}, "scale_block must be 0, 16 or 32, got 8"),
        ({"scale_block": 32}, "FP4 operands need scales of blocks of 16"),
        ({"scale_block": 0}, "FP4 operands need scales of blocks of 16"),
        ({**FP8, "scale_block": 16}, "FP8 operands need one scale each, or scales of blocks of 32"),
        ({"dtype_a": "e4m3"}, r"both e2m1, or e4m3 and e4m3 or e5m2, got e4m3\*e2m1"),
        ({"dtype_a": "bf16", "dtype_b": "bf16"}, "operands in bf16 have no scales"),
        ({"dtype_d": "e4m3"}, "D cannot be e4m3 with operands in e2m1"),
        ({"n": 60}, "rows of D must be multiples of 16 bytes .*, got 60 elements of bf16"),
        ({"lda": 80}, "rows of A must be multiples of 16 bytes .*, got 80 elements of e2m1"),
        ({**FP8, "fast": True}, "fast accumulation needs FP8 operands with one scale each"),
        ({"batch": 2}, "a batch has no bias and no scales"),
        ({"dtype_bias": "fp32"}, "dtype_bias must be bf16, got fp32"),
    ],
    ids=str,
)
def test_a_product_that_no_gpu_supports_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        construct(**changes)


def test_scales_of_blocks_must_be_given() -> None:
    with pytest.raises(ValueError, match="gemm: scale_b is a null pointer"):
        construct(0, 0, 0, 0, 0, 256, 0, 256)


@pytest.mark.skipif(SM >= 100, reason="this GPU multiplies blocks")
@pytest.mark.parametrize("changes", [{}, FP8], ids=str)
def test_the_refusal_of_an_older_gpu_names_the_ones_that_are_needed(changes: dict[str, Any]) -> None:
    block = changes.get("scale_block", 16)
    with pytest.raises(ValueError, match=rf"blocks of {block} need a GPU of SM100 \(Blackwell\) or newer.* SM{SM}$"):
        construct(**changes)


@multiplies
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
@pytest.mark.parametrize("out", ["bf16", "fp32"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
@pytest.mark.parametrize("timed", [False, True], ids=["untimed", "timed"])
@pytest.mark.parametrize("sizes", cases([(208, 272, 96)], more=[(128, 128, 128), (16, 400, 4096)]), ids=str)
def test_a_product_is_that_of_the_numbers_times_their_scales(
    sizes: tuple[int, int, int], timed: bool, beta: float, out: str, pair: tuple[str, str]
) -> None:
    m, n, k = sizes
    a, b = Operand.random(m, k, pair[0]), Operand.random(n, k, pair[1])
    d, scratch = guarded((m, n), TORCH_DTYPES[out]), guarded((LIBRARY,), torch.uint8)
    factors = guarded((2,), torch.float32)
    buffers = (a.stored.pointer, b.stored.pointer, d.pointer if beta else 0, d.pointer)
    scales = (0, a.scales.pointer, b.scales.pointer)
    gemm = construct(
        *(buffers if timed else (0, 0, 0, 0)),
        *(*scales, scratch.pointer),
        **{"m": m, "n": n, "k": k, "dtype_a": pair[0], "dtype_b": pair[1], "dtype_d": out},
        scale_block=BLOCKS[pair[0]],
        accumulate=beta != 0,
        factors=factors.pointer,
    )
    terms = a.numbers @ b.numbers.mT
    alpha = 0.7 / float(terms.std())
    initial = torch.randn(m, n, device="cuda").to(d.tensor.dtype) if beta else torch.full_like(d.tensor, torch.nan)
    for operand in (a, b):
        operand.fill()
    factors.tensor.copy_(torch.tensor((alpha, beta)))
    d.tensor.copy_(initial)
    gemm.run_with_factors(*buffers, *scales, factors.pointer, scratch.pointer, stream())
    torch.cuda.synchronize()
    for buffer in (a.stored, a.scales, b.stored, b.scales, d, scratch, factors):
        buffer.check()
    terms = alpha * terms
    truth = terms + (initial.double() if beta else 0)
    rounding = UNIT[d.tensor.dtype] * (truth.abs() + terms.abs())
    excess = ((d.tensor.double() - truth).abs() - rounding).clamp(min=0)
    assert d.tensor.isfinite().all()
    assert float(excess.square().mean().sqrt()) <= TOLERANCE * float(terms.square().mean().sqrt())


def test_e2m1_operands_of_timed_products_are_normal_numbers() -> None:
    """Their deviation is a third of the largest number, and each of the sixteen codes occurs."""
    from surogate_recipes_fp8 import _C

    size = 1_000_002
    out = guarded((size // 2,), torch.uint8)
    _C.random_normal(out.pointer, size, code("e2m1"), stream())
    out.check()
    numbers = decoded(out.tensor[None], "e2m1")
    assert abs(float(numbers.mean())) < 0.02 and abs(float(numbers.std()) - 2) < 0.1
    counts = torch.bincount(torch.cat((out.tensor & 15, out.tensor >> 4)).long(), minlength=16)
    assert int(counts.min()) > 0.001 * size
    again = guarded_copy(torch.zeros_like(out.tensor), constant=False)
    _C.random_normal(again.pointer, size, code("e2m1"), stream())
    assert same_bits(out.tensor, again.tensor)
    with pytest.raises(ValueError, match="random_normal: size must be even, got 3"):
        _C.random_normal(out.pointer, 3, code("e2m1"), stream())
