"""Kernels of a norm, an addition and a norm in one, compared with the separate kernels and with fp64."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES, Op, Value
from surogate_core.reference.ops import rmsnorm_bwd
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.kernels import assert_close, eager_and_graph, guarded, guarded_copy, same_bits
from surogate_models_gemma.kernels import KERNELS, norms_bwd_workspace
from surogate_recipes_bf16.kernels.norms import KERNELS as SEPARATE

pytestmark = pytest.mark.gpu

EPS, OFFSET = 1e-6, 1.0
ATTRS = {"eps": EPS, "offset": OFFSET}
COLUMNS = (5, 264, 1152, 2560, 4104, 5376, 8200, 33_000)
"""Sizes around the limits: of a warp per row, of one vector a thread, of two, of rows in registers."""


@pytest.fixture(scope="module")
def compiled() -> ModuleType:
    from surogate_models_gemma import _C

    return _C


def normal(*shape: int, dtype: str, size: float = 1.0) -> Tensor:
    return (size * torch.randn(shape)).to(TORCH_DTYPES[dtype])


def run(
    kind: str, ins: dict[str, Tensor], outs: dict[str, tuple[str, tuple[int, ...]]], skew: int, separate: bool = False
) -> list[Tensor]:
    """Run an op. ins: contents by name; outs: dtype and shape by name."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16"}
    given = {Value(name, tuple(x.shape), names[x.dtype], "act"): x for name, x in ins.items()}
    results = tuple(Value(name, shape, dtype, "act") for name, (dtype, shape) in outs.items())
    attrs = {"offset": OFFSET} if kind.startswith("rmsnorm_bwd") else ATTRS
    return [*run_kernel(SEPARATE if separate else KERNELS, Op(kind, tuple(given), results, attrs), given, skew=skew)]


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("skew", [0, 1])
def test_the_forward_pass_has_the_bits_of_the_separate_kernels(columns: int, dtype: str, skew: int) -> None:
    shape = (6, columns)
    y, residual = (normal(*shape, dtype=dtype) for _ in range(2))
    post_w, w = (normal(columns, dtype=dtype, size=0.1) for _ in range(2))
    norm, rstd, total = ("norm", (dtype, shape)), ("rstd", ("fp32", shape[:1])), ("total", (dtype, shape))
    (mixed, _) = run("rmsnorm", {"y": y, "post_w": post_w}, dict([norm, rstd]), skew, separate=True)
    apart = {"x": mixed, "residual": residual, "w": w}
    truth = run("add_rmsnorm", apart, dict([norm, rstd, total]), skew, separate=True)
    ins = {"y": y, "residual": residual, "post_w": post_w, "w": w}
    found = run("norm_add_rmsnorm", ins, dict([norm, rstd, total]), skew)
    assert all(same_bits(a, b) for a, b in zip(found, truth, strict=True))
    (again, _) = run("rmsnorm", {"total": found[2], "w": w}, dict([norm, rstd]), skew, separate=True)
    assert same_bits(again, found[0])  # which is how recomputation computes it


@pytest.mark.parametrize(("rows", "columns"), [*((7, columns) for columns in COLUMNS[:-1]), (600, 40)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize("has_dtotal", [False, True])
def test_the_backward_pass_matches_fp64(rows: int, columns: int, dtype: str, skew: int, has_dtotal: bool) -> None:
    """The second norm's is compared given the rounded gradient of the first, of which it is a function."""
    shape, kind = (rows, columns), TORCH_DTYPES[dtype]
    dnorm, total, y, dtotal = (normal(*shape, dtype=dtype) for _ in range(4))
    w, post_w = (normal(columns, dtype=dtype, size=0.1) for _ in range(2))
    norm = {"norm": (dtype, shape)}
    normed, rstd = run("rmsnorm", {"x": total, "w": w}, norm | {"rstd": ("fp32", shape[:1])}, skew, separate=True)
    post_rstd = y.float().square().mean(1).add(EPS).rsqrt()
    ins = {"dnorm": dnorm, "total": total, "w": w, "rstd": rstd, "y": y, "post_w": post_w}
    ins |= {"dtotal": dtotal} if has_dtotal else {}
    outs = {"dx": (dtype, shape), "dy": (dtype, shape)}
    weights = {"dw": ("fp32", (columns,)), "dpost_w": ("bf16", (columns,))}
    found = run("norm_add_rmsnorm_bwd", ins, outs | weights, skew)
    dx, dy, dw, dpost_w = found
    for d, x, scale, r, rest, results in (
        (dnorm, total, w, rstd, dtotal if has_dtotal else None, (dx, dw)),
        (dx, y, post_w, post_rstd, None, (dy, dpost_w)),
    ):
        wide = [t.double() for t in (d, x, scale, r)]
        others = [] if rest is None else [rest.double()]
        truths = rmsnorm_bwd(*wide, *others, offset=OFFSET)
        centred, factor = wide[1] * wide[3][:, None], wide[2] + OFFSET
        terms = (wide[0] * factor * centred).abs().mean(1, keepdim=True)
        size = ((wide[0] * factor).abs() + centred.abs() * terms) * wide[3][:, None]
        size = size + others[0].abs() if others else size
        assert_close(results[0], truths[0], kind, columns, magnitude=size)
        assert_close(results[1], truths[1], results[1].dtype, rows, magnitude=(wide[0] * centred).abs().sum(0))
    # Forms of the op that compute more or less have the same bits.
    more = run("norm_add_rmsnorm_bwd_recompute", ins, outs | weights | norm, skew)
    assert all(same_bits(a, b) for a, b in zip(more[:4], found, strict=True))
    less = run("norm_add_rmsnorm_dgrad_recompute", ins, outs | norm, skew)
    assert same_bits(less[0], dx) and same_bits(less[1], dy) and same_bits(less[2], more[4])
    assert all(same_bits(a, b) for a, b in zip(run("norm_add_rmsnorm_dgrad", ins, outs, skew), (dx, dy), strict=True))
    assert same_bits(more[4], normed)


@pytest.mark.parametrize("columns", [5, 2560, 4104, 8200])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_may_be_written_over_what_they_are_of(compiled: ModuleType, columns: int, dtype: str) -> None:
    """And those of weights are added to."""
    rows, code, shape = 300, DTYPES[dtype].code, (300, columns)
    dnorm, total, y, dtotal = (normal(*shape, dtype=dtype) for _ in range(4))
    total, dtotal, w, post_w = (
        guarded_copy(x) for x in (total, dtotal, normal(columns, dtype=dtype), normal(columns, dtype=dtype))
    )
    rstd = guarded_copy(total.tensor.float().square().mean(1).add(EPS).rsqrt())
    nbytes = norms_bwd_workspace(*shape)
    workspace = guarded((nbytes,), torch.uint8)
    results = []
    for in_place in (False, True):
        d, values = (guarded_copy(x, constant=not in_place) for x in (dnorm, y))
        dx, dy = (d, values) if in_place else (guarded(shape, TORCH_DTYPES[dtype]) for _ in range(2))
        sums = [guarded_copy(torch.ones(columns), constant=False) for _ in range(2)]
        eager_and_graph(
            lambda s, d=d, values=values, dx=dx, dy=dy, sums=sums: compiled.norm_add_rmsnorm_bwd(  # type: ignore[misc]
                *(b.pointer for b in (d, total, w, rstd, values, post_w, dtotal, dx, dy, *sums)),
                *(0, workspace.pointer, nbytes, *shape, EPS, OFFSET, True, True, code, 0, 0, s),
            ),
            [*dict.fromkeys((d, total, w, rstd, values, post_w, dtotal, dx, dy, *sums))],
            scratch=[workspace],
        )
        results.append([b.tensor for b in (dx, dy, *sums)])
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    normed = total.tensor.double() * rstd.tensor.double()[:, None]
    terms = dnorm.to(normed.device).double() * normed
    assert_close(results[0][2].cpu(), (1 + terms.sum(0)).cpu(), torch.float32, rows, (1 + terms.abs().sum(0)).cpu())


def test_errors_name_the_invalid_argument(compiled: ModuleType) -> None:
    p = guarded((64,), torch.float32).pointer
    sizes = (1, 8, EPS, 0.0)
    for launch, message in (
        (lambda: compiled.norm_add_rmsnorm(0, *[p] * 6, *sizes, 0, 0), "norm_add_rmsnorm: pointer 1 is a null pointer"),
        (
            lambda: compiled.norm_add_rmsnorm(*[p] * 7, *sizes, 2, 0),
            "y must be fp32 or bf16, not fp64",
        ),
        (
            lambda: compiled.norm_add_rmsnorm_bwd(*[p] * 13, 63, *sizes, False, False, 0, 0, 0, 0),
            "norm_add_rmsnorm_bwd: workspace needs 64 bytes, got 63",
        ),
        (
            lambda: compiled.norm_add_rmsnorm_bwd(*[p] * 13, 64, *sizes, False, True, 0, 0, 1, 0),
            "norm_add_rmsnorm_bwd: only adds to fp32 outputs",
        ),
        (
            lambda: compiled.norm_add_rmsnorm_dgrad(*[p] * 9, p + 2, *sizes, 0, 0),
            "norm_add_rmsnorm_dgrad: norm must be aligned to 4 bytes",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            launch()
