"""The table of dtypes."""

from __future__ import annotations

from surogate_core.dtypes import DTYPES, Dtype


def test_elements_of_less_than_a_byte_are_packed() -> None:
    nf4 = Dtype("nf4", 4, 99, "uint8", "U8")
    assert [nf4.nbytes(count) for count in (0, 1, 2, 3)] == [0, 1, 1, 2]
    assert {name: dtype.nbytes(3) for name, dtype in DTYPES.items() if dtype.bits < 32} == {
        "bf16": 6,
        "e4m3": 3,
        "e5m2": 3,
        "uint8": 3,
    }


def test_codes_are_consecutive_because_they_index_arrays_of_the_header() -> None:
    assert sorted(dtype.code for dtype in DTYPES.values()) == list(range(len(DTYPES)))
