"""Cross-entropy kernels compared with fp64, and lists of labelled rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import (
    assert_close,
    eager_and_graph,
    guarded,
    guarded_copy,
    same_bits,
)

pytestmark = pytest.mark.gpu

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_targets(rows: int, vocab_size: int) -> Tensor:
    """Return labels, about a third of them missing. The first and the last entry of the vocabulary occur."""
    targets = torch.randint(0, vocab_size, (rows,), dtype=torch.int32)
    targets[torch.rand(rows) < 0.3] = -100
    targets[0] = vocab_size - 1
    if rows > 1:
        targets[1] = 0
    return targets.cuda()


def padded_logits(rows: int, vocab_size: int, dtype: torch.dtype, spread: float) -> Tensor:
    """Return random logits whose rows are padded with 123 to a multiple of 64 elements."""
    width = -(-vocab_size // 64) * 64
    logits = torch.full((rows, width), 123.0, device="cuda")
    logits[:, :vocab_size] = torch.randn(rows, vocab_size, device="cuda") * spread
    return logits.to(dtype)


def cross_entropy_truth(logits: Tensor, targets: Tensor, scale: float, cap: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the loss of every row and the gradient of its logits, in fp64."""
    labelled = targets >= 0
    labels = targets.clamp(min=0).long()[:, None]
    slopes = (logits.double() / cap).tanh().square().neg() + 1 if cap else torch.ones_like(logits, dtype=torch.float64)
    log_probs = (cap * (logits.double() / cap).tanh() if cap else logits.double()).log_softmax(-1)
    row_loss = -log_probs.gather(1, labels)[:, 0] * labelled
    gradient = log_probs.exp().scatter_add(1, labels, -torch.ones_like(row_loss)[:, None])
    return row_loss, gradient * slopes * labelled[:, None] * scale


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("spread", [1.0, 30.0])
@pytest.mark.parametrize(
    "shape",
    cases(
        [(5, 1), (3, 7), (9, 64), (4, 777), (3, 4099), (3, 20481)],
        # the limits of every size of a cluster, and a row that none holds
        more=[(6, 151936), (2, 40960), (2, 50257), (3, 81921), (2, 131073), (2, 163847), (2, 262144), (2, 262145)],
    ),
    ids=str,
)
def test_cross_entropy_matches_fp64(shape: tuple[int, int], spread: float, dtype: str) -> None:
    from surogate_recipes_bf16 import _C

    rows, vocab_size = shape
    start = padded_logits(rows, vocab_size, TORCH[dtype], spread)
    targets = guarded_copy(random_targets(rows, vocab_size))
    scale = guarded_copy(torch.tensor(0.37, device="cuda"))
    sizes = (rows, vocab_size, start.shape[1], 0.0, DTYPES[dtype].code)
    row_loss, gradient = cross_entropy_truth(start[:, :vocab_size], targets.tensor, float(scale.tensor))

    logits, losses = guarded_copy(start), guarded((rows,), torch.float32)
    eager_and_graph(
        lambda stream: _C.cross_entropy(logits.pointer, targets.pointer, losses.pointer, *sizes, stream),
        [logits, targets, losses],
    )
    # The logarithm of a sum of `vocab_size` terms minus a difference of logits has errors proportional to 1 + the loss.
    assert_close(losses.tensor, row_loss, torch.float32, vocab_size, 1 + row_loss)

    logits, losses = guarded_copy(start, constant=False), guarded((rows,), torch.float32)
    eager_and_graph(
        lambda stream: _C.cross_entropy_grads(
            logits.pointer, targets.pointer, scale.pointer, losses.pointer, *sizes, stream
        ),
        [logits, targets, scale, losses],
    )
    assert_close(losses.tensor, row_loss, torch.float32, vocab_size, 1 + row_loss)
    # The rounding error of (x - max) - log(sum) is proportional to the largest difference and becomes a relative error
    # of exp(...). The sum has the roundings of one thread's terms. Below 1e-30 the spacing of subnormals dominates.
    valid = start[:, :vocab_size].double()
    span = float((valid.max() - valid.min()).clamp(min=1))
    magnitude = 0.37 * span * valid.softmax(-1) + 1e-30
    assert_close(logits.tensor[:, :vocab_size], gradient, TORCH[dtype], 1 + vocab_size // 512, magnitude)
    assert (logits.tensor[:, vocab_size:] == start[:, vocab_size:]).all(), "the padding was written"
    assert not logits.tensor[targets.tensor < 0, :vocab_size].any(), "a row without a label has a gradient"


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [(5, 64), (3, 4099)], ids=str)
def test_cross_entropy_of_capped_logits_matches_fp64(shape: tuple[int, int], dtype: str) -> None:
    from surogate_recipes_bf16 import _C

    rows, vocab_size = shape
    start = padded_logits(rows, vocab_size, TORCH[dtype], 30.0)
    targets, scale = random_targets(rows, vocab_size), torch.tensor(0.37, device="cuda")
    row_loss, gradient = cross_entropy_truth(start[:, :vocab_size], targets, 0.37, 20.0)
    sizes = (rows, vocab_size, start.shape[1], 20.0, DTYPES[dtype].code, torch.cuda.current_stream().cuda_stream)
    logits, losses, alone = start.clone(), torch.empty(rows, device="cuda"), torch.empty(rows, device="cuda")
    _C.cross_entropy(logits.data_ptr(), targets.data_ptr(), alone.data_ptr(), *sizes)
    _C.cross_entropy_grads(*(t.data_ptr() for t in (logits, targets, scale, losses)), *sizes)
    assert_close(losses, row_loss, torch.float32, vocab_size, 1 + row_loss)
    assert torch.equal(alone, losses)
    # 1 - tanh^2 loses digits where a logit is near the cap: those of p, and of 1 at the label.
    size = (20 * (start[:, :vocab_size].double() / 20).tanh()).softmax(-1)
    size[torch.arange(rows), targets.clamp(min=0).long()] += 1
    magnitude = 0.37 * 40 * size + 1e-30
    assert_close(logits[:, :vocab_size], gradient, TORCH[dtype], 1 + vocab_size // 512, magnitude)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("vocab_size", [128, 125])
def test_minus_infinity_contributes_nothing_and_nan_propagates(vocab_size: int, dtype: str) -> None:
    from surogate_recipes_bf16 import _C

    start = torch.randn(4, 128, device="cuda", dtype=TORCH[dtype])
    start[0, ::2] = float("-inf")
    start[1, 5] = float("nan")
    start[2, 7] = float("inf")
    outside = vocab_size + 1
    targets = torch.tensor([1, 3, 3, outside], dtype=torch.int32, device="cuda")
    logits, losses = start.clone(), torch.empty(4, device="cuda")
    scale = torch.ones((), device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    _C.cross_entropy_grads(
        *(t.data_ptr() for t in (logits, targets, scale, losses)), 4, vocab_size, 128, 0.0, DTYPES[dtype].code, stream
    )
    expected = -start[0, :vocab_size].double().log_softmax(-1)[1]
    assert_close(losses[:1], expected[None], torch.float32, 128, 10.0)
    assert not logits[0, :vocab_size:2].any()
    assert losses[1:].isnan().all()


@pytest.mark.parametrize("rows", [1, 31, 1024, 100_003])
@pytest.mark.parametrize("added", [None, 2.5])
def test_sum_loss_matches_fp64(added: float | None, rows: int) -> None:
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
def test_scatter_inverts_gather(columns: int) -> None:
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
