"""The LM head with cross-entropy, bound through its KernelDef and compared with fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES, Deterministic, Op, Target, Value
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.devices import training_device
from surogate_core.testing.kernels import relative_error
from surogate_recipes_bf16.kernels import gemm, loss

from .test_loss import TORCH, cross_entropy_truth, random_targets

pytestmark = pytest.mark.gpu


def value(name: str, shape: Sequence[int], dtype: str) -> Value:
    return Value(name=name, shape=tuple(shape), dtype=dtype, role="act")


def exact_inputs(tokens: int, d_model: int, vocab_size: int, dtype: str) -> tuple[Tensor, Tensor]:
    """Return x with elements in {-1, 0, 1} and w in {-1, 0, 1} / 16. For d_model <= 256 every logit is exact in bf16.

    Otherwise the rounding of a logit near the midpoint of two bf16 numbers would depend on the order of its sum.
    """
    assert d_model <= 256
    x = torch.randint(-1, 2, (tokens, d_model), device="cuda").to(TORCH[dtype])
    w = (torch.randint(-1, 2, (vocab_size, d_model), device="cuda") / 16).to(TORCH[dtype])
    return x, w


def truth(x: Tensor, w: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, dx and dw in fp64, with logits and dlogits rounded to the dtype of x."""
    logits = (x.double() @ w.double().T).to(x.dtype)
    row_loss, gradient = cross_entropy_truth(logits, targets, scale)
    gradient = gradient.to(x.dtype).double()
    return row_loss.sum() * scale, gradient @ w.double(), gradient.T @ x.double()


def run_head(
    x: Tensor,
    w: Tensor,
    targets: Tensor,
    scale: float,
    *,
    chunks: int,
    dw_dtype: str | None,
    has_dx: bool = False,
    added: float | None = None,
) -> list[Tensor]:
    """Run the op eagerly and captured, and return loss, dx and dw. Loss and dw accumulate into `added` if it is given.

    Without `dw_dtype`, dw is omitted; without `has_dx` too, only the loss is returned.
    """
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[x.dtype]
    outputs = 3 if dw_dtype else 2 if has_dx else 1
    sums = {0, 2} & set(range(outputs))
    ins = (value("x", x.shape, dtype), value("w", w.shape, dtype), value("targets", targets.shape, "int32"))
    ins = (*ins, value("loss_scale", (), "fp32"))
    outs = (value("loss", (), "fp32"), value("dx", x.shape, dtype), value("dw", w.shape, dw_dtype or "fp32"))[:outputs]
    kind, wrt = ("lm_head_ce", {}) if outputs == 1 else ("lm_head_ce_grads", {"wrt": (0, 1)[: outputs - 1]})
    op = Op(kind, ins, outs, {"chunks": chunks} | wrt, accumulate=frozenset() if added is None else frozenset(sums))
    contents = dict(zip(ins, (x, w, targets, torch.tensor(scale)), strict=True))
    if added is not None:
        contents |= {outs[i]: torch.full(outs[i].shape, added, dtype=TORCH[outs[i].dtype]) for i in sums}
    return [out.cuda() for out in run_kernel(loss.KERNELS, op, contents, labels=int((targets >= 0).sum()))]


def check(x: Tensor, w: Tensor, targets: Tensor, results: Sequence[Tensor], scale: float, added: float = 0.0) -> None:
    expected = truth(x, w, targets, scale)
    # The loss has fp32 products and logarithms, summed in fp64.
    assert float(results[0]) == pytest.approx(float(expected[0]) + added, rel=1e-5)
    if len(results) == 1:
        return
    # A dlogit is rounded from an fp32 number with an error of about 1e-6, so about 1e-6 / 2^-9 = 5e-4 of them round to
    # the other bf16 neighbour, 2^-8 away: 2^-8 * sqrt(5e-4) = 1e-4 of the norm. In fp32 the error of 1e-6 itself
    # remains. The rounding of the result adds at most 2^-9 per element, slightly more than half of that in the norm.
    own = 2e-4 if x.dtype == torch.bfloat16 else 5e-6
    assert relative_error(results[1], expected[1]) < own + (2.0**-9 if x.dtype == torch.bfloat16 else 0)
    assert not results[1][targets < 0].any(), "a row without a label has a gradient"
    if len(results) == 2:
        return
    rounding = 2.0**-9 if results[2].dtype == torch.bfloat16 else 0
    assert relative_error(results[2], expected[2] + added) < own + rounding


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dw_dtype", [None, "fp32", "bf16"])
@pytest.mark.parametrize(
    "sizes",
    cases([(64, 64, 1000, 1), (64, 64, 1000, 4), (36, 40, 777, 3), (15, 13, 101, 5)], more=[(512, 256, 151_936, 2)]),
    ids=str,
)
def test_lm_head_matches_fp64(sizes: tuple[int, int, int, int], dw_dtype: str | None, dtype: str) -> None:
    tokens, d_model, vocab_size, chunks = sizes
    x, w = exact_inputs(tokens, d_model, vocab_size, dtype)
    targets, scale = random_targets(tokens, vocab_size), 1 / 64
    check(x, w, targets, run_head(x, w, targets, scale, chunks=chunks, dw_dtype=dw_dtype), scale)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("labels", [1, 17, 64])
@pytest.mark.parametrize("chunks", [1, 4])
def test_without_a_weight_gradient_loss_and_dx_are_the_same(chunks: int, labels: int, dtype: str) -> None:
    """The same kernels run in the same order. Algorithms selected by timing may sum in another order, but all sums are
    exact here except dx. Its fp32 sums of 1,000 terms may differ by about 2^-24 * sqrt(1000) of the norm, or by one
    rounding to bf16."""
    x, w = exact_inputs(64, 64, 1000, dtype)
    targets = random_targets(64, 1000)
    targets[labels:] = -100
    without = run_head(x, w, targets, 1 / 64, chunks=chunks, dw_dtype=None, has_dx=True)
    whole = run_head(x, w, targets, 1 / 64, chunks=chunks, dw_dtype="fp32")
    assert len(without) == 2 and torch.equal(without[0], whole[0])
    assert (without[1].double() - whole[1].double()).norm() <= (2.0**-9 if dtype == "bf16" else 1e-5) * whole[1].norm()
    check(x, w, targets, without, 1 / 64)


def test_the_loss_accumulates_without_gradients() -> None:
    x, w = exact_inputs(64, 64, 1000, "bf16")
    targets = random_targets(64, 1000)
    results = run_head(x, w, targets, 1 / 64, chunks=4, dw_dtype=None, has_dx=True, added=0.5)
    check(x, w, targets, results, 1 / 64, added=0.5)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_lm_head_accumulates_loss_and_weight_gradient(chunks: int, dtype: str) -> None:
    x, w = exact_inputs(64, 64, 1000, dtype)
    targets = random_targets(64, 1000)
    results = run_head(x, w, targets, 1 / 64, chunks=chunks, dw_dtype="fp32", added=0.5)
    check(x, w, targets, results, 1 / 64, added=0.5)
    # Relative to dw, which is small compared with the 0.5 that it is added to; each addition has an error of 2^-25.
    gradient = truth(x, w, targets, 1 / 64)[2]
    typical = float(gradient.square().mean().sqrt())
    assert relative_error(results[2].double() - 0.5, gradient) < 2e-4 + chunks * 2.0**-24 / typical
    (evaluated,) = run_head(x, w, targets, 1 / 64, chunks=chunks, dw_dtype=None, added=0.5)
    check(x, w, targets, [evaluated], 1 / 64, added=0.5)


@pytest.mark.parametrize("labels", [0, 1, 16, 17, 33, 64])
def test_running_only_the_chunks_with_labels_gives_the_same_results(labels: int) -> None:
    """The last chunk that runs may be full, partial or absent."""
    x, w = exact_inputs(64, 64, 1000, "bf16")
    targets = torch.full((64,), -100, dtype=torch.int32)
    targets[torch.randperm(64)[:labels]] = torch.randint(0, 1000, (labels,), dtype=torch.int32)
    targets = targets.cuda()
    results = run_head(x, w, targets, 0.25, chunks=4, dw_dtype="fp32")
    if labels:
        check(x, w, targets, results, 0.25)
    else:
        assert not any(result.any() for result in results)


def test_with_deterministic_true_products_are_not_timed() -> None:
    x, w, dx = value("x", (64, 64), "bf16"), value("w", (1000, 64), "bf16"), value("dx", (64, 64), "bf16")
    targets, scale, total = value("t", (64,), "int32"), value("s", (), "fp32"), value("loss", (), "fp32")
    op = Op(
        "lm_head_ce_grads",
        (x, w, targets, scale),
        (total, dx, value("dw", (1000, 64), "fp32")),
        {"chunks": 4, "wrt": (0, 1)},
    )
    contents = {v: torch.zeros(v.shape, dtype=TORCH.get(v.dtype, torch.int32)) for v in op.ins}

    def algorithms(deterministic: Deterministic) -> str:
        binding = bind_kernel(loss.KERNELS, op, contents, deterministic=deterministic)
        description: str = binding.launches[0].call[0].__self__.describe()
        return description

    assert "TFLOP/s" in algorithms("auto")
    assert "TFLOP/s" not in algorithms("true")
    assert "imported" in algorithms("false")  # those that were timed


@pytest.mark.parametrize(
    "targets, above",
    [("targets", [-1, -1, 16, 32, 48, -1]), ("next_targets", [-1] * 6)],  # the host counts the batch's labels alone
)
def test_a_chunk_runs_if_it_has_at_least_one_label_of_the_batch(targets: str, above: list[int]) -> None:
    x, w, total = value("x", (64, 64), "bf16"), value("w", (1000, 64), "bf16"), value("loss", (), "fp32")
    op = Op("lm_head_ce", (x, w, value(targets, (64,), "int32"), value("s", (), "fp32")), (total,), {"chunks": 4})
    contents = {v: torch.zeros(v.shape, dtype=TORCH.get(v.dtype, torch.int32)) for v in op.ins}
    assert [launch.labels_above for launch in bind_kernel(loss.KERNELS, op, contents).launches] == above


@pytest.mark.parametrize("dw_dtype", [None, "fp32", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_planned_workspace_equals_that_of_the_head(chunks: int, dtype: str, dw_dtype: str | None) -> None:
    from surogate_recipes_bf16 import _C

    x, w, scalar = value("x", (36, 40), dtype), value("w", (777, 40), dtype), value("s", (), "fp32")
    outs = (value("loss", (), "fp32"), value("dx", (36, 40), dtype), value("dw", (777, 40), dw_dtype or "fp32"))
    wrt = (0, 1) if dw_dtype else (0,)
    ins, attrs = (x, w, value("t", (36,), "int32"), scalar), {"chunks": chunks, "wrt": wrt}
    op = Op("lm_head_ce_grads", ins, outs[: 1 + len(wrt)], attrs)
    (kernel,) = [k for k in loss.KERNELS if k.op == op.kind and k.dtypes == tuple(v.dtype for v in (*op.ins, *op.outs))]
    target = Target(training_device())
    codes = (DTYPES[dtype].code, True, DTYPES[dw_dtype].code if dw_dtype else loss.NO_DW)
    needed = _C.lm_head_workspace_bytes(36, 40, 777, chunks, *codes, gemm.library_bytes(target))
    assert kernel.workspace(op, target) == needed
