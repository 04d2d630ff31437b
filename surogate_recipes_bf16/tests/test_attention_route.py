"""Selection of cuDNN's attention backward, bounds of its workspace, and messages about determinism. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surogate_core.api import ConfigError, Deterministic, KernelDef, Op, Target, Value
from surogate_core.testing.binding import choose
from surogate_core.testing.devices import DEVICES
from surogate_recipes_bf16.kernels.attention import CUDNN, MMA, PLAIN, check_determinism
from surogate_recipes_bf16.kernels.attention_route import (
    MINIMUM_CUDNN,
    ORDERED_CUDNN,
    SCORE_BYTES_LIMIT,
    BackwardAlgorithm,
    Route,
    Shape,
    algorithm_bytes,
    backward_algorithm,
    backward_bytes,
    chunked_algorithm,
    forward_bytes,
    head_groups,
    of_chunk,
    packs_dkv,
    score_bytes,
    shape_of,
)

H200 = Target(DEVICES["h200"])
ANY, KEPT, ORDERED = Route

# (tokens, documents, seq_len, heads, kv_heads, head_dim): measured workspace of cuDNN plans on SM90 in bytes, including
# lengths, offsets, packed dk and dv, and packed lse. The ordered route was measured with cuDNN 9.28.0, the others with
# 9.19.1, or 9.19.0 if dense. If two versions have a route, they differ by less than 4 KiB.
FORWARD: dict[tuple[int, ...], int] = {
    (8192, 1, 8192, 16, 8, 128): 256,
    (8192, 33, 8192, 16, 8, 128): 18_432,
    (8192, 1025, 8192, 16, 8, 128): 292_096,
    (4096, 2, 2048, 32, 8, 128): 256,
    (32768, 32, 1024, 14, 2, 64): 256,
}
BACKWARD: list[tuple[tuple[int, ...], BackwardAlgorithm, int]] = [
    ((8192, 33, 8192, 16, 8, 128), BackwardAlgorithm(ANY), 302_523_136),
    ((8192, 1025, 8192, 16, 8, 128), BackwardAlgorithm(ANY), 303_003_392),
    ((8192, 33, 8192, 32, 8, 128), BackwardAlgorithm(ANY), 504_374_016),
    ((8192, 33, 8192, 16, 16, 64), BackwardAlgorithm(ANY), 101_196_288),
    ((8192, 33, 8192, 12, 4, 96), BackwardAlgorithm(ANY), 151_402_240),
    ((8192, 33, 8192, 4, 2, 16), BackwardAlgorithm(ANY), 9_585_152),
    ((4096, 2, 2048, 32, 8, 128), BackwardAlgorithm(ANY), 135_266_560),
    ((4096, 2, 2048, 32, 8, 128), BackwardAlgorithm(KEPT), 605_028_608),
    ((32768, 32, 1024, 14, 2, 64), BackwardAlgorithm(ANY), 238_551_296),
    ((32768, 32, 1024, 12, 2, 128), BackwardAlgorithm(KEPT), 1_009_778_944),
    ((32768, 16, 2048, 16, 8, 128), BackwardAlgorithm(KEPT, 2), 1_210_056_960),
    ((4096, 4, 1024, 16, 16, 128), BackwardAlgorithm(KEPT), 134_742_272),
    ((4096, 4, 1024, 16, 16, 128), BackwardAlgorithm(KEPT, 4), 33_685_760),
    ((16384, 16, 2048, 16, 8, 128), BackwardAlgorithm(KEPT), 2_484_084_736),
    ((16384, 16, 2048, 16, 8, 128), BackwardAlgorithm(KEPT, 2), 1_242_046_464),
    ((16384, 16, 2048, 16, 8, 128), BackwardAlgorithm(KEPT, 8), 310_517_760),
    ((8192, 8, 2048, 32, 8, 128), BackwardAlgorithm(KEPT, 2), 1_225_265_920),
    ((8192, 4, 4096, 64, 8, 128), BackwardAlgorithm(KEPT, 8), 1_145_310_208),
    ((8191, 2, 8191, 16, 8, 128), BackwardAlgorithm(KEPT, 4), 1_115_813_120),
    ((16384, 16, 2048, 12, 4, 96), BackwardAlgorithm(KEPT, 2), 893_788_160),
    ((8192, 8, 1024, 32, 8, 128), BackwardAlgorithm(ORDERED), 270_565_632),
    ((402, 2, 201, 6, 3, 96), BackwardAlgorithm(ORDERED), 1_872_640),
    ((8192, 33, 8192, 16, 8, 128), BackwardAlgorithm(ORDERED), 303_064_064),
    ((8192, 1025, 8192, 16, 8, 128), BackwardAlgorithm(ORDERED), 319_801_088),
    ((8192, 33, 8192, 16, 16, 64), BackwardAlgorithm(ORDERED), 101_737_216),
    ((16384, 257, 1000, 6, 3, 64), BackwardAlgorithm(ORDERED), 113_961_984),
    ((4096, 1025, 129, 4, 4, 16), BackwardAlgorithm(ORDERED), 3_802_624),
]


@pytest.mark.parametrize("sizes", FORWARD, ids=str)
def test_the_forward_bound_holds(sizes: tuple[int, ...]) -> None:
    assert FORWARD[sizes] + 4096 <= forward_bytes(Shape(*sizes)) <= FORWARD[sizes] + (1 << 20)


@pytest.mark.parametrize(("sizes", "algorithm", "asked"), BACKWARD, ids=str)
def test_the_workspace_bound_of_every_algorithm_holds_and_is_tight(
    sizes: tuple[int, ...], algorithm: BackwardAlgorithm, asked: int
) -> None:
    assert asked + 4096 <= algorithm_bytes(Shape(*sizes), algorithm) <= 1.01 * asked + (1 << 17)


FEW = Shape(tokens=4096, documents=4, seq_len=1024, heads=16, kv_heads=16, head_dim=128)
MORE = Shape(tokens=16384, documents=16, seq_len=2048, heads=16, kv_heads=8, head_dim=128)
MANY = Shape(tokens=8192, documents=33, seq_len=8192, heads=16, kv_heads=8, head_dim=128)


@pytest.mark.parametrize(
    ("shape", "deterministic", "cudnn", "algorithm"),
    [
        (FEW, "auto", MINIMUM_CUDNN, BackwardAlgorithm(KEPT)),
        (FEW, "auto", ORDERED_CUDNN, BackwardAlgorithm(KEPT)),
        (MORE, "auto", MINIMUM_CUDNN, BackwardAlgorithm(KEPT, 2)),
        (MORE, "true", MINIMUM_CUDNN, BackwardAlgorithm(KEPT, 2)),
        (MORE, "auto", ORDERED_CUDNN, BackwardAlgorithm(ORDERED)),
        (MANY, "auto", MINIMUM_CUDNN, BackwardAlgorithm(ANY)),
        (MANY, "auto", ORDERED_CUDNN - 1, BackwardAlgorithm(ANY)),
        (MANY, "true", ORDERED_CUDNN, BackwardAlgorithm(ORDERED)),
        (FEW, "false", MINIMUM_CUDNN, BackwardAlgorithm(KEPT)),
        (FEW, "false", ORDERED_CUDNN, BackwardAlgorithm(KEPT)),
        (replace(FEW, documents=5), "false", MINIMUM_CUDNN, BackwardAlgorithm(ANY)),
        (replace(FEW, documents=2, seq_len=2048), "false", MINIMUM_CUDNN, BackwardAlgorithm(ANY)),
        (MORE, "false", ORDERED_CUDNN, BackwardAlgorithm(ANY)),
    ],
)
def test_selected_algorithm_on_sm90(
    shape: Shape, deterministic: Deterministic, cudnn: int, algorithm: BackwardAlgorithm
) -> None:
    assert backward_algorithm(shape, replace(H200, deterministic=deterministic), cudnn) == algorithm


def test_sm100_uses_the_ordered_route_at_any_size() -> None:
    assert backward_algorithm(MANY, Target(DEVICES["b200"]), MINIMUM_CUDNN) == BackwardAlgorithm(ORDERED)


def test_head_groups_are_equal_and_fit_in_the_limit() -> None:
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
def test_the_planned_workspace_suffices_for_every_cudnn(shape: Shape, deterministic: Deterministic) -> None:
    target = replace(H200, deterministic=deterministic)
    for cudnn in (MINIMUM_CUDNN, 91901, ORDERED_CUDNN, 92800):
        assert algorithm_bytes(shape, backward_algorithm(shape, target, cudnn)) <= backward_bytes(shape, target)


def test_documents_of_equal_lengths_are_dense_and_need_no_more_workspace_than_ragged_ones() -> None:
    dense = Shape(tokens=4096, documents=4, seq_len=1024, heads=16, kv_heads=8, head_dim=128)
    ragged = replace(dense, documents=5)
    assert dense.dense and not ragged.dense and not replace(dense, documents=3).dense
    assert packs_dkv(ragged) and not packs_dkv(dense)
    assert forward_bytes(dense) <= forward_bytes(ragged)
    for algorithm in (BackwardAlgorithm(ANY), BackwardAlgorithm(KEPT, 2), BackwardAlgorithm(ORDERED)):
        assert algorithm_bytes(dense, algorithm) < algorithm_bytes(ragged, algorithm)


@pytest.mark.parametrize("device", ["a100", "rtx5090"])
@pytest.mark.parametrize("documents", [4, 5])
def test_cudnn_runs_the_forward_alone_on_sm8x_and_sm12x(device: str, documents: int) -> None:
    forward, backward = CUDNN
    op = backward_op(replace(FEW, documents=documents))
    support = backward.supports(op, Target(DEVICES[device]))
    assert not support.ok and "cuDNN's backward" in support.reason
    values = (op.ins[1], op.ins[4], op.ins[2], op.ins[3])
    assert forward.supports(Op("attention", values[:2], values[2:], op.attrs), Target(DEVICES[device])).ok


@pytest.mark.parametrize(("kernels", "dtype"), [(CUDNN, "bf16"), (MMA, "bf16"), (PLAIN, "fp32")])
def test_every_kernel_serves_an_out_and_lse_that_are_not_those_of_attention(
    kernels: tuple[KernelDef, ...], dtype: str
) -> None:
    op = backward_op(FEW, dtype)
    op = replace(op, attrs={**op.attrs, "own": False})
    assert choose(kernels, op, H200) is kernels[1]
    assert not shape_of(op).own
    unaware = [replace(kernel, attrs=("window",)) for kernel in kernels]
    with pytest.raises(AssertionError, match="does not implement own=False"):
        choose(unaware, op, H200)


@pytest.mark.parametrize(
    ("changes", "device", "cudnn", "own"),
    [
        ({"window": 512, "scale": 0.5}, "h200", "", ""),
        ({"softcap": 50.0, "window": 512}, "h200", "does not implement softcap=50.0", ""),
        ({"head_dim": 256}, "h200", "", ""),
        ({"head_dim": 256}, "b200", "head_dim must be a multiple of 16 up to 128, got 256", ""),
        ({"head_dim": 256}, "rtx4090", "head_dim must be a multiple of 16 up to 128, got 256", ""),
        ({"head_dim": 264}, "h200", "got 264", "head_dim must be a multiple of 8 up to 256, got 264"),
    ],
)
def test_what_a_kernel_does_not_implement_is_refused_by_name(
    changes: dict[str, Any], device: str, cudnn: str, own: str
) -> None:
    op = backward_op(replace(FEW, **changes))
    for kernels, reason in ((CUDNN, cudnn), (MMA, own)):
        if reason:
            with pytest.raises(AssertionError, match=reason):
                choose(kernels, op, Target(DEVICES[device]))
        else:
            assert choose(kernels, op, Target(DEVICES[device])) in kernels


@pytest.mark.parametrize(("device", "served"), [("h200", True), ("rtx4090", False)])
def test_the_backward_of_large_heads_in_fp32_needs_more_shared_memory_than_small_gpus_have(
    device: str, served: bool
) -> None:
    op = backward_op(replace(FEW, head_dim=256), "fp32")
    support = PLAIN[-1].supports(op, Target(DEVICES[device]))
    assert support.ok is served and ("at most 128 in fp32 on" in support.reason) is not served


def test_determinism_takes_workspace_only_if_it_is_requested() -> None:
    assert backward_bytes(MORE, replace(H200, deterministic="false")) < 0.6 * SCORE_BYTES_LIMIT
    assert SCORE_BYTES_LIMIT < backward_bytes(MORE, H200) < 1.2 * SCORE_BYTES_LIMIT


# -------------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("cudnn", [MINIMUM_CUDNN, ORDERED_CUDNN])
@pytest.mark.parametrize("deterministic", ["auto", "true", "false"])
@pytest.mark.parametrize("documents", [8, 64, 4104])
def test_chunks_run_the_algorithm_of_the_whole_if_that_repeats_its_bits(
    documents: int, deterministic: Deterministic, cudnn: int
) -> None:
    shape, target = Shape(8 * 4096, documents, 4096, 32, 8, 128), replace(H200, deterministic=deterministic)
    whole = backward_algorithm(shape, target, cudnn)
    if whole.deterministic:
        assert all(chunked_algorithm(shape, chunks, target, cudnn) == whole for chunks in (1, 2, 4, 8))


def test_chunks_may_be_small_enough_for_a_deterministic_algorithm() -> None:
    shape = Shape(16 * 4096, 16, 4096, 32, 8, 128)
    assert not backward_algorithm(shape, H200, MINIMUM_CUDNN).deterministic
    assert chunked_algorithm(shape, 2, H200, MINIMUM_CUDNN) == BackwardAlgorithm(KEPT, 8)


@pytest.mark.parametrize("documents", [8, 64, 513, 4104])
def test_the_workspace_of_chunks_is_that_of_one(documents: int) -> None:
    """All of it depends on the tokens, except what cuDNN keeps for each document."""
    shape = Shape(8 * 4096, documents, 4096, 32, 8, 128)
    whole, one = backward_bytes(shape, H200), backward_bytes(shape, H200, 8)
    per_document = 512 * documents + 8 * documents * (32 * 64 + 4)
    assert one <= whole / 8 + per_document + (1 << 18)
    assert of_chunk(shape, 8).tokens == 4096


# ------------------------------------------------------------------------------------------------------------ messages


def backward_op(shape: Shape, dtype: str = "bf16") -> Op:
    """Return an `attention_bwd` op of these sizes."""
    row, out_row = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.heads * shape.head_dim

    def value(name: str, *sizes: int) -> Value:
        return Value(name=name, shape=sizes, dtype=dtype, role="act")

    qkv, out = value("qkv", shape.tokens, row), value("out", shape.tokens, out_row)
    lse = Value(name="lse", shape=(shape.heads, shape.tokens), dtype="fp32", role="act")
    cu_seqlens = Value(name="cu_seqlens", shape=(shape.documents + 1,), dtype="int32", role="input")
    attrs = {
        "n_heads": shape.heads,
        "n_kv_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "seq_len": shape.seq_len,
        "window": shape.window,
        "scale": shape.scale,
        "softcap": shape.softcap,
    }
    return Op("attention_bwd", (out, qkv, out, lse, cu_seqlens), (value("dqkv", shape.tokens, row),), attrs)


class Context:
    """The parts of a BindContext that `check_determinism` uses."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def notices_of(shape: Shape, deterministic: Deterministic, cudnn: int = 91901) -> list[str]:
    context: Any = Context(replace(H200, deterministic=deterministic))
    check_determinism(backward_op(shape), backward_algorithm(shape, context.target, cudnn), cudnn, context)
    notices: list[str] = context.notices
    return notices


def test_auto_gives_the_same_notice_about_nondeterminism_for_every_shape() -> None:
    (text,) = notices_of(MANY, "auto")
    assert text.startswith("deterministic: auto: with cuDNN 9.19.1 gradients may differ")
    assert "deterministic: true says what to change" in text
    assert notices_of(replace(MANY, documents=1025), "auto") == [text]


def test_true_rejects_a_nondeterministic_algorithm() -> None:
    with pytest.raises(
        ConfigError,
        match=r"deterministic: true .*attention_bwd.*cuDNN 9\.19\.1.*nvidia-cudnn-cu13>=9\.25\.0.*"
        r"SUROGATE_ATTENTION=plain.*8\.2 GiB for each of 8",
    ):
        notices_of(MANY, "true")


def test_there_is_no_notice_for_a_deterministic_algorithm_or_with_false() -> None:
    assert notices_of(MORE, "auto") == notices_of(MORE, "true") == notices_of(MANY, "false") == []
    assert notices_of(MANY, "true", cudnn=92800) == []


def test_the_planned_notice_names_the_version_of_cudnn_that_is_needed() -> None:
    def planned(shape: Shape, deterministic: Deterministic) -> str:
        return CUDNN[1].notice(backward_op(shape), replace(H200, deterministic=deterministic))

    assert planned(MANY, "auto").startswith("deterministic: auto: with cuDNN before 9.25.0 gradients may differ")
    assert planned(MANY, "true").startswith("deterministic: true: with cuDNN before 9.25.0 the run is refused")
    assert planned(MANY, "false") == planned(MORE, "auto") == planned(MORE, "true") == ""
