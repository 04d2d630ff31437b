from __future__ import annotations

import pytest
import torch
from acme_plugin.plugin import KERNELS, OP

from surogate_core.testing.ops import check_op

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@DTYPES
def test_positive_elements_are_squared_and_the_others_are_zero(dtype: torch.dtype) -> None:
    (y,) = check_op(OP, torch.tensor([[-2.0, -0.5, 0.0], [0.5, 3.0, 1.5]], dtype=dtype))
    assert y.tolist() == [[0.0, 0.0, 0.0], [0.25, 9.0, 2.25]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(1,), (5, 64), (257, 333)], ids=str)
@DTYPES
def test_the_kernel_computes_the_bits_of_the_reference(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from surogate_core.testing.binding import run_op
    from surogate_core.testing.kernels import same_bits

    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    (y,) = run_op(KERNELS, OP, [x], {})  # between guard bytes, eagerly and captured
    (expected,) = check_op(OP, x)
    assert same_bits(y, expected)
