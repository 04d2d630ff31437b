"""The dtypes of values: one table for programs, plans, torch, files and compiled code.

The C++ header <surogate/dtype.h> of surogate-build has the same codes, which tests/packaging compares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class Dtype:
    """A storage dtype.

    name        in programs and configs
    bits        of an element. Elements of less than 8 bits are packed.
    code        in the arguments of compiled functions: `enum DType` of <surogate/dtype.h>. The next free number.
    torch_name  attribute of `torch`: the dtype with these elements, or "uint8" for packed ones
    file_name   in the header of a safetensors file
    eps         distance from 1 to the next larger number; 0 of integers
    has_grad    whether values of this dtype can have gradients
    """

    name: str
    bits: int
    code: int
    torch_name: str
    file_name: str
    eps: float = 0.0
    has_grad: bool = False

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` elements, which begin at a byte."""
        return -(-count * self.bits // 8)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of a tensor of `torch_name` that holds `shape` elements: of packed ones, rows of bytes."""
        return shape if self.bits >= 8 or not shape else (*shape[:-1], self.nbytes(shape[-1]))

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape whose `stored_shape` is `stored`. The last dimension is a whole number of bytes."""
        return stored if self.bits >= 8 or not stored else (*stored[:-1], stored[-1] * 8 // self.bits)


DTYPES: Mapping[str, Dtype] = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp64", 64, 2, "float64", "F64", 2**-52, has_grad=True),  # for tests against finite differences
        Dtype("fp32", 32, 0, "float32", "F32", 2**-23, has_grad=True),
        Dtype("bf16", 16, 1, "bfloat16", "BF16", 2**-7, has_grad=True),
        Dtype("e2m1", 4, 8, "uint8", "U8", 2**-1),  # two to a byte, the first one in its lower half
        Dtype("ue4m3", 8, 9, "float8_e4m3fn", "F8_E4M3", 2**-3),  # E4M3 without a sign: scales of blocks
        Dtype("ue8m0", 8, 10, "float8_e8m0fnu", "F8_E8M0", 1),  # powers of two: scales of blocks
        Dtype("e4m3", 8, 5, "float8_e4m3fn", "F8_E4M3", 2**-3),
        Dtype("e5m2", 8, 6, "float8_e5m2", "F8_E5M2", 2**-2),
        Dtype("int64", 64, 4, "int64", "I64"),
        Dtype("int32", 32, 3, "int32", "I32"),
        Dtype("uint8", 8, 7, "uint8", "U8"),
    )
}
"""All dtypes, by name. Of those with one `torch_name`, the last one stands for it."""


def wider(a: str, b: str) -> str:
    """Return the dtype of more bits; `a` if both have as many."""
    return max(a, b, key=lambda name: DTYPES[name].bits)


def accumulator(dtype: str) -> str:
    """Return the dtype in which sums of `dtype` elements are accumulated: fp64 for fp64, otherwise fp32."""
    return "fp64" if dtype == "fp64" else "fp32"


if TYPE_CHECKING:
    DtypeName = str
    KernelDtype = str
else:
    DtypeName = Literal[tuple(DTYPES)]  # as a Literal, for the check of definitions
    KernelDtype = Literal["*", "...", *DTYPES]
