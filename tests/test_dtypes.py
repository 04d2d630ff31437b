"""The table of dtypes."""

from __future__ import annotations

import torch

from surogate_core.dtypes import DTYPES
from surogate_core.program.value import Value


def test_elements_of_less_than_a_byte_are_packed() -> None:
    e2m1 = DTYPES["e2m1"]
    assert [e2m1.nbytes(count) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert e2m1.stored_shape((3, 32)) == (3, 16) and e2m1.shape_of((3, 16)) == (3, 32)
    assert DTYPES["bf16"].stored_shape((3, 32)) == DTYPES["bf16"].shape_of((3, 32)) == (3, 32)
    assert {name: dtype.nbytes(3) for name, dtype in DTYPES.items() if dtype.bits < 32} == {
        "bf16": 6,
        "e2m1": 2,
        "ue4m3": 3,
        "ue8m0": 3,
        "e4m3": 3,
        "e5m2": 3,
        "uint8": 3,
    }


def test_codes_are_consecutive_because_they_index_arrays_of_the_header() -> None:
    assert sorted(dtype.code for dtype in DTYPES.values()) == list(range(len(DTYPES)))


def test_a_packed_value_is_planned_stored_and_read_in_bytes() -> None:
    value = Value("codes", (4, 32), "e2m1", "act")
    assert (value.size, value.nbytes, value.stored_shape) == (128, 64, (4, 16))
    odd = Value("codes", (3, 3), "e2m1", "act")
    assert (odd.size, odd.nbytes, odd.stored_shape) == (9, 6, (3, 2))


def test_eps_is_that_of_torch() -> None:
    """torch has none of packed elements, and of integers."""
    dtypes = {name: getattr(torch, dtype.torch_name) for name, dtype in DTYPES.items()}
    found = {name: torch.finfo(dtype).eps for name, dtype in dtypes.items() if dtype.is_floating_point}
    assert {name: dtype.eps for name, dtype in DTYPES.items()} == found | {
        "e2m1": 0.5, "int64": 0, "int32": 0, "uint8": 0
    }  # fmt: skip
