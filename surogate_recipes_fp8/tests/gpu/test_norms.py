"""RMS norms that quantize, compared with the references in fp64, the bf16 kernels, and a slow twin of the cast."""

from __future__ import annotations

import pytest
import torch
from fp8_twin import codes, quantized, run, scaled, value
from torch import Tensor

from surogate_core.api import DTYPES, Op, Value
from surogate_core.reference import ops as reference
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, guarded, same_bits
from surogate_recipes_fp8.kernels.norms import KERNELS

pytestmark = pytest.mark.gpu

EPS = 1e-6
SCALINGS = ("delayed", "given", "current", "fallback")
COLUMNS = [272, 1040, 2064, 4096, 8208]
"""Sizes of each kernel: rows per warp, rows per group, and rows of which 32 do not fit in shared memory."""
SHAPES = cases(
    [*((80, columns) for columns in COLUMNS), (16, 16), (48, 14544), (1104, 896)],
    more=[(48, 512), (32, 528), (80, 1536), (48, 2048), (64, 2560), (96, 3584), (48, 5120), (16, 7184), (32, 16384)],
)
INITIALISED = torch.tensor([1 / 37.5, 37.5])
EMPTY = torch.zeros(2)


def states(scaling: str, scale: Tensor, amax: Tensor) -> tuple[dict[Value, Tensor], tuple[Value, ...]]:
    """Return the last inputs of an op with their contents, and those that it changes."""
    scale_in, amax_in = value("s", scale), value("amax", amax)
    ins = {
        "delayed": {scale_in: scale, amax_in: amax},
        "given": {scale_in: scale},
        "current": {amax_in: amax},
        "fallback": {scale_in: scale},
    }[scaling]
    return ins, (amax_in,) if amax_in in ins else ()


def check_quantized(out: dict[str, Tensor], x: Tensor, dtype: str, scaling: str, scale: Tensor) -> None:
    """Compare all that an op wrote about `x`, of which q was made."""
    used, raised = scaled(scaling, x, dtype, scale, EMPTY)
    q = quantized(x, used, dtype)
    assert same_bits(codes(out["q"]), q)
    assert "q_t" not in out or same_bits(codes(out["q_t"]), q.T.contiguous())
    assert "amax" not in out or same_bits(out["amax"], raised)
    assert "scale" not in out or same_bits(out["scale"], used)


def forward(
    x: Tensor,
    w: Tensor,
    residual: Tensor | None,
    scaling: str,
    scale: Tensor,
    *,
    transposed: bool,
    wide: bool,
) -> dict[str, Tensor]:
    rows, columns = x.shape
    sources = {value("x", x): x}
    sources |= {} if residual is None else {value("residual_in", residual): residual}
    sources |= {value("w", w): w}
    ins, changed = states(scaling, scale, EMPTY)
    outs = [value("q", x.shape, "e4m3"), *([value("q_t", (columns, rows), "e4m3")] if transposed else [])]
    outs += [*([value("norm", x.shape)] if wide else []), value("rstd", (rows,), "fp32")]
    outs += [] if residual is None else [value("residual", x.shape)]
    outs += [value("scale", (2,), "fp32")] if scaling in ("current", "fallback") else []
    attrs = {"dtype": "e4m3", "scaling": scaling, "transposed": transposed, "wide": wide, "eps": EPS}
    kind = "fp8_rmsnorm" if residual is None else "fp8_add_rmsnorm"
    return run(KERNELS, Op(kind, (*sources, *ins), tuple(outs), attrs), {**sources, **ins}, changed=changed)


def random_rows(*shape: int, mean: float = 0.0) -> Tensor:
    return (mean + torch.randn(shape)).bfloat16()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_norms_quantize_what_they_write_in_bf16(
    shape: tuple[int, int], scaling: str, adds: bool, transposed: bool
) -> None:
    columns = shape[1]
    x, w, residual = random_rows(*shape), random_rows(columns, mean=1), random_rows(*shape) if adds else None
    out = forward(x, w, residual, scaling, INITIALISED, transposed=transposed, wide=True)
    total = x if residual is None else reference.add(x, residual)
    assert not adds or same_bits(out["residual"], total)
    truth, rstd = reference.rmsnorm(total.double(), w.double(), eps=EPS)
    # Squares are positive, so the errors of their sum, of rstd and of norm are relative.
    assert_close(out["rstd"], rstd, torch.float32, columns, magnitude=rstd)
    assert_close(out["norm"], truth, torch.bfloat16, columns, magnitude=truth.abs())
    check_quantized(out, out["norm"], "e4m3", scaling, INITIALISED)

    narrow = forward(x, w, residual, scaling, INITIALISED, transposed=transposed, wide=False)
    assert all(same_bits(narrow[name], out[name]) for name in narrow)


@pytest.mark.parametrize("scaling", ["delayed", "fallback"])
@pytest.mark.parametrize("columns", [528, 4096])
def test_norms_without_an_initialised_scale(scaling: str, columns: int) -> None:
    x, w = random_rows(48, columns), random_rows(columns, mean=1)
    x[3, 5] = torch.inf
    x[20] = 0
    out = forward(x, w, None, scaling, EMPTY, transposed=True, wide=True)
    check_quantized(out, out["norm"], "e4m3", scaling, EMPTY)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(
    ("has_dresidual", "dw_kind", "transposed"),
    [
        *((False, "none", True), (True, "none", False), (True, "none", True)),
        *((False, "written", False), (True, "written", True), (True, "added", True), (True, "bf16", True)),
    ],
)
def test_backward_norms_quantize_dx(
    shape: tuple[int, int], scaling: str, has_dresidual: bool, dw_kind: str, transposed: bool
) -> None:
    rows, columns = shape
    if columns > 16384:
        pytest.skip("longer than a backward row can be")
    dy, x, w = random_rows(*shape), random_rows(*shape), random_rows(columns, mean=1)
    dresidual = random_rows(*shape) if has_dresidual else None
    rstd = x.float().square().mean(1).add(EPS).rsqrt()
    sources = {value("dy", dy): dy, value("x", x): x, value("w", w): w, value("rstd", rstd): rstd}
    sources |= {} if dresidual is None else {value("dresidual", dresidual): dresidual}
    ins, changed = states(scaling, INITIALISED, EMPTY)
    dw = value("dw", (columns,), "bf16" if dw_kind == "bf16" else "fp32")
    copies = [value("q", shape, "e5m2"), *([value("q_t", (columns, rows), "e5m2")] if transposed else [])]
    outs = [*copies, value("dx", shape), *([dw] if dw_kind != "none" else [])]
    outs += [value("scale", (2,), "fp32")] if scaling in ("current", "fallback") else []
    attrs = {"dtype": "e5m2", "scaling": scaling, "transposed": transposed, "residual": has_dresidual}
    kind = "fp8_rmsnorm_dgrad" if dw_kind == "none" else "fp8_rmsnorm_bwd"
    accumulate = frozenset({len(copies) + 1} if dw_kind == "added" else ())
    op = Op(kind, (*sources, *ins), tuple(outs), attrs, accumulate=accumulate)
    before = torch.randn(columns) if dw_kind == "added" else torch.zeros(columns)
    out = run(KERNELS, op, {**sources, **ins, **({dw: before} if dw_kind == "added" else {})}, changed=changed)

    truth_dx, truth_dw = reference.rmsnorm_bwd(*(tensor.double() for tensor in sources.values()))
    d, values, scale, r = (tensor.double() for tensor in (dy, x, w, rstd))
    normed = values * r[:, None]
    terms = (d * scale * normed).abs().mean(1, keepdim=True)
    size = ((d * scale).abs() + normed.abs() * terms) * r[:, None]
    size = size if dresidual is None else size + dresidual.double().abs()
    assert_close(out["dx"], truth_dx, torch.bfloat16, columns, magnitude=size)
    if dw_kind != "none":
        sums = before.abs() + (d * normed).abs().sum(0)
        assert_close(out["dw"], before + truth_dw, out["dw"].dtype, rows, magnitude=sums)
    check_quantized(out, out["dx"], "e5m2", scaling, INITIALISED)


def pointers(*tensors: Tensor | None) -> list[int]:
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("columns", [272, 1024, 1536, 2048, 2560, 3584, 4096, 8208, 16384])
def test_norms_have_the_bits_of_the_bf16_kernels(columns: int) -> None:
    """The residual stream, rstd and dx then do not depend on whether a norm is fused with a quantizer."""
    bf16 = pytest.importorskip("surogate_recipes_bf16._C")
    from surogate_recipes_fp8 import _C

    rows, code, stream = 80, DTYPES["bf16"].code, torch.cuda.current_stream().cuda_stream
    e5m2 = DTYPES["e5m2"].code
    x, residual, dy = (random_rows(rows, columns).cuda() for _ in range(3))
    w = random_rows(columns, mean=1).cuda()
    q, q_t = (guarded((rows * columns,), torch.uint8).tensor for _ in range(2))
    scale = INITIALISED.cuda()
    given = (DTYPES["e4m3"].code, 1, scale.data_ptr(), 0, 0, 0, stream)

    norm, total, norm_8, total_8, dx, dx_8 = (torch.empty_like(x) for _ in range(6))
    rstd, rstd_8 = (torch.empty(rows, device="cuda") for _ in range(2))
    bf16.add_rmsnorm(*pointers(x, residual, w, norm, rstd, total), rows, columns, EPS, 0.0, code, stream)
    _C.fp8_rmsnorm(*pointers(x, residual, w, q, q_t, norm_8, rstd_8, total_8), rows, columns, EPS, *given)
    bf16.rmsnorm_dgrad(*pointers(dy, x, w, rstd, residual, dx, None), rows, columns, 0.0, code, stream)
    tensors = pointers(dy, x, w, rstd, residual, dx_8, None, q, q_t, None)
    _C.fp8_rmsnorm_bwd(*tensors, 0, rows, columns, False, 0, e5m2, *given[1:])
    torch.cuda.synchronize()
    for plain, fused in ((norm, norm_8), (total, total_8), (rstd, rstd_8), (dx, dx_8)):
        assert same_bits(plain, fused)


@pytest.mark.parametrize("columns", [528, 2064, 4096])
@pytest.mark.parametrize("scaling", [1, 2], ids=["given", "current"])
def test_outputs_may_overwrite_inputs(columns: int, scaling: int) -> None:
    """residual by the sum, dy or dresidual by dx."""
    from surogate_recipes_fp8 import _C

    rows, stream = 80, torch.cuda.current_stream().cuda_stream
    x, residual, dy = (random_rows(rows, columns).cuda() for _ in range(3))
    w = random_rows(columns, mean=1).cuda()
    rstd, measured, out = (torch.zeros(size, device="cuda") for size in (rows, 2, 2))
    given = INITIALISED.cuda()
    scale = (DTYPES["e4m3"].code, scaling, *pointers(None if scaling == 2 else given, None, out, measured), stream)

    def forward(total: Tensor, residual: Tensor) -> Tensor:
        q = torch.empty(rows, columns, dtype=torch.uint8, device="cuda")
        _C.fp8_rmsnorm(*pointers(x, residual, w, q, None, None, rstd, total), rows, columns, EPS, *scale)
        torch.cuda.synchronize()
        return q

    def backward(dx: Tensor, dy: Tensor, dresidual: Tensor) -> Tensor:
        q, q_t = (torch.empty(rows * columns, dtype=torch.uint8, device="cuda") for _ in range(2))
        tensors = pointers(dy, x, w, rstd, dresidual, dx, None, q, q_t, None)
        _C.fp8_rmsnorm_bwd(*tensors, 0, rows, columns, False, 0, DTYPES["e5m2"].code, *scale[1:])
        torch.cuda.synchronize()
        return torch.cat((q, q_t))

    apart, together = torch.empty_like(x), residual.clone()
    assert same_bits(forward(apart, residual), forward(together, together))
    assert same_bits(apart, together)
    expected = backward(apart, dy, residual)
    for reused in (dy.clone(), residual.clone()):
        same = same_bits(reused, dy)
        assert same_bits(backward(reused, reused if same else dy, residual if same else reused), expected)
        assert same_bits(reused, apart)


def test_errors_name_the_invalid_argument() -> None:
    from surogate_recipes_fp8 import _C

    p = 256
    given = (5, 1, p, 0, 0, 0, 0)
    for launch, message in (
        (lambda: _C.fp8_rmsnorm(0, 0, p, p, 0, 0, p, 0, 16, 16, EPS, *given), "fp8_rmsnorm: x is a null pointer"),
        (
            lambda: _C.fp8_rmsnorm(p, p, p, p, 0, 0, p, 0, 16, 16, EPS, *given),
            "fp8_add_rmsnorm: residual_out is a null pointer",
        ),
        (
            lambda: _C.fp8_rmsnorm(p, 0, p, p, 0, 0, p, 0, 8, 16, EPS, *given),
            "fp8_rmsnorm: rows must be a multiple of 16, got 8",
        ),
        (
            lambda: _C.fp8_rmsnorm_bwd(p, p, p, p, 0, p, p, p, 0, p, 63, 16, 16, False, 0, *given),
            "fp8_rmsnorm_bwd: workspace needs 64 bytes, got 63",
        ),
        (
            lambda: _C.fp8_rmsnorm_bwd(p, p, p, p, 0, p, 0, p, 0, 0, 0, 16, 16400, False, 0, *given),
            "fp8_rmsnorm_dgrad: columns must not exceed 16384, got 16400",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            launch()
