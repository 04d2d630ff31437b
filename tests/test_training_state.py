"""Training state is saved and loaded bit for bit, in every dtype, and only into the values that it was saved from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surogate.checkpoints.manifest import hash_file
from surogate.checkpoints.states import load_state, write_state
from surogate.checkpoints.tensor_file import Stored
from surogate_core.dtypes import DTYPES
from surogate_core.errors import ConfigError
from surogate_core.program.value import Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.pieces import Pieces


def values(rows: int = 3) -> list[Value]:
    return [Value(f"state.{dtype}", (rows, 5), dtype, "state") for dtype in DTYPES]


def random_bits(value: Value) -> torch.Tensor:
    """Random bits, which include NaNs of every kind."""
    raw = torch.randint(0, 256, (value.nbytes,), dtype=torch.uint8)
    return raw.view(TORCH_DTYPES[value.dtype]).view(value.stored_shape)


@pytest.mark.parametrize("max_shard_bytes", [1, 200, 10_000])
def test_every_dtype_is_saved_and_loaded_bit_for_bit(tmp_path: Path, max_shard_bytes: int) -> None:
    saved = {value: random_bits(value) for value in values()}
    stored = [Stored.of(v.name, tensor) for v, tensor in saved.items()]
    hashes = write_state(tmp_path, stored, max_shard_bytes=max_shard_bytes)
    assert len(hashes) == {1: len(DTYPES), 200: 3, 10_000: 1}[max_shard_bytes]
    assert all(hash_file(tmp_path / name) == digest for name, digest in hashes.items())
    loaded = {value: torch.zeros_like(tensor) for value, tensor in saved.items()}
    load_state(tmp_path, list(saved), lambda value: Pieces.of(loaded[value]))
    for value, tensor in saved.items():
        assert torch.equal(tensor.view(torch.uint8), loaded[value].view(torch.uint8)), value


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (values(rows=4), r"is BF16 \[3, 5\], this run has state.bf16:bf16\[4,5\]"),
        ([Value("state.fp64", (3, 5), "fp32", "state"), *values()[1:]], "this run has state.fp64:fp32"),
        (values()[1:], "differ in state.fp64"),
        ([*values(), Value("new", (1,), "fp32", "state")], "differ in new"),
    ],
)
def test_states_of_another_run_are_refused_and_nothing_is_copied(
    tmp_path: Path, wanted: list[Value], message: str
) -> None:
    write_state(tmp_path, [Stored.of(v.name, random_bits(v)) for v in values()])

    def view(value: Value) -> Pieces:
        raise AssertionError(f"{value!r} was written")

    with pytest.raises(ConfigError, match=message):
        load_state(tmp_path, wanted, view)
