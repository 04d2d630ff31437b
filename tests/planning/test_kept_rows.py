"""Micro-batch and accumulation that keep the rows of an optimizer step on another number of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surogate.runs.ranks import keep_rows, kept_rows_text

COUNTS = st.integers(1, 200)


@given(COUNTS, COUNTS, COUNTS)
def test_the_product_is_kept_by_the_largest_micro_batch_that_divides(rows: int, ranks: int, batch_size: int) -> None:
    kept = keep_rows(rows, ranks, batch_size)
    if kept is None:
        assert rows % ranks
        return
    batch, accumulation = kept
    assert batch * accumulation * ranks == rows and batch <= batch_size
    assert not any(rows % (size * ranks) == 0 for size in range(batch + 1, batch_size + 1))


@pytest.mark.parametrize(
    ("rows", "ranks", "batch_size", "kept"),
    [(32, 2, 2, (2, 8)), (32, 8, 8, (4, 1)), (24, 2, 5, (4, 3)), (32, 3, 2, None), (4, 8, 1, None), (7, 1, 2, (1, 7))],
)
def test_settings_for_another_number_of_ranks(
    rows: int, ranks: int, batch_size: int, kept: tuple[int, int] | None
) -> None:
    assert keep_rows(rows, ranks, batch_size) == kept


@pytest.mark.parametrize(
    ("rows", "ranks", "text"),
    [
        (
            32,
            2,
            "set gradient_accumulation_steps: 8 (and per_device_train_batch_size: 2) to keep the 32 rows",
        ),
        (32, 3, "the 32 rows of a step cannot be divided evenly among 3 ranks"),
        (32, 3, "use 2 or 4"),
        (4, 6, "use 4"),
        (7, 2, "use 1 or 7"),
    ],
)
def test_the_text_says_what_to_set_or_which_numbers_divide(rows: int, ranks: int, text: str) -> None:
    assert text in kept_rows_text(rows, ranks, 2)
