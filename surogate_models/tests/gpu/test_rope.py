"""GPU kernels of qk_norm_rope and rope, forward and backward, compared with the references in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.kernels import assert_close, same_bits
from surogate_models import reference
from surogate_models.kernels import KERNELS
from surogate_models.rope import Linear, Llama3, QueryScaling, Yarn

pytestmark = pytest.mark.gpu

SHAPES = [
    # tokens, n_heads, n_kv_heads, head_dim
    (1, 1, 1, 128),
    (33, 16, 8, 128),
    (2500, 4, 2, 128),  # more groups of tokens than blocks in the backward kernel
    (257, 32, 8, 128),
    (65, 40, 20, 128),  # the last chunks of q and of k have fewer heads
    (97, 6, 2, 96),  # some lanes of a group have no elements
    (130, 9, 3, 64),
    (70, 5, 1, 32),
    (19, 2, 2, 256),
    (45, 3, 1, 34),  # 17 pairs: accesses of one element
    (21, 3, 1, 80),
    (9, 2, 1, 250),
    (300, 1, 1, 2),
]
DTYPES = ["fp32", "bf16"]
SCALINGS: dict[str, dict[str, Any]] = {
    "llama3": {"scaling": Llama3(8.0, 1.0, 4.0, 8192)},
    "linear": {"scaling": Linear(4.0)},
    "yarn": {"scaling": Yarn(4.0, 20.0, 46.0), "attention_factor": 1.1386294361119891},
    "offset": {"offset": 1.0},
}


class Case:
    """Values of all ops, with random inputs. Positions begin at `first` and restart every 777 tokens."""

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: str, *, seed: int = 0, first: int = 0, **scaled: Any
    ) -> None:
        tokens, n_heads, n_kv_heads, head_dim = shape
        gen = torch.Generator().manual_seed(seed)
        width = (n_heads + 2 * n_kv_heads) * head_dim
        self.n_qk = n_heads + n_kv_heads
        self.attrs: dict[str, Any] = {
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "theta": 1e6,
            "eps": 1e-6,
            **scaled,
        }

        def value(name: str, shape: tuple[int, ...], kind: str = dtype) -> Value:
            return Value(name=name, shape=shape, dtype=kind, role="act")

        self.dy, self.qkv = value("dy", (tokens, width)), value("qkv", (tokens, width))
        self.q_norm, self.k_norm = value("q_norm", (head_dim,)), value("k_norm", (head_dim,))
        self.positions = value("positions", (tokens,), "int32")
        self.rope, self.d_qkv = value("rope", (tokens, width)), value("d_qkv", (tokens, width))
        wide = {
            v: torch.randn(v.shape, generator=gen, dtype=torch.float64) * scale + shift
            for v, scale, shift in (
                (self.dy, 1, 0),
                (self.qkv, 3, 0),
                (self.q_norm, 0.3, 1),
                (self.k_norm, 0.3, 1),
            )
        }
        self.contents = {v: x.to(TORCH_DTYPES[dtype]) for v, x in wide.items()}
        self.contents[self.positions] = (first + torch.arange(tokens) % 777).to(torch.int32)

    def truth(self, function: Any, *ins: Value) -> Any:
        """Evaluate the reference in fp64 on the same inputs as the kernel."""
        contents = [self.contents[v] for v in ins]
        return function(*(x.double() if x.is_floating_point() else x for x in contents), **self.attrs)

    def without_norm(self) -> dict[str, Any]:
        """Return the attributes of `rope`."""
        return {key: value for key, value in self.attrs.items() if key not in ("eps", "offset")}

    def values_columns(self, x: Tensor) -> Tensor:
        return x[:, self.n_qk * self.attrs["head_dim"] :]


def check_forward(case: Case, skew: int = 0) -> None:
    """The mean of squares is a sum of head_dim terms. Sine and cosine are accurate to 2 * 2^-24."""
    ins = (case.qkv, case.q_norm, case.k_norm, case.positions)
    op = Op("qk_norm_rope", ins, (case.rope,), case.attrs)
    contents = {v: case.contents[v] for v in ins}
    (out,) = run_kernel(KERNELS, op, contents, skew=skew)
    assert_close(out, case.truth(reference.qk_norm_rope, *ins), out.dtype, case.attrs["head_dim"])
    assert same_bits(case.values_columns(out), case.values_columns(case.contents[case.qkv]))


def check_backward(
    case: Case, grads: tuple[str, str] = ("fp32", "fp32"), accumulate: frozenset[int] = frozenset(), skew: int = 0
) -> None:
    ins = (case.dy, case.qkv, case.q_norm, case.k_norm, case.positions)
    head_dim = case.attrs["head_dim"]
    d_norms = [
        Value(name=f"d_{which}_norm", shape=(head_dim,), dtype=dtype, role="grad")
        for which, dtype in zip("qk", grads, strict=True)
    ]
    op = Op("qk_norm_rope_bwd", ins, (case.d_qkv, *d_norms), case.attrs, accumulate=accumulate)
    contents = {v: case.contents[v] for v in ins}
    before = [torch.zeros(head_dim), torch.zeros(head_dim)]
    for i, value in enumerate(d_norms):
        if i + 1 in accumulate:
            before[i] = torch.randn(head_dim, generator=torch.Generator().manual_seed(i))
            contents[value] = before[i]
    d_qkv, d_q_norm, d_k_norm = run_kernel(KERNELS, op, contents, skew=skew)
    alone = Op("qk_norm_rope_dgrad", ins, (case.d_qkv,), case.attrs)
    (d_qkv_alone,) = run_kernel(KERNELS, alone, {v: case.contents[v] for v in ins}, skew=skew)

    truths = case.truth(reference.qk_norm_rope_bwd, *ins)
    for out in (d_qkv, d_qkv_alone):
        assert_close(out, truths[0], out.dtype, head_dim)
        assert same_bits(case.values_columns(out), case.values_columns(case.contents[case.dy]))
    sizes = term_sizes(case)
    n_heads, n_kv_heads, tokens = case.attrs["n_heads"], case.attrs["n_kv_heads"], case.dy.shape[0]
    for ours, truth, start, size, heads in zip(
        (d_q_norm, d_k_norm), truths[1:], before, sizes, (n_heads, n_kv_heads), strict=True
    ):
        assert_close(ours, truth + start.double(), ours.dtype, tokens * heads, size + start.double().abs())


def term_sizes(case: Case) -> tuple[Tensor, Tensor]:
    """Return the sums of |d * n|, the terms of d_q_norm and d_k_norm. |d| is at most the length of a rotated pair."""
    n_heads, head_dim = case.attrs["n_heads"], case.attrs["head_dim"]
    x, dy = (case.contents[v].double().view(-1, case.dy.shape[1] // head_dim, head_dim) for v in (case.qkv, case.dy))
    x, dy = x[:, : case.n_qk], dy[:, : case.n_qk]
    normed = x / x.square().mean(-1, keepdim=True).sqrt()
    half = (case.attrs.get("rotary_dim") or head_dim) // 2
    turned = (dy[..., :half].square() + dy[..., half : 2 * half].square()).sqrt()
    length = torch.cat((turned, turned, dy[..., 2 * half :].abs()), dim=-1) * case.attrs.get("attention_factor", 1.0)
    terms = (normed * length).abs().sum(0)
    return terms[:n_heads].sum(0), terms[n_heads:].sum(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_matches_the_reference(shape: tuple[int, int, int, int], dtype: str) -> None:
    check_forward(Case(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward_matches_the_reference(shape: tuple[int, int, int, int], dtype: str) -> None:
    check_backward(Case(shape, dtype, seed=1))


@pytest.mark.parametrize("first", [40_000, 131_072, 2**31 - 1000])
def test_large_positions_match_the_reference(first: int) -> None:
    """Angles of thousands of rotations need an exact argument reduction."""
    check_forward(Case((500, 2, 1, 128), "fp32", seed=2, first=first))
    check_backward(Case((500, 2, 1, 128), "fp32", seed=2, first=first))


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_buffers_match_the_reference(dtype: str) -> None:
    check_forward(Case((37, 4, 2, 128), dtype, seed=3), skew=1)
    check_backward(Case((37, 4, 2, 128), dtype, seed=3), skew=1)


@pytest.mark.parametrize(
    ("grads", "accumulate"),
    [
        (("fp32", "fp32"), frozenset({1, 2})),
        (("fp32", "fp32"), frozenset({2})),
        (("bf16", "bf16"), frozenset()),
        (("bf16", "fp32"), frozenset({2})),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_gradients_are_written_or_accumulated(
    dtype: str, grads: tuple[str, str], accumulate: frozenset[int]
) -> None:
    check_backward(Case((300, 4, 2, 128), dtype, seed=4), grads, accumulate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_frequencies_match_the_reference(scaling: str, dtype: str) -> None:
    """Uses large positions, where the last bits of the frequencies matter."""
    case = Case((200, 4, 2, 128), dtype, seed=5, first=100_000, **SCALINGS[scaling])
    check_forward(case)
    check_backward(case)
    check_rope(case)


def check_rope(case: Case, skew: int = 0) -> None:
    """An output is a sum of two products, of queries times a factor, whose logarithm has an error of its own.

    rope_bwd is the same kernel with the opposite angles, applied to dy.
    """
    attrs = case.without_norm()
    for kind, function, x in (("rope", reference.rope, case.qkv), ("rope_bwd", reference.rope_bwd, case.dy)):
        ins = (x, case.positions)
        op = Op(kind, ins, (case.rope,), attrs)
        (out,) = run_kernel(KERNELS, op, {v: case.contents[v] for v in ins}, skew=skew)
        truth = function(case.contents[x].double(), case.contents[case.positions], **attrs)
        half = (attrs.get("rotary_dim") or attrs["head_dim"]) // 2
        heads = case.contents[x].double().view(x.shape[0], -1, attrs["head_dim"])
        length = (heads[..., :half].square() + heads[..., half : 2 * half].square()).sqrt()
        length = torch.cat((length, length, heads[..., 2 * half :].abs()), dim=-1).view(x.shape)
        length = length * attrs.get("attention_factor", 1.0)
        if scaled := attrs.get("query_scaling"):
            width = attrs["n_heads"] * attrs["head_dim"]
            factors = reference.query_factors(case.contents[case.positions], scaled).double()[:, :, 0]
            length = torch.cat((length[:, :width] * factors, length[:, width:]), dim=1)
        assert_close(out, truth, out.dtype, 4 if scaled else 2, length)
        assert same_bits(case.values_columns(out), case.values_columns(case.contents[x]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rope_matches_the_reference(shape: tuple[int, int, int, int], dtype: str) -> None:
    check_rope(Case(shape, dtype, seed=6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_of_unaligned_buffers_matches_the_reference(dtype: str) -> None:
    check_rope(Case((37, 4, 2, 128), dtype, seed=7), skew=1)


PARTIAL = [
    *(((33, 6, 2, 128), 96), ((70, 24, 8, 128), 32), ((37, 5, 1, 96), 36), ((9, 3, 3, 80), 2)),
    *(((130, 16, 2, 256), 64), ((33, 2, 1, 64), 62)),
]
"""Shapes and rotated elements of a head: 16 bytes at a time, and one element at a time."""


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "rotary_dim"), PARTIAL, ids=str)
def test_norms_with_partial_rope_match_the_reference(
    shape: tuple[int, int, int, int], rotary_dim: int, dtype: str, skew: int
) -> None:
    case = Case(shape, dtype, seed=12, rotary_dim=rotary_dim, offset=1.0, attention_factor=1.25)
    check_forward(case, skew)
    check_backward(case, skew=skew)


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "rotary_dim"), PARTIAL, ids=str)
def test_partial_rope_matches_the_reference_and_copies_the_rest(
    shape: tuple[int, int, int, int], rotary_dim: int, dtype: str, skew: int
) -> None:
    case = Case(shape, dtype, seed=11, rotary_dim=rotary_dim)
    check_rope(case, skew=skew)
    op = Op("rope", (case.qkv, case.positions), (case.rope,), case.without_norm())
    contents = {v: case.contents[v] for v in op.ins}
    (apart,) = run_kernel(KERNELS, op, contents, skew=skew)
    (in_place,) = run_kernel(KERNELS, replace(op, outs=(case.qkv,)), contents, skew=skew)
    assert same_bits(apart, in_place)
    heads, before = (x.view(shape[0], -1, shape[3])[..., rotary_dim:] for x in (apart, case.contents[case.qkv]))
    assert same_bits(heads, before)


SCALED = [
    # shape, rotary_dim. Chunks have query heads, key heads or both; some accesses are of one element.
    ((97, 16, 8, 128), 0),
    ((2500, 4, 2, 128), 0),
    ((65, 40, 20, 128), 0),
    ((45, 3, 1, 34), 0),
    ((33, 6, 2, 128), 96),
    ((37, 5, 1, 96), 36),
]


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "rotary_dim"), SCALED, ids=str)
def test_scaled_queries_match_the_reference(
    shape: tuple[int, int, int, int], rotary_dim: int, dtype: str, skew: int
) -> None:
    """Positions are on both sides of the first multiples of the length."""
    scaling = QueryScaling(0.37, 11)
    case = Case(shape, dtype, seed=13, rotary_dim=rotary_dim, attention_factor=1.25, query_scaling=scaling)
    check_rope(case, skew=skew)
    for kind, x in (("rope", case.qkv), ("rope_bwd", case.dy)):
        op = Op(kind, (x, case.positions), (case.rope,), case.without_norm())
        contents = {v: case.contents[v] for v in op.ins}
        (apart,) = run_kernel(KERNELS, op, contents, skew=skew)
        (in_place,) = run_kernel(KERNELS, replace(op, outs=(x,)), contents, skew=skew)
        assert same_bits(apart, in_place)


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_and_keys_before_the_length_have_the_bits_of_unscaled_ones(dtype: str) -> None:
    case = Case((300, 6, 2, 128), dtype, seed=14, query_scaling=QueryScaling(0.1, 200))
    plain = Case((300, 6, 2, 128), dtype, seed=14)
    outs = []
    for each in (case, plain):
        op = Op("rope", (each.qkv, each.positions), (each.rope,), each.without_norm())
        (out,) = run_kernel(KERNELS, op, {v: each.contents[v] for v in op.ins})
        outs.append(out)
    scaled, unscaled = outs
    width = 6 * 128
    assert same_bits(scaled[:200], unscaled[:200])
    assert same_bits(scaled[:, width:], unscaled[:, width:])
    assert not same_bits(scaled[200:, :width], unscaled[200:, :width])


@pytest.mark.parametrize("first", [16_380, 262_140, 2**31 - 1000])
def test_scaled_queries_of_large_positions_match_the_reference(first: int) -> None:
    check_rope(Case((500, 2, 1, 128), "fp32", seed=15, first=first, query_scaling=QueryScaling(0.1, 16_384)))


@pytest.mark.parametrize("first", [40_000, 131_072, 2**31 - 1000])
def test_rope_of_large_positions_matches_the_reference(first: int) -> None:
    check_rope(Case((500, 2, 1, 128), "fp32", seed=8, first=first))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lanes_without_a_head_add_nothing_to_the_gradients_where_eps_is_zero(dtype: str) -> None:
    check_backward(Case((33, 5, 1, 128), dtype, seed=10, eps=0.0))


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(33, 16, 8, 128), (2500, 4, 2, 128), (97, 6, 2, 96), (70, 40, 5, 64)], ids=str)
@pytest.mark.parametrize("kind", ["rope", "rope_bwd", "qk_norm_rope", "qk_norm_rope_bwd", "qk_norm_rope_dgrad"])
def test_results_in_place_have_the_same_bits(
    kind: str, shape: tuple[int, int, int, int], dtype: str, skew: int
) -> None:
    case = Case(shape, dtype, seed=9)
    norms = (case.q_norm, case.k_norm) if kind.startswith("qk_norm") else ()
    first = case.qkv if kind in ("rope", "qk_norm_rope") else case.dy
    saved = (case.qkv,) if kind in ("qk_norm_rope_bwd", "qk_norm_rope_dgrad") else ()
    ins = (first, *saved, *norms, case.positions)
    gradients = [Value(name=f"d_{v.name}", shape=v.shape, dtype="fp32", role="grad") for v in norms]
    outs = (case.d_qkv, *(gradients if kind == "qk_norm_rope_bwd" else ()))
    op = Op(kind, ins, outs, case.attrs if norms else case.without_norm())
    contents = {v: case.contents[v] for v in ins}
    apart = run_kernel(KERNELS, op, contents, skew=skew)
    in_place = run_kernel(KERNELS, replace(op, outs=(first, *outs[1:])), contents, skew=skew)
    assert all(same_bits(a, b) for a, b in zip(apart, in_place, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(4096, 512, 512), (34, 6, 3), (1, 1, 1)], ids=str)
def test_queries_keys_and_values_are_joined_and_split(widths: tuple[int, int, int], dtype: str) -> None:
    gen = torch.Generator().manual_seed(12)
    parts = [Value(name=name, shape=(257, n), dtype=dtype, role="act") for name, n in zip("qkv", widths, strict=True)]
    qkv = Value(name="qkv", shape=(257, sum(widths)), dtype=dtype, role="act")
    contents = {v: torch.randn(v.shape, generator=gen).to(TORCH_DTYPES[dtype]) for v in parts}
    (joined,) = run_kernel(KERNELS, Op("join_qkv", tuple(parts), (qkv,), {}), contents)
    assert same_bits(joined, torch.cat(list(contents.values()), dim=1))
    split = run_kernel(KERNELS, Op("split_qkv", (qkv,), tuple(parts), {"widths": widths}), {qkv: joined})
    assert all(same_bits(a, b) for a, b in zip(split, contents.values(), strict=True))


def test_errors_name_the_invalid_argument() -> None:
    from surogate_models import _C

    x = torch.zeros(4096, device="cuda")
    p, stream = x.data_ptr(), torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match="qk_norm_rope: head_dim must be even and from 2 to 256, got 258"):
        _C.qk_norm_rope(p, p, p, p, p, p, 1, 1, 1, 258, 258, 1e-6, 0.0, 1.0, 0, stream)
    with pytest.raises(ValueError, match="qk_norm_rope: inv_freq is a null pointer"):
        _C.qk_norm_rope(p, p, p, p, 0, p, 1, 1, 1, 64, 64, 1e-6, 0.0, 1.0, 0, stream)
    with pytest.raises(ValueError, match="rope: attention_factor must be positive, got 0"):
        _C.rope(p, p, p, p, 1, 1, 1, 64, 64, 0.0, 0.0, 1, 0, stream)
    with pytest.raises(ValueError, match="rope: rotary_dim must be at most head_dim, and that 256, got 66 and 64"):
        _C.rope(p, p, p, p, 1, 1, 1, 64, 66, 1.0, 0.0, 1, 0, stream)
    with pytest.raises(ValueError, match="rope_bwd: positions is a null pointer"):
        _C.rope_bwd(p, 0, p, p, 1, 1, 1, 64, 64, 1.0, 0.0, 1, 0, stream)
    with pytest.raises(ValueError, match="rope: query_beta must not be negative, and query_length positive"):
        _C.rope(p, p, p, p, 1, 1, 1, 64, 64, 1.0, 0.1, 0, 0, stream)
    with pytest.raises(ValueError, match="qk_norm_rope_bwd: d_k_norm is bf16, which is only written"):
        widths = (1, 1, 1, 1, 64, 64)
        _C.qk_norm_rope_bwd(*[p] * 10, *widths, 1e-6, 0.0, 1.0, False, True, 0, 0, 1, stream)
