"""What attention by cuDNN plans for without a GPU: workspace, and whether the backward is deterministic."""

from __future__ import annotations

import pytest

from surogate_core.memory.devices import DEVICES
from surogate_recipes_bf16.kernels.attention import (
    SCORE_BYTES_LIMIT,
    Shape,
    backward_bytes,
    backward_way,
    forward_bytes,
    score_bytes,
)

H200 = DEVICES["h200"]

# (tokens, documents, seq_len, heads, kv_heads, head_dim): bytes that plans of cuDNN 9.19.1 for SM90 asked for, with our
# lengths, offsets and packed dk, dv; those of 9.28.0 are within 4 KiB.
FORWARD: dict[tuple[int, ...], int] = {
    (8192, 1, 8192, 16, 8, 128): 17_664,
    (8192, 33, 8192, 16, 8, 128): 18_432,
    (8192, 1025, 8192, 16, 8, 128): 292_096,
}
BACKWARD: dict[tuple[int, ...], int] = {
    (8192, 33, 8192, 16, 8, 128): 302_523_136,
    (8192, 1025, 8192, 16, 8, 128): 303_003_392,
    (8192, 33, 8192, 32, 8, 128): 504_374_016,
    (8192, 33, 8192, 16, 16, 64): 101_196_288,
    (8192, 33, 8192, 12, 4, 96): 151_402_240,
    (8192, 33, 8192, 4, 2, 16): 9_585_152,
}


@pytest.mark.parametrize("sizes", FORWARD, ids=str)
def test_the_forward_bound_holds(sizes: tuple[int, ...]) -> None:
    assert FORWARD[sizes] + 4096 <= forward_bytes(Shape(*sizes)) <= FORWARD[sizes] + (1 << 20)


@pytest.mark.parametrize("sizes", BACKWARD, ids=str)
def test_the_backward_bound_holds_and_is_tight(sizes: tuple[int, ...]) -> None:
    bound = backward_bytes(Shape(*sizes), H200)
    assert BACKWARD[sizes] + 4096 <= bound <= 1.01 * BACKWARD[sizes]


def test_the_deterministic_backward_keeps_the_scores_of_few_short_documents() -> None:
    few = Shape(tokens=4096, documents=4, seq_len=1024, heads=16, kv_heads=16, head_dim=128)
    assert score_bytes(few) == 2 * 4 * 16 * 1024 * 1024 <= SCORE_BYTES_LIMIT
    assert backward_way(few, H200, 91900).deterministic
    assert score_bytes(few) < backward_bytes(few, H200) < 1.01 * score_bytes(few)


def test_where_bits_may_differ_the_user_is_told() -> None:
    many = Shape(tokens=8192, documents=33, seq_len=8192, heads=16, kv_heads=8, head_dim=128)
    way = backward_way(many, H200, 91901)
    assert not way.deterministic
    assert "9.19.1" in way.notice and "66.0 GiB" in way.notice
    assert backward_way(many, H200, 92800).deterministic
    assert backward_bytes(many, H200) < 1 << 29
