"""One family of each kind of `check_formats.py`, which compares all of them in `make test-serving`."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving.check_formats import FORMATS, ONE_OF_A_KIND, rows


@pytest.mark.parametrize("family", ONE_OF_A_KIND)
def test_readers_of_others_make_the_model_that_was_exported(family: str, tmp_path: Path) -> None:
    """In each format: the matrices are those of the references, the tokens of conversations those of training."""
    ((name, ids, cells, wrong),) = rows([family], list(FORMATS), tmp_path)
    assert (name, wrong) == (family, [])
    assert ids.same == ids.count >= 6 and [cell.rounding is None for cell in cells] == [
        True,
        False,
        False,
        False,
        False,
    ]
