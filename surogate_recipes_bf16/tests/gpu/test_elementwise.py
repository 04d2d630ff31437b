"""Elementwise kernels and the embedding: bit-exact for copies and single roundings."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES
from surogate_core.reference import ops as reference
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, eager_and_graph, guarded, guarded_copy, same_bits
from surogate_recipes_bf16.kernels.elementwise import embedding_bwd_workspace

pytestmark = pytest.mark.gpu

FP32, BF16 = torch.float32, torch.bfloat16
FLOATS = (FP32, BF16)
CODES = {FP32: DTYPES["fp32"].code, BF16: DTYPES["bf16"].code}
SIZES = cases([7, 4099], more=[1, 8, 1000, 1 << 20])


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from surogate_recipes_bf16 import _C

    return _C


def normal(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "out_dtype"), list(product(FLOATS, FLOATS)))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("skew", [0, 1])
def test_add_is_exact(
    kernels: ModuleType, dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, skew: int, size: int
) -> None:
    if accumulate and out_dtype == BF16:
        pytest.skip("bf16 gradients are never added to")
    a, b = (guarded_copy(normal(size, dtype=dtype), skew=skew) for _ in range(2))
    before = normal(size, dtype=out_dtype)
    out = guarded_copy(before, constant=False, skew=skew) if accumulate else guarded((size,), out_dtype, skew=skew)
    eager_and_graph(
        lambda s: kernels.add(a.pointer, b.pointer, out.pointer, size, accumulate, CODES[dtype], CODES[out_dtype], s),
        [a, b, out],
    )
    expected = reference.add(a.tensor.cpu(), b.tensor.cpu()).to(out_dtype)
    assert same_bits(out.tensor.cpu(), before + expected if accumulate else expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("dtype", "out_dtype"), list(product(FLOATS, FLOATS)))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("skew", [0, 1])
def test_cast_is_exact(
    kernels: ModuleType, dtype: torch.dtype, out_dtype: torch.dtype, accumulate: bool, skew: int, size: int
) -> None:
    if accumulate and out_dtype == BF16:
        pytest.skip("bf16 gradients are never added to")
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-40, 3.3961775e38, 1.00390625, 1.01171875])
    source = normal(size, dtype=FP32, scale=100)
    source[: len(special)] = special[:size]  # largest, subnormal, ties in both directions
    x = guarded_copy(source.to(dtype), skew=skew)
    before = normal(size, dtype=out_dtype)
    y = guarded_copy(before, constant=False, skew=skew) if accumulate else guarded((size,), out_dtype, skew=skew)
    eager_and_graph(
        lambda s: kernels.cast(x.pointer, y.pointer, size, accumulate, CODES[dtype], CODES[out_dtype], s), [x, y]
    )
    expected = x.tensor.cpu().to(out_dtype)
    assert same_bits(y.tensor.cpu(), before + expected if accumulate else expected)


def test_cast_keeps_nan(kernels: ModuleType) -> None:
    for dtype, out_dtype in product(FLOATS, FLOATS):
        x, y = guarded_copy(torch.full((9,), float("nan"), dtype=dtype)), guarded_copy(torch.zeros(9, dtype=out_dtype))
        stream = torch.cuda.current_stream().cuda_stream
        kernels.cast(x.pointer, y.pointer, 9, False, CODES[dtype], CODES[out_dtype], stream)
        assert y.tensor.isnan().all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.1])
def test_fill_writes_the_rounded_value(
    kernels: ModuleType, value: float, dtype: torch.dtype, skew: int, size: int
) -> None:
    out = guarded((size,), dtype, skew=skew)
    eager_and_graph(lambda s: kernels.fill(out.pointer, size, value, CODES[dtype], s), [out])
    assert same_bits(out.tensor.cpu(), torch.full((size,), value, dtype=dtype))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.uint8, BF16, FP32])
@pytest.mark.parametrize("skew", [0, 1])
def test_copy_moves_every_byte(kernels: ModuleType, dtype: torch.dtype, skew: int, size: int) -> None:
    x = guarded_copy(normal(size, dtype=FP32, scale=50).to(dtype), skew=skew)
    y = guarded((size,), dtype, skew=skew)
    eager_and_graph(lambda s: kernels.copy(x.pointer, y.pointer, size * dtype.itemsize, s), [x, y])
    assert same_bits(y.tensor.cpu(), x.tensor.cpu())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("coef", [1.0, 0.0, float("nan"), float("inf")])
def test_commit_writes_unless_the_step_is_skipped(kernels: ModuleType, coef: float, size: int) -> None:
    condition = guarded_copy(torch.tensor(coef))
    pending, before = guarded_copy(normal(size, dtype=FP32)), normal(size, dtype=FP32)
    state = guarded_copy(before, constant=False)
    eager_and_graph(
        lambda s: kernels.commit(condition.pointer, pending.pointer, state.pointer, 4 * size, s),
        [condition, pending, state],
    )
    expected = reference.commit(condition.tensor.cpu(), pending.tensor.cpu(), before)
    assert same_bits(state.tensor.cpu(), expected)


# ------------------------------------------------------------------------------------------------------------- swiglu


def gates(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return gate_up [rows, 2 width] with gates in both tails of the sigmoid."""
    gate_up = normal(rows, 2 * width, dtype=FP32, scale=4)
    gate_up[0, :width] = torch.linspace(-60, 60, width)
    return gate_up.to(dtype)


SWIGLU_SHAPES = cases([(5, 301), (7, 3072), (2049, 64)], more=[(1, 1), (3, 5), (2, 8), (2, 9728), (1, 24576)])


@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
def test_swiglu_matches_fp64(kernels: ModuleType, shape: tuple[int, int], dtype: torch.dtype, skew: int) -> None:
    rows, width = shape
    gate_up = guarded_copy(gates(rows, width, dtype), skew=skew)
    out = guarded(shape, dtype, skew=skew)
    eager_and_graph(lambda s: kernels.swiglu(gate_up.pointer, out.pointer, *shape, CODES[dtype], s), [gate_up, out])
    truth = reference.swiglu(gate_up.tensor.cpu().double())
    assert_close(out.tensor.cpu(), truth, dtype, 1, magnitude=truth.abs())  # a chain of products has a relative error


@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
def test_swiglu_bwd_matches_fp64(kernels: ModuleType, shape: tuple[int, int], dtype: torch.dtype, skew: int) -> None:
    rows, width = shape
    dout = guarded_copy(normal(rows, width, dtype=dtype), skew=skew)
    gate_up = guarded_copy(gates(rows, width, dtype), skew=skew)
    dgate_up = guarded((rows, 2 * width), dtype, skew=skew)
    eager_and_graph(
        lambda s: kernels.swiglu_bwd(dout.pointer, gate_up.pointer, dgate_up.pointer, 0, *shape, CODES[dtype], s),
        [dout, gate_up, dgate_up],
    )
    d, both = dout.tensor.cpu().double(), gate_up.tensor.cpu().double()
    gate, up = both.chunk(2, dim=1)
    sigmoid, complement = torch.sigmoid(gate), torch.sigmoid(-gate)
    # 1 + gate (1 - sigmoid) cancels near gate = -1.28, so the error is relative to its terms.
    dgate, dup = d * up * sigmoid * (1 + gate * complement), d * gate * sigmoid
    size = torch.cat(((d * up * sigmoid).abs() * (1 + (gate * complement).abs()), dup.abs()), dim=1)
    assert_close(dgate_up.tensor.cpu(), torch.cat((dgate, dup), dim=1), dtype, 1, magnitude=size)


@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("in_place", [False, True])
def test_swiglu_bwd_writes_the_bits_of_swiglu_again(
    kernels: ModuleType, shape: tuple[int, int], dtype: torch.dtype, skew: int, in_place: bool
) -> None:
    rows, width = shape
    code = CODES[dtype]
    dout = guarded_copy(normal(rows, width, dtype=dtype), constant=False, skew=skew)
    gate_up = guarded_copy(gates(rows, width, dtype), constant=False, skew=skew)
    out, dgate_up = guarded(shape, dtype, skew=skew), guarded((rows, 2 * width), dtype, skew=skew)
    kernels.swiglu(gate_up.pointer, out.pointer, *shape, code, 0)
    kernels.swiglu_bwd(dout.pointer, gate_up.pointer, dgate_up.pointer, 0, *shape, code, 0)
    again = dout if in_place else guarded(shape, dtype, skew=skew)
    gradient = gate_up if in_place else guarded((rows, 2 * width), dtype, skew=skew)
    kernels.swiglu_bwd(dout.pointer, gate_up.pointer, gradient.pointer, again.pointer, *shape, code, 0)
    torch.cuda.synchronize()
    assert same_bits(again.tensor, out.tensor) and same_bits(gradient.tensor, dgate_up.tensor)
    for buffer in (dout, gate_up, out, dgate_up, again, gradient):
        buffer.check()


@pytest.mark.parametrize("dtype", FLOATS)
def test_swiglu_bwd_may_overwrite_gate_up(kernels: ModuleType, dtype: torch.dtype) -> None:
    rows, width = 7, 3072
    dout, gate_up = guarded_copy(normal(rows, width, dtype=dtype)), guarded_copy(gates(rows, width, dtype))
    expected = guarded((rows, 2 * width), dtype)
    for target in (expected, gate_up):
        kernels.swiglu_bwd(dout.pointer, gate_up.pointer, target.pointer, 0, rows, width, CODES[dtype], 0)
    torch.cuda.synchronize()
    assert same_bits(gate_up.tensor, expected.tensor)


# ---------------------------------------------------------------------------------------------------------- embedding


@pytest.mark.parametrize(
    ("n_tokens", "vocab_size", "columns"), [(1, 1, 1), (37, 11, 24), (300, 50, 1001), (64, 9, 4096)]
)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
def test_embedding_copies_rows(
    kernels: ModuleType, n_tokens: int, vocab_size: int, columns: int, dtype: torch.dtype, skew: int
) -> None:
    tokens = guarded_copy(torch.randint(vocab_size, (n_tokens,), dtype=torch.int32))
    w = guarded_copy(normal(vocab_size, columns, dtype=dtype), skew=skew)
    out = guarded((n_tokens, columns), dtype, skew=skew)
    eager_and_graph(
        lambda s: kernels.embedding(
            tokens.pointer, w.pointer, out.pointer, n_tokens, vocab_size, columns, CODES[dtype], s
        ),
        [tokens, w, out],
    )
    assert same_bits(out.tensor.cpu(), reference.embedding(tokens.tensor.cpu(), w.tensor.cpu()))


@pytest.mark.parametrize("dtype", FLOATS)
def test_embedding_of_a_token_outside_the_vocabulary_is_nan(kernels: ModuleType, dtype: torch.dtype) -> None:
    tokens = guarded_copy(torch.tensor([0, -1, 5, 4, 2**31 - 1], dtype=torch.int32))
    w, out = guarded_copy(normal(5, 16, dtype=dtype)), guarded_copy(torch.zeros(5, 16, dtype=dtype), constant=False)
    eager_and_graph(
        lambda s: kernels.embedding(tokens.pointer, w.pointer, out.pointer, 5, 5, 16, CODES[dtype], s), [tokens, w, out]
    )
    assert out.tensor.isnan().any(1).tolist() == [False, True, True, False, True]


def text(n_tokens: int, vocab_size: int) -> Tensor:
    """Return random tokens distributed as in text: a few are very frequent, most are rare."""
    return (vocab_size * torch.rand(n_tokens) ** 6).to(torch.int32).clamp(max=vocab_size - 1)


EMBEDDING_CASES = {
    "odd": (torch.randint(11, (37,), dtype=torch.int32), 11, 27),
    "all the same": (torch.full((5000,), 3, dtype=torch.int32), 7, 264),
    "all different": (torch.randperm(600).to(torch.int32), 600, 64),
    "outside": (torch.tensor([-1, 2, 5, 2, 4, -100, 2], dtype=torch.int32), 5, 40),
    "one": (torch.tensor([0], dtype=torch.int32), 1, 1),
    "text": (text(3000, 5000), 5000, 512),
    "large": (text(16384, 151936), 151936, 256),
}


@pytest.mark.parametrize("case", cases(list(EMBEDDING_CASES)[:4], more=list(EMBEDDING_CASES)[4:]))
@pytest.mark.parametrize(("dtype", "dw_dtype"), list(product(FLOATS, FLOATS)))
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("skew", [0, 1])
def test_embedding_bwd_sums_rows_in_the_order_of_positions(
    kernels: ModuleType, case: str, dtype: torch.dtype, dw_dtype: torch.dtype, accumulate: bool, skew: int
) -> None:
    if accumulate and dw_dtype == BF16:
        pytest.skip("bf16 gradients are never added to")
    ids, vocab_size, columns = EMBEDDING_CASES[case]
    tokens = guarded_copy(ids)
    dout = guarded_copy(normal(len(ids), columns, dtype=dtype), skew=skew)
    before = normal(vocab_size, columns, dtype=dw_dtype) if accumulate else torch.zeros(vocab_size, columns)
    shape = (vocab_size, columns)
    dw = guarded_copy(before, constant=False, skew=skew) if accumulate else guarded(shape, dw_dtype, skew=skew)
    nbytes = embedding_bwd_workspace(len(ids))
    workspace = guarded((nbytes,), torch.uint8)
    eager_and_graph(
        lambda s: kernels.embedding_bwd(
            *(b.pointer for b in (dout, tokens, dw, workspace)),
            *(nbytes, len(ids), *shape, accumulate, CODES[dtype], CODES[dw_dtype], s),
        ),
        [tokens, dout, dw],
        scratch=[workspace],
    )
    valid = ((ids >= 0) & (ids < vocab_size)).nonzero().flatten()
    used = ids[valid].long()
    terms = dout.tensor.cpu()[valid].double()
    truth = before.double().index_add(0, used, terms)
    size = before.double().abs().index_add(0, used, terms.abs())
    assert_close(dw.tensor.cpu(), truth, dw_dtype, int(used.bincount().max()), magnitude=size)
    rest = torch.ones(vocab_size, dtype=torch.bool).index_fill(0, used, False)
    assert same_bits(dw.tensor.cpu()[rest], before.to(dw_dtype)[rest])


# ------------------------------------------------------------------------------------------------------------- errors


def test_errors_name_the_invalid_argument(kernels: ModuleType) -> None:
    x = guarded((16,), FP32)
    p = x.pointer
    for launch, message in (
        (lambda: kernels.add(0, p, p, 16, False, 0, 0, 0), "add: a is a null pointer"),
        (lambda: kernels.add(p, p, p + 2, 16, False, 0, 0, 0), "add: out must be aligned to 4 bytes"),
        (lambda: kernels.add(p, p, p, 0, False, 0, 0, 0), "add: size must be positive"),
        (lambda: kernels.add(p, p, p, 8, True, 1, 1, 0), "add: only adds to fp32"),
        (lambda: kernels.cast(p, p, 8, False, 3, 0, 0), "cast: x must be fp32 or bf16, not int32"),
        (lambda: kernels.fill(0, 8, 1.0, 0, 0), "fill: out is a null pointer"),
        (lambda: kernels.copy(p, 0, 8, 0), "copy: y is a null pointer"),
        (lambda: kernels.commit(0, p, p, 8, 0), "commit: clip_coef is a null pointer"),
        (lambda: kernels.swiglu(p, p, 1, 0, 0, 0), "swiglu: width must be positive"),
        (lambda: kernels.swiglu_bwd(p, p, 0, 0, 1, 4, 0, 0), "swiglu_bwd: dgate_up is a null pointer"),
        (lambda: kernels.swiglu_bwd(p, p, p, p + 1, 1, 4, 0, 0), "swiglu_bwd: out"),
        (lambda: kernels.embedding(p, p, p, 1, 0, 4, 0, 0), "embedding: vocab_size must be positive"),
        (lambda: kernels.embedding_bwd(p, p, p, p, 0, 1, 1, 1, False, 0, 0, 0), "embedding_bwd: workspace needs"),
    ):
        with pytest.raises(ValueError, match=message):
            launch()
    x.check()
