"""RMS norms and bias gradients, compared with the references in fp64."""

from __future__ import annotations

from itertools import product
from types import ModuleType

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES, Op, Value
from surogate_core.reference import ops as reference
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, eager_and_graph, guarded, guarded_copy, same_bits
from surogate_recipes_bf16.kernels.norms import KERNELS, linear_bgrad_workspace, rmsnorm_bwd_workspace

pytestmark = pytest.mark.gpu

FP32, BF16 = torch.float32, torch.bfloat16
FLOATS = (FP32, BF16)
CODES = {FP32: DTYPES["fp32"].code, BF16: DTYPES["bf16"].code}
EPS = 1e-6

COLUMNS = (5, 264, 520, 1024, 2056, 4096, 8200, 16392)
MORE_COLUMNS = (1, 8, 64, 127, 256, 512, 1000, 2048, 2560, 5120, 8192, 16384)
"""Sizes around the limits of each kernel: rows per warp, rows per block, whole vectors."""
ROWS_AND_SKEW = [(7, 0), (6, 1), pytest.param(1, 0, marks=pytest.mark.exhaustive)]


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from surogate_recipes_bf16 import _C

    return _C


def normal(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (mean + torch.randn(shape)).to(dtype)


@pytest.mark.parametrize("columns", cases([*COLUMNS, 32776], more=[*MORE_COLUMNS, 40000]))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "skew"), ROWS_AND_SKEW)
def test_rmsnorm_matches_fp64(kernels: ModuleType, rows: int, columns: int, dtype: torch.dtype, skew: int) -> None:
    x = guarded_copy(normal(rows, columns, dtype=dtype), skew=skew)
    w = guarded_copy(normal(columns, dtype=dtype, mean=1), skew=skew)
    norm, rstd = guarded((rows, columns), dtype, skew=skew), guarded((rows,), FP32)
    eager_and_graph(
        lambda s: kernels.rmsnorm(*(b.pointer for b in (x, w, norm, rstd)), rows, columns, EPS, 0.0, CODES[dtype], s),
        [x, w, norm, rstd],
    )
    truth, scale = reference.rmsnorm(x.tensor.cpu().double(), w.tensor.cpu().double(), eps=EPS)
    # Squares are positive, so the errors of their sum, of rstd and of norm are relative.
    assert_close(rstd.tensor.cpu(), scale, FP32, columns, magnitude=scale)
    assert_close(norm.tensor.cpu(), truth, dtype, columns, magnitude=truth.abs())


@pytest.mark.parametrize("columns", cases(COLUMNS, more=MORE_COLUMNS))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "skew"), ROWS_AND_SKEW)
def test_add_rmsnorm_is_the_norm_of_the_rounded_sum(
    kernels: ModuleType, rows: int, columns: int, dtype: torch.dtype, skew: int
) -> None:
    x, residual = (guarded_copy(normal(rows, columns, dtype=dtype), skew=skew) for _ in range(2))
    w = guarded_copy(normal(columns, dtype=dtype, mean=1), skew=skew)
    norm, total = (guarded((rows, columns), dtype, skew=skew) for _ in range(2))
    rstd = guarded((rows,), FP32)
    eager_and_graph(
        lambda s: kernels.add_rmsnorm(
            *(b.pointer for b in (x, residual, w, norm, rstd, total)), rows, columns, EPS, 0.0, CODES[dtype], s
        ),
        [x, residual, w, norm, rstd, total],
    )
    assert same_bits(total.tensor.cpu(), reference.add(x.tensor.cpu(), residual.tensor.cpu()))
    alone, alone_rstd = guarded((rows, columns), dtype, skew=skew), guarded((rows,), FP32)
    stream = torch.cuda.current_stream().cuda_stream
    kernels.rmsnorm(
        *(b.pointer for b in (total, w, alone, alone_rstd)), rows, columns, EPS, 0.0, CODES[dtype], stream
    )  # as recomputation does
    assert same_bits(alone.tensor, norm.tensor) and same_bits(alone_rstd.tensor, rstd.tensor)
    truth, scale = reference.rmsnorm(total.tensor.cpu().double(), w.tensor.cpu().double(), eps=EPS)
    assert_close(rstd.tensor.cpu(), scale, FP32, columns, magnitude=scale)
    assert_close(norm.tensor.cpu(), truth, dtype, columns, magnitude=truth.abs())


@pytest.mark.parametrize(
    "shape",
    cases(
        [*product([7], COLUMNS), (5000, 40)],
        more=[
            *product([1], COLUMNS),
            *product([1, 7], MORE_COLUMNS),
            *((1500, 256), (1100, 1024), (700, 2560)),
        ],
    ),
    ids=str,
)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("has_dresidual", [False, True])
@pytest.mark.parametrize("dw_kind", ["fp32", "fp32 added", "bf16"])
def test_rmsnorm_bwd_matches_fp64(
    kernels: ModuleType, shape: tuple[int, int], dtype: torch.dtype, skew: int, has_dresidual: bool, dw_kind: str
) -> None:
    rows, columns = shape
    dy, x = (guarded_copy(normal(*shape, dtype=dtype), skew=skew) for _ in range(2))
    rest = [guarded_copy(normal(*shape, dtype=dtype), skew=skew)] if has_dresidual else []
    w = guarded_copy(normal(columns, dtype=dtype, mean=1), skew=skew)
    rstd = guarded_copy(x.tensor.float().square().mean(1).add(EPS).rsqrt().cpu())
    dx = guarded(shape, dtype, skew=skew)
    dw_dtype, accumulate = BF16 if dw_kind == "bf16" else FP32, dw_kind == "fp32 added"
    before = normal(columns, dtype=FP32) if accumulate else torch.zeros(columns)
    dw = guarded_copy(before, constant=False) if accumulate else guarded((columns,), dw_dtype)
    nbytes = rmsnorm_bwd_workspace(*shape)
    workspace = guarded((nbytes,), torch.uint8)
    eager_and_graph(
        lambda s: kernels.rmsnorm_bwd(
            *(b.pointer for b in (dy, x, w, rstd)),
            rest[0].pointer if rest else 0,
            *(dx.pointer, dw.pointer, 0, workspace.pointer),
            *(nbytes, *shape, 0.0, accumulate, CODES[dtype], CODES[dw_dtype], s),
        ),
        [dy, x, w, rstd, *rest, dx, dw],
        scratch=[workspace],
    )
    dx_alone, in_place = guarded(shape, dtype, skew=skew), guarded_copy(dy.tensor, constant=False, skew=skew)
    for source, target in ((dy, dx_alone), (in_place, in_place)):
        eager_and_graph(
            lambda s, source=source, target=target: kernels.rmsnorm_dgrad(  # type: ignore[misc]
                *(b.pointer for b in (source, x, w, rstd)),
                rest[0].pointer if rest else 0,
                *(target.pointer, 0, *shape, 0.0, CODES[dtype], s),
            ),
            [x, w, rstd, *rest, target],
        )
    assert same_bits(in_place.tensor, dx_alone.tensor)
    ins = [b.tensor.cpu().double() for b in (dy, x, w, rstd, *rest)]
    truth_dx, truth_dw = reference.rmsnorm_bwd(*ins)
    d, values, scale, r = ins[:4]
    normed = values * r[:, None]
    terms = (d * scale * normed).abs().mean(1, keepdim=True)
    size = ((d * scale).abs() + normed.abs() * terms) * r[:, None] + (ins[4].abs() if rest else 0)
    for out in (dx, dx_alone):
        assert_close(out.tensor.cpu(), truth_dx, dtype, columns, magnitude=size)
    assert_close(dw.tensor.cpu(), before + truth_dw, dw_dtype, rows, magnitude=before.abs() + (d * normed).abs().sum(0))


@pytest.mark.parametrize("columns", cases([*COLUMNS, 32776], more=[*MORE_COLUMNS, 40000]))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "skew"), ROWS_AND_SKEW)
@pytest.mark.parametrize("has_dresidual", [False, True])
def test_the_backward_pass_writes_the_bits_of_the_norm_again(
    kernels: ModuleType, rows: int, columns: int, dtype: torch.dtype, skew: int, has_dresidual: bool
) -> None:
    """And those of its own outputs do not change; `rmsnorm_dgrad` may write dx over dy and the norm over x."""
    shape, code = (rows, columns), CODES[dtype]
    dy, x = (guarded_copy(normal(*shape, dtype=dtype), constant=False, skew=skew) for _ in range(2))
    rest = guarded_copy(normal(*shape, dtype=dtype), skew=skew).pointer if has_dresidual else 0
    w = guarded_copy(normal(columns, dtype=dtype, mean=1), skew=skew)
    norm, dx, dx_again, norm_again = (guarded(shape, dtype, skew=skew) for _ in range(4))
    rstd, dw, dw_again = (guarded((size,), FP32) for size in (rows, columns, columns))
    nbytes = rmsnorm_bwd_workspace(*shape)
    workspace = guarded((nbytes,), torch.uint8)
    kernels.rmsnorm(x.pointer, w.pointer, norm.pointer, rstd.pointer, *shape, EPS, 0.0, code, 0)
    given = (*(b.pointer for b in (dy, x, w, rstd)), rest)
    for out, dweight, pointer in ((dx, dw, 0), (dx_again, dw_again, norm_again.pointer)):
        scratch = (workspace.pointer, nbytes)
        kernels.rmsnorm_bwd(
            *given, out.pointer, dweight.pointer, pointer, *scratch, *shape, 0.0, False, code, CODES[FP32], 0
        )
    torch.cuda.synchronize()
    assert same_bits(norm_again.tensor, norm.tensor)
    assert same_bits(dx_again.tensor, dx.tensor) and same_bits(dw_again.tensor, dw.tensor)
    kernels.rmsnorm_dgrad(*given, dx.pointer, 0, *shape, 0.0, code, 0)
    kernels.rmsnorm_dgrad(*given, dy.pointer, x.pointer, *shape, 0.0, code, 0)
    torch.cuda.synchronize()
    assert same_bits(x.tensor, norm.tensor) and same_bits(dy.tensor, dx.tensor)
    for buffer in (dy, x, w, rstd, norm, dx, dx_again, norm_again, dw, dw_again):
        buffer.check()


@pytest.mark.parametrize("columns", [5, 264, 1024, 4096, 40000])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_norms_with_an_offset_are_those_of_the_sum_of_weight_and_offset(columns: int, dtype: str) -> None:
    """The kernels add in fp32: a bf16 weight near 0 keeps all its bits beside an offset of 1."""
    kind, rows = TORCH_DTYPES[dtype], 6
    dy, x, residual = (normal(rows, columns, dtype=kind) for _ in range(3))
    w = (0.1 * normal(columns, dtype=kind)).to(kind)
    rstd = x.float().square().mean(1).add(EPS).rsqrt()
    shapes = {"w": (columns,), "rstd": (rows,), "dw": (columns,)}

    def value(name: str) -> Value:
        wide = name in ("rstd", "dw")
        return Value(name, shapes.get(name, (rows, columns)), "fp32" if wide else dtype, "act")

    contents = {"dy": dy, "x": x, "residual": residual, "w": w, "rstd": rstd}
    for op_kind, ins, outs in (
        ("rmsnorm", ("x", "w"), ("norm", "rstd")),
        ("add_rmsnorm", ("x", "residual", "w"), ("norm", "rstd", "total")),
        ("rmsnorm_bwd_recompute", ("dy", "x", "w", "rstd"), ("dx", "dw", "norm")),
        ("rmsnorm_dgrad_recompute", ("dy", "x", "w", "rstd"), ("dx", "norm")),
    ):
        attrs = {"offset": 1.0} | ({} if "rstd" in ins else {"eps": EPS})
        op = Op(op_kind, tuple(map(value, ins)), tuple(map(value, outs)), attrs)
        results = run_kernel(KERNELS, op, {v: contents[v.name] for v in op.ins})
        if op_kind == "add_rmsnorm":  # the norm of the rounded sum, which fp64 would not round
            total = (x.float() + residual.float()).to(kind).double()
            truths = (*reference.rmsnorm(total, w.double(), **attrs), total)
        else:
            truths = getattr(reference, op_kind)(*(contents[name].double() for name in ins), **attrs)
        for result, truth in zip(results, truths, strict=True):
            assert_close(result, truth, result.dtype, columns, 5 * float(truth.abs().max()))


@pytest.mark.parametrize("rows", cases([65, 1000], more=[1, 63, 64, 9001]))
@pytest.mark.parametrize("columns", cases([7, 1000], more=[1, 64, 6144]))
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("kind", ["fp32", "fp32 added", "bf16"])
def test_linear_bgrad_matches_fp64(
    kernels: ModuleType, rows: int, columns: int, dtype: torch.dtype, skew: int, kind: str
) -> None:
    dy = guarded_copy(normal(rows, columns, dtype=dtype), skew=skew)
    out_dtype, accumulate = BF16 if kind == "bf16" else FP32, kind == "fp32 added"
    before = normal(columns, dtype=FP32) if accumulate else torch.zeros(columns)
    dbias = guarded_copy(before, constant=False) if accumulate else guarded((columns,), out_dtype)
    nbytes = linear_bgrad_workspace(rows, columns)
    workspace = guarded((nbytes,), torch.uint8)
    eager_and_graph(
        lambda s: kernels.linear_bgrad(
            *(b.pointer for b in (dy, dbias, workspace)),
            *(nbytes, rows, columns, accumulate, CODES[dtype], CODES[out_dtype], s),
        ),
        [dy, dbias],
        scratch=[workspace],
    )
    terms = dy.tensor.cpu().double()
    size = before.abs() + terms.abs().sum(0)
    assert_close(dbias.tensor.cpu(), before + terms.sum(0), out_dtype, rows, magnitude=size)


def test_errors_name_the_invalid_argument(kernels: ModuleType) -> None:
    x = guarded((64,), FP32)
    p = x.pointer
    for launch, message in (
        (lambda: kernels.rmsnorm(0, p, p, p, 1, 8, EPS, 0.0, 0, 0), "rmsnorm: x is a null pointer"),
        (lambda: kernels.rmsnorm(p, p, p, p + 2, 1, 8, EPS, 0.0, 0, 0), "rmsnorm: rstd must be aligned to 4 bytes"),
        (lambda: kernels.rmsnorm(p, p, p, p, 1, 8, EPS, 0.0, 2, 0), "rmsnorm: x must be fp32 or bf16, not fp64"),
        (
            lambda: kernels.add_rmsnorm(p, p, p, p, p, 0, 1, 8, EPS, 0.0, 0, 0),
            "add_rmsnorm: residual_out is a null pointer",
        ),
        (
            lambda: kernels.rmsnorm_bwd(*[p] * 9, 31, 1, 8, 0.0, False, 0, 0, 0),
            "rmsnorm_bwd: workspace needs 32 bytes, got 31",
        ),
        (lambda: kernels.rmsnorm_bwd(*[p] * 9, 32, 1, 8, 0.0, True, 1, 1, 0), "rmsnorm_bwd: only adds to fp32 outputs"),
        (
            lambda: kernels.rmsnorm_dgrad(*[p] * 6, p + 2, 1, 8, 0.0, 0, 0),
            "rmsnorm_dgrad: norm must be aligned to 4 bytes",
        ),
        (lambda: kernels.linear_bgrad(p, p, p, 31, 1, 8, False, 0, 0, 0), "linear_bgrad: workspace needs 32 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            launch()
    x.check()
