"""How attention's backward by cuDNN runs, what it may cost, and what the user is told: decided without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surogate_core.api import Deterministic, Op, Target, Value
from surogate_core.errors import ConfigError
from surogate_core.memory.devices import DEVICES
from surogate_recipes_bf16.kernels.attention import CUDNN, tell_or_refuse
from surogate_recipes_bf16.kernels.attention_route import (
    MINIMUM_CUDNN,
    ORDERED_CUDNN,
    SCORE_BYTES_LIMIT,
    Route,
    Shape,
    Way,
    backward_bytes,
    backward_way,
    forward_bytes,
    head_groups,
    score_bytes,
    way_bytes,
)

H200 = Target(DEVICES["h200"])
ANY, KEPT, ORDERED = Route

# (tokens, documents, seq_len, heads, kv_heads, head_dim): bytes that plans of cuDNN for SM90 asked for, with our
# lengths, offsets and packed dk, dv. 9.19.1 without the ordered route and 9.28.0 with it; where both have a route they
# are within 4 KiB of each other.
FORWARD: dict[tuple[int, ...], int] = {
    (8192, 1, 8192, 16, 8, 128): 17_664,
    (8192, 33, 8192, 16, 8, 128): 18_432,
    (8192, 1025, 8192, 16, 8, 128): 292_096,
}
BACKWARD: list[tuple[tuple[int, ...], Way, int]] = [
    ((8192, 33, 8192, 16, 8, 128), Way(ANY), 302_523_136),
    ((8192, 1025, 8192, 16, 8, 128), Way(ANY), 303_003_392),
    ((8192, 33, 8192, 32, 8, 128), Way(ANY), 504_374_016),
    ((8192, 33, 8192, 16, 16, 64), Way(ANY), 101_196_288),
    ((8192, 33, 8192, 12, 4, 96), Way(ANY), 151_402_240),
    ((8192, 33, 8192, 4, 2, 16), Way(ANY), 9_585_152),
    ((4096, 4, 1024, 16, 16, 128), Way(KEPT), 134_482_944),
    ((4096, 4, 1024, 16, 16, 128), Way(KEPT, 4), 33_623_040),
    ((16384, 16, 2048, 16, 8, 128), Way(KEPT), 2_484_084_736),
    ((16384, 16, 2048, 16, 8, 128), Way(KEPT, 2), 1_242_046_464),
    ((16384, 16, 2048, 16, 8, 128), Way(KEPT, 8), 310_517_760),
    ((8192, 8, 2048, 32, 8, 128), Way(KEPT, 2), 1_225_265_920),
    ((8192, 4, 4096, 64, 8, 128), Way(KEPT, 8), 1_145_310_208),
    ((8191, 2, 8191, 16, 8, 128), Way(KEPT, 4), 1_115_813_120),
    ((16384, 16, 2048, 12, 4, 96), Way(KEPT, 2), 893_788_160),
    ((8192, 33, 8192, 16, 8, 128), Way(ORDERED), 303_064_064),
    ((8192, 1025, 8192, 16, 8, 128), Way(ORDERED), 319_801_088),
    ((8192, 33, 8192, 16, 16, 64), Way(ORDERED), 101_737_216),
    ((16384, 257, 1000, 6, 3, 64), Way(ORDERED), 113_961_984),
    ((4096, 1025, 129, 4, 4, 16), Way(ORDERED), 3_802_624),
]


@pytest.mark.parametrize("sizes", FORWARD, ids=str)
def test_the_forward_bound_holds(sizes: tuple[int, ...]) -> None:
    assert FORWARD[sizes] + 4096 <= forward_bytes(Shape(*sizes)) <= FORWARD[sizes] + (1 << 20)


@pytest.mark.parametrize(("sizes", "way", "asked"), BACKWARD, ids=str)
def test_the_bound_of_every_way_holds_and_is_tight(sizes: tuple[int, ...], way: Way, asked: int) -> None:
    assert asked + 4096 <= way_bytes(Shape(*sizes), way) <= 1.01 * asked + (1 << 17)


FEW = Shape(tokens=4096, documents=4, seq_len=1024, heads=16, kv_heads=16, head_dim=128)
MORE = Shape(tokens=16384, documents=16, seq_len=2048, heads=16, kv_heads=8, head_dim=128)
MANY = Shape(tokens=8192, documents=33, seq_len=8192, heads=16, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("shape", "deterministic", "cudnn", "way"),
    [
        (FEW, "auto", MINIMUM_CUDNN, Way(KEPT)),
        (FEW, "auto", ORDERED_CUDNN, Way(KEPT)),
        (MORE, "auto", MINIMUM_CUDNN, Way(KEPT, 2)),
        (MORE, "true", MINIMUM_CUDNN, Way(KEPT, 2)),
        (MORE, "auto", ORDERED_CUDNN, Way(ORDERED)),
        (MANY, "auto", MINIMUM_CUDNN, Way(ANY)),
        (MANY, "auto", ORDERED_CUDNN - 1, Way(ANY)),
        (MANY, "true", ORDERED_CUDNN, Way(ORDERED)),
        (FEW, "false", ORDERED_CUDNN, Way(ANY)),
    ],
)
def test_the_order_of_ways_on_sm90(shape: Shape, deterministic: Deterministic, cudnn: int, way: Way) -> None:
    assert backward_way(shape, replace(H200, deterministic=deterministic), cudnn) == way


def test_sm100_adds_in_order_at_any_size() -> None:
    assert backward_way(MANY, Target(DEVICES["b200"]), MINIMUM_CUDNN) == Way(ORDERED)


def test_groups_divide_the_key_heads_and_keep_to_the_limit() -> None:
    assert score_bytes(MORE) == 2 * 16 * 16 * 2048 * 2048 == 2 * SCORE_BYTES_LIMIT
    for kv_heads in (1, 3, 5, 6, 8, 12):
        for documents in range(1, 200):
            shape = Shape(16384, documents, 2048, 3 * kv_heads, kv_heads, 64)
            groups = head_groups(shape)
            affordable = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
            affordable = [n for n in affordable if score_bytes(shape) / n <= SCORE_BYTES_LIMIT]
            assert groups == min(affordable, default=0)


@pytest.mark.parametrize("deterministic", ["auto", "true", "false"])
@pytest.mark.parametrize("shape", [FEW, MORE, MANY])
def test_a_plan_has_room_for_what_any_cudnn_takes(shape: Shape, deterministic: Deterministic) -> None:
    target = replace(H200, deterministic=deterministic)
    for cudnn in (MINIMUM_CUDNN, 91901, ORDERED_CUDNN, 92800):
        assert way_bytes(shape, backward_way(shape, target, cudnn)) <= backward_bytes(shape, target)


def test_a_plan_pays_for_determinism_only_where_it_is_asked_for() -> None:
    assert backward_bytes(MORE, replace(H200, deterministic="false")) < 0.6 * SCORE_BYTES_LIMIT
    assert SCORE_BYTES_LIMIT < backward_bytes(MORE, H200) < 1.2 * SCORE_BYTES_LIMIT


# -------------------------------------------------------------------------------------------------------- what is told


def backward_op(shape: Shape) -> Op:
    """`attention_bwd` of these sizes."""
    row, out_row = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.heads * shape.head_dim

    def value(name: str, *sizes: int) -> Value:
        return Value(name=name, shape=sizes, dtype="bf16", role="act")

    qkv, out = value("qkv", shape.tokens, row), value("out", shape.tokens, out_row)
    lse = Value(name="lse", shape=(shape.heads, shape.tokens), dtype="fp32", role="act")
    cu_seqlens = Value(name="cu_seqlens", shape=(shape.documents + 1,), dtype="int32", role="input")
    attrs = {
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "seq_len": shape.seq_len,
    }
    return Op("attention_bwd", (out, qkv, out, lse, cu_seqlens), (value("dqkv", shape.tokens, row),), attrs)


class Context:
    """As much of a bind context as telling needs."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def told(shape: Shape, deterministic: Deterministic, cudnn: int = 91901) -> list[str]:
    context: Any = Context(replace(H200, deterministic=deterministic))
    tell_or_refuse(backward_op(shape), backward_way(shape, context.target, cudnn), cudnn, context)
    notices: list[str] = context.notices
    return notices


def test_auto_tells_where_bits_may_differ_and_in_the_same_words_for_every_shape() -> None:
    (text,) = told(MANY, "auto")
    assert text.startswith("deterministic: auto: gradients may differ") and "cuDNN 9.19.1" in text
    assert "nvidia-cudnn-cu13>=9.25.0" in text and "SUROGATE_ATTENTION=plain" in text
    assert told(replace(MANY, documents=1025), "auto") == [text]


def test_true_refuses_where_bits_may_differ() -> None:
    with pytest.raises(
        ConfigError, match=r"deterministic: true .*attention_bwd.*cuDNN 9\.19\.1.*8\.2 GiB for each of 8"
    ):
        told(MANY, "true")


def test_nothing_is_told_where_bits_repeat_or_need_not() -> None:
    assert told(MORE, "auto") == told(MORE, "true") == told(MANY, "false") == []
    assert told(MANY, "true", cudnn=92800) == []


def test_a_plan_tells_what_the_version_of_cudnn_will_decide() -> None:
    def planned(shape: Shape, deterministic: Deterministic) -> str:
        return CUDNN[1].notice(backward_op(shape), replace(H200, deterministic=deterministic))

    assert planned(MANY, "auto").startswith("deterministic: auto: with cuDNN before 9.25.0 gradients may differ")
    assert planned(MANY, "true").startswith("deterministic: true: with cuDNN before 9.25.0 the run is refused")
    assert planned(MANY, "false") == planned(MORE, "auto") == planned(MORE, "true") == ""
