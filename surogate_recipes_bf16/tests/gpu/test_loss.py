"""Cross-entropy kernels, and the LM head through its kernels' own binding, against fp64."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.program.value import DTYPE_CODES
from surogate_core.runtime.device import training_device
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.kernels import (
    assert_close,
    eager_and_graph,
    guarded,
    guarded_copy,
    relative_error,
    same_bits,
)
from surogate_recipes_bf16.kernels import gemm, loss

pytestmark = pytest.mark.gpu

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}

# ------------------------------------------------------------------------------------------------------------ kernels


def random_targets(rows: int, vocab_size: int) -> Tensor:
    """Labels of which about a third are missing; the first and the last entry of the vocabulary occur."""
    targets = torch.randint(0, vocab_size, (rows,), dtype=torch.int32)
    targets[torch.rand(rows) < 0.3] = -100
    targets[0] = vocab_size - 1
    if rows > 1:
        targets[1] = 0
    return targets.cuda()


def padded_logits(rows: int, vocab_size: int, dtype: torch.dtype, spread: float) -> Tensor:
    """Random logits whose rows are padded with 123 to a multiple of 64."""
    width = -(-vocab_size // 64) * 64
    logits = torch.full((rows, width), 123.0, device="cuda")
    logits[:, :vocab_size] = torch.randn(rows, vocab_size, device="cuda") * spread
    return logits.to(dtype)


def cross_entropy_truth(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Loss of every row and gradient of its logits, in fp64."""
    labelled = targets >= 0
    labels = targets.clamp(min=0).long()[:, None]
    log_probs = logits.double().log_softmax(-1)
    row_loss = -log_probs.gather(1, labels)[:, 0] * labelled
    gradient = log_probs.exp().scatter_add(1, labels, -torch.ones_like(row_loss)[:, None])
    return row_loss, gradient * labelled[:, None] * scale


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize("shape", [(5, 1), (3, 7), (9, 64), (4, 777), (3, 4099), (6, 151936)], ids=str)
def test_cross_entropy_matches_fp64(shape: tuple[int, int], spread: float, dtype: str) -> None:
    from surogate_recipes_bf16 import _C

    rows, vocab_size = shape
    start = padded_logits(rows, vocab_size, TORCH[dtype], spread)
    targets = guarded_copy(random_targets(rows, vocab_size))
    scale = guarded_copy(torch.tensor(0.37, device="cuda"))
    sizes = (rows, vocab_size, start.shape[1], DTYPE_CODES[dtype])
    row_loss, gradient = cross_entropy_truth(start[:, :vocab_size], targets.tensor, float(scale.tensor))

    logits, losses = guarded_copy(start), guarded((rows,), torch.float32)
    eager_and_graph(
        lambda stream: _C.cross_entropy(logits.pointer, targets.pointer, losses.pointer, *sizes, stream),
        [logits, targets, losses],
    )
    # A logarithm of a sum of `vocab_size` terms, minus a difference of logits: errors are of the size of 1 + the loss.
    assert_close(losses.tensor, row_loss, torch.float32, vocab_size, 1 + row_loss)

    logits, losses = guarded_copy(start, constant=False), guarded((rows,), torch.float32)
    eager_and_graph(
        lambda stream: _C.cross_entropy_grads(
            logits.pointer, targets.pointer, scale.pointer, losses.pointer, *sizes, stream
        ),
        [logits, targets, scale, losses],
    )
    assert_close(losses.tensor, row_loss, torch.float32, vocab_size, 1 + row_loss)
    # (x - max) - log(sum) is rounded at the size of the largest difference, and becomes a relative error of exp(...).
    # The sum is off by the roundings of what one thread adds. Below 1e-30 the spacing of subnormals takes over.
    valid = start[:, :vocab_size].double()
    span = float((valid.max() - valid.min()).clamp(min=1))
    magnitude = 0.37 * span * valid.softmax(-1) + 1e-30
    assert_close(logits.tensor[:, :vocab_size], gradient, TORCH[dtype], 1 + vocab_size // 512, magnitude)
    assert (logits.tensor[:, vocab_size:] == start[:, vocab_size:]).all(), "the padding was written"
    assert not logits.tensor[targets.tensor < 0, :vocab_size].any(), "a row without a label has a gradient"


def test_minus_infinity_counts_as_nothing_and_errors_stay_visible() -> None:
    from surogate_recipes_bf16 import _C

    start = torch.randn(4, 128, device="cuda")
    start[0, ::2] = float("-inf")
    start[1, 5] = float("nan")
    start[2, 7] = float("inf")
    targets = torch.tensor([1, 3, 3, 128], dtype=torch.int32, device="cuda")  # the last is beyond the vocabulary
    logits, losses = start.clone(), torch.empty(4, device="cuda")
    scale = torch.ones((), device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    _C.cross_entropy_grads(
        *(t.data_ptr() for t in (logits, targets, scale, losses)), *start.shape, 128, DTYPE_CODES["fp32"], stream
    )
    expected = -start[0].double().log_softmax(-1)[1]
    assert_close(losses[:1], expected[None], torch.float32, 128, 10.0)
    assert not logits[0, ::2].any()
    assert losses[1:].isnan().all()


@pytest.mark.parametrize("rows", [1, 31, 1024, 100_003])
@pytest.mark.parametrize("added", [None, 2.5])
def test_sum_of_losses(added: float | None, rows: int) -> None:
    from surogate_recipes_bf16 import _C

    row_loss = guarded_copy(torch.rand(rows, device="cuda") * 10)
    scale = guarded_copy(torch.tensor(1 / 777, device="cuda"))
    total = guarded_copy(torch.full((), float("nan") if added is None else added, device="cuda"), constant=False)
    truth = row_loss.tensor.double().sum() * scale.tensor.double() + (added or 0)
    eager_and_graph(
        lambda stream: _C.sum_loss(row_loss.pointer, scale.pointer, total.pointer, rows, added is not None, stream),
        [row_loss, scale, total],
    )
    assert_close(total.tensor, truth, torch.float32, length=1)  # summed in fp64


# ------------------------------------------------------------------------------------------------------------ LM head


def value(name: str, shape: Sequence[int], dtype: str) -> Value:
    return Value(name=name, shape=tuple(shape), dtype=dtype, role="act")


def exact_inputs(tokens: int, d_model: int, vocab_size: int, dtype: str) -> tuple[Tensor, Tensor]:
    """x of {-1, 0, 1} and w of {-1, 0, 1} / 16: for d_model <= 256 every logit is exact, in bf16 too.

    A logit at the border of two bf16 numbers would round either way, depending on the order of its sum.
    """
    assert d_model <= 256
    x = torch.randint(-1, 2, (tokens, d_model), device="cuda").to(TORCH[dtype])
    w = (torch.randint(-1, 2, (vocab_size, d_model), device="cuda") / 16).to(TORCH[dtype])
    return x, w


def truth(x: Tensor, w: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dx and dw in fp64, with logits and dlogits rounded to the dtype of x."""
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
    added: float | None = None,
) -> list[Tensor]:
    """loss, dx, dw (loss alone without `dw_dtype`), eager and captured; loss and dw add to `added` if there is one."""
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16"}[x.dtype]
    kind, sums = ("lm_head_ce", {0}) if dw_dtype is None else ("lm_head_ce_grads", {0, 2})
    ins = (value("x", x.shape, dtype), value("w", w.shape, dtype), value("targets", targets.shape, "int32"))
    ins = (*ins, value("loss_scale", (), "fp32"))
    outs = [value("loss", (), "fp32")]
    if dw_dtype is not None:
        outs += [value("dx", x.shape, dtype), value("dw", w.shape, dw_dtype)]
    op = Op(kind, ins, tuple(outs), {"chunks": chunks}, accumulate=frozenset() if added is None else frozenset(sums))
    contents = dict(zip(ins, (x, w, targets, torch.tensor(scale)), strict=True))
    if added is not None:
        contents |= {outs[i]: torch.full(outs[i].shape, added, dtype=TORCH[outs[i].dtype]) for i in sums}
    return [out.cuda() for out in run_kernel(loss.KERNELS, op, contents, labels=int((targets >= 0).sum()))]


def check(x: Tensor, w: Tensor, targets: Tensor, results: Sequence[Tensor], scale: float, added: float = 0.0) -> None:
    expected = truth(x, w, targets, scale)
    # The loss: fp32 products and logarithms, summed in fp64.
    assert float(results[0]) == pytest.approx(float(expected[0]) + added, rel=1e-5)
    if len(results) == 1:
        return
    # A dlogit is rounded from an fp32 number that is off by about 1e-6, so about 1e-6 / 2^-9 = 5e-4 of them take the
    # other bf16 neighbour, 2^-8 away: 2^-8 * sqrt(5e-4) = 1e-4 of the norm. In fp32 the error itself counts.
    # Beside it the rounding of the result: 2^-9 at most, a bit more than half of that in the norm.
    own = 2e-4 if x.dtype == torch.bfloat16 else 5e-6
    assert relative_error(results[1], expected[1]) < own + (2.0**-9 if x.dtype == torch.bfloat16 else 0)
    rounding = 2.0**-9 if results[2].dtype == torch.bfloat16 else 0
    assert relative_error(results[2], expected[2] + added) < own + rounding
    assert not results[1][targets < 0].any(), "a row without a label has a gradient"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dw_dtype", [None, "fp32", "bf16"])
@pytest.mark.parametrize(
    ("tokens", "d_model", "vocab_size", "chunks"),
    [(64, 64, 1000, 1), (64, 64, 1000, 4), (36, 40, 777, 3), (15, 13, 101, 5), (512, 256, 151_936, 2)],
)
def test_lm_head_matches_fp64(
    tokens: int, d_model: int, vocab_size: int, chunks: int, dw_dtype: str | None, dtype: str
) -> None:
    x, w = exact_inputs(tokens, d_model, vocab_size, dtype)
    targets, scale = random_targets(tokens, vocab_size), 1 / 64
    check(x, w, targets, run_head(x, w, targets, scale, chunks=chunks, dw_dtype=dw_dtype), scale)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("chunks", [1, 4])
def test_lm_head_adds_loss_and_weight_gradient(chunks: int, dtype: str) -> None:
    x, w = exact_inputs(64, 64, 1000, dtype)
    targets = random_targets(64, 1000)
    results = run_head(x, w, targets, 1 / 64, chunks=chunks, dw_dtype="fp32", added=0.5)
    check(x, w, targets, results, 1 / 64, added=0.5)
    # Relative to dw itself, which is small beside the 0.5 that it was added to: each addition keeps it to 2^-25.
    gradient = truth(x, w, targets, 1 / 64)[2]
    typical = float(gradient.square().mean().sqrt())
    assert relative_error(results[2].double() - 0.5, gradient) < 2e-4 + chunks * 2.0**-24 / typical
    (evaluated,) = run_head(x, w, targets, 1 / 64, chunks=chunks, dw_dtype=None, added=0.5)
    check(x, w, targets, [evaluated], 1 / 64, added=0.5)


@pytest.mark.parametrize("labels", [0, 1, 16, 17, 33, 64])
def test_only_as_many_chunks_run_as_there_are_labels_for(labels: int) -> None:
    """The last chunk that is needed may be full, begun, or none: the results are those of all chunks."""
    x, w = exact_inputs(64, 64, 1000, "bf16")
    targets = torch.full((64,), -100, dtype=torch.int32)
    targets[torch.randperm(64)[:labels]] = torch.randint(0, 1000, (labels,), dtype=torch.int32)
    targets = targets.cuda()
    results = run_head(x, w, targets, 0.25, chunks=4, dw_dtype="fp32")
    if labels:
        check(x, w, targets, results, 0.25)
    else:
        assert not any(result.any() for result in results)


def test_a_chunk_is_needed_from_its_first_label_on() -> None:
    x, w = value("x", (64, 64), "bf16"), value("w", (1000, 64), "bf16")
    targets, scale, total = value("t", (64,), "int32"), value("s", (), "fp32"), value("loss", (), "fp32")
    op = Op("lm_head_ce", (x, w, targets, scale), (total,), {"chunks": 4})
    contents = {v: torch.zeros(v.shape, dtype=TORCH.get(v.dtype, torch.int32)) for v in op.ins}
    assert [part.above for part in bind_kernel(loss.KERNELS, op, contents).parts] == [-1, -1, 16, 32, 48, -1]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("tokens", [1, 31, 1024, 1025, 10_000])
def test_labelled_rows_come_first_and_in_order(tokens: int, share: float) -> None:
    from surogate_recipes_bf16 import _C

    labels = torch.randint(0, 1000, (tokens,), dtype=torch.int32)
    labels[torch.rand(tokens) >= share] = -100
    targets, rows, found = guarded_copy(labels), guarded((tokens,), torch.int32), guarded((tokens,), torch.int32)
    eager_and_graph(
        lambda stream: _C.labelled_rows(targets.pointer, rows.pointer, found.pointer, tokens, stream),
        [targets, rows, found],
    )
    expected = (labels >= 0).nonzero().flatten()
    assert rows.tensor[: len(expected)].cpu().tolist() == expected.tolist()
    assert found.tensor[: len(expected)].cpu().tolist() == labels[expected].tolist()
    assert (rows.tensor[len(expected) :] == -1).all() and (found.tensor[len(expected) :] == -1).all()


@pytest.mark.parametrize("columns", [1, 13, 64, 2056])
def test_moving_rows_there_and_back(columns: int) -> None:
    from surogate_recipes_bf16 import _C

    start, index = torch.randn(50, columns).bfloat16(), torch.tensor([3, 7, 8, 49, -1, -1], dtype=torch.int32)
    x, rows, few = guarded_copy(start), guarded_copy(index), guarded((6, columns), torch.bfloat16)
    back = guarded_copy(torch.zeros(50, columns).bfloat16(), constant=False)
    size = (6, 2 * columns)
    eager_and_graph(lambda s: _C.gather_rows(x.pointer, rows.pointer, few.pointer, *size, s), [x, rows, few])
    eager_and_graph(lambda s: _C.scatter_rows(few.pointer, rows.pointer, back.pointer, *size, s), [few, rows, back])
    assert same_bits(few.tensor[:4], start[index[:4]].cuda()) and not few.tensor[4:].any()
    expected = torch.zeros_like(start)
    expected[index[:4]] = start[index[:4]]
    assert same_bits(back.tensor, expected.cuda())


@pytest.mark.parametrize("dw_dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_planned_workspace_is_what_the_head_needs(chunks: int, dtype: str, dw_dtype: str) -> None:
    from surogate_recipes_bf16 import _C

    x, w, scalar = value("x", (36, 40), dtype), value("w", (777, 40), dtype), value("s", (), "fp32")
    outs = (value("loss", (), "fp32"), value("dx", (36, 40), dtype), value("dw", (777, 40), dw_dtype))
    op = Op("lm_head_ce_grads", (x, w, value("t", (36,), "int32"), scalar), outs, {"chunks": chunks})
    (kernel,) = [k for k in loss.KERNELS if k.op == op.kind and k.dtypes == tuple(v.dtype for v in (*op.ins, *op.outs))]
    device = training_device()
    codes = (DTYPE_CODES[dtype], DTYPE_CODES[dw_dtype])
    needed = _C.lm_head_workspace_bytes(36, 40, 777, chunks, *codes, gemm.library_bytes(device))
    assert kernel.workspace(op, device) == needed
