"""The LM head by FP8 products: its cross-entropy compared with fp64, and the op with its reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu.harness import FAMILIES, Setup
from torch import Tensor

from surogate_core.api import DTYPES, Op, Target, Value
from surogate_core.api.cublaslt import library_bytes
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.devices import training_device
from surogate_core.testing.kernels import assert_close, eager_and_graph, guarded, guarded_copy, relative_error
from surogate_recipes_fp8 import head_reference
from surogate_recipes_fp8.formats import transposes
from surogate_recipes_fp8.kernels import head
from surogate_recipes_fp8.reference import encode, fp8_quantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif((training_device().sm or 0) < 89, reason="needs a GPU of SM89 or later"),
]

FP8: dict[str, Any] = {
    "recipe": "fp8-hybrid",
    "options": {"fp8_amax_history": 16, "fp8_lm_head": True},
    "deterministic": "true",
}
LORA = {"adapter": {"lora_rank": 16}}


def random_targets(rows: int, vocab_size: int) -> Tensor:
    """Return labels, about a third of them missing. The first and the last entry of the vocabulary occur."""
    targets = torch.randint(0, vocab_size, (rows,), dtype=torch.int32)
    targets[torch.rand(rows) < 0.3] = -100
    targets[:2] = torch.tensor([vocab_size - 1, 0])
    return targets.cuda()


# ------------------------------------------------------------------------------------------------------ cross-entropy


def gradient_of(logits: Tensor, targets: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return the loss of every row and softmax - onehot times the slope of the cap, in fp64."""
    labelled, labels = targets >= 0, targets.clamp(min=0).long()[:, None]
    capped = cap * (logits.double() / cap).tanh() if cap else logits.double()
    log_probs = capped.log_softmax(-1)
    row_loss = -log_probs.gather(1, labels)[:, 0] * labelled
    gradient = log_probs.exp().scatter_add(1, labels, -torch.ones_like(row_loss)[:, None])
    slope = 1 - (capped / cap).square() if cap else 1.0
    return row_loss, gradient * slope * labelled[:, None]


@pytest.mark.parametrize("cap", [0.0, 20.0])
@pytest.mark.parametrize(
    "shape",
    cases(
        [(5, 16), (9, 64), (3, 4112), (3, 20496)],
        more=[(6, 151936), (3, 81936), (2, 131088), (2, 163856), (2, 262144), (2, 262160)],
    ),
    ids=str,
)
def test_the_gradient_is_written_in_e5m2(shape: tuple[int, int], cap: float) -> None:
    from surogate_recipes_fp8 import _C

    (rows, vocab_size), ld = shape, -(-shape[1] // 64) * 64
    start = torch.full((rows, ld), 123.0, device="cuda").bfloat16()
    start[:, :vocab_size] = (torch.randn(rows, vocab_size, device="cuda") * 5).bfloat16()
    targets = guarded_copy(random_targets(rows, vocab_size))
    scale = guarded_copy(torch.tensor(0.37, device="cuda"))
    row_loss, gradient = gradient_of(start[:, :vocab_size], targets.tensor, cap)

    logits, losses = guarded_copy(start, constant=False), guarded((rows,), torch.float32)
    eager_and_graph(
        lambda stream: _C.head_loss_codes(
            logits.pointer, targets.pointer, scale.pointer, losses.pointer, rows, vocab_size, ld, cap, stream
        ),
        [logits, targets, scale, losses],
    )
    assert_close(losses.tensor, row_loss, torch.float32, vocab_size, 1 + row_loss)
    codes = logits.tensor.view(torch.uint8)[:, :vocab_size].contiguous()
    assert not codes[targets.tensor < 0].any(), "a row without a label has a gradient"
    expected = encode(gradient.float().cpu(), torch.tensor(2.0**15), "e5m2").cuda()
    ours, theirs = codes.view(TORCH_DTYPES["e5m2"]).double(), expected.double()
    # An exponential has an error of 1e-6, which moves about 1e-5 of the numbers over the middle of two codes, and one
    # near the cap 1e-3 of them.
    assert float((ours != theirs).double().mean()) < 1e-3 + 2 / theirs.numel()
    assert ((ours - theirs).abs() <= theirs.abs() / 4 + 2.0**-16).all()


def test_nan_reaches_the_loss_and_the_codes() -> None:
    from surogate_recipes_fp8 import _C

    logits = torch.randn(2, 64, device="cuda").bfloat16()
    logits[1, 5] = torch.nan
    targets, scale = torch.tensor([3, 4], dtype=torch.int32, device="cuda"), torch.tensor(1.0, device="cuda")
    losses, stream = torch.zeros(2, device="cuda"), torch.cuda.current_stream().cuda_stream
    _C.head_loss_codes(*(t.data_ptr() for t in (logits, targets, scale, losses)), 2, 64, 64, 0.0, stream)
    codes = logits.view(torch.uint8)[:, :64].contiguous().view(TORCH_DTYPES["e5m2"]).float()
    assert losses[0].isfinite() and losses[1].isnan()
    assert codes[0].isfinite().all() and codes[1].isnan().any()


# ------------------------------------------------------------------------------------------------------------- the op


def value(name: str, shape: Sequence[int], dtype: str) -> Value:
    return Value(name=name, shape=tuple(shape), dtype=dtype, role="act")


def head_op(
    tokens: int, width: int, vocab: int, chunks: int, dw: str | None, has_dx: bool, **more: Any
) -> tuple[Op, list[Value]]:
    """Return the op without a transposed weight where this GPU needs none, and its inputs."""
    has_dx |= dw is not None
    ins = [
        value("x", (tokens, width), "bf16"),
        value("w", (vocab, width), "e4m3"),
        value("targets", (tokens,), "int32"),
    ]
    ins += [value("loss_scale", (), "fp32"), value("w_scale", (2,), "fp32")]
    if has_dx and transposes(training_device().sm):
        ins.append(value("w_t", (width, vocab), "e4m3"))
    outs = (value("loss", (), "fp32"), value("dx", (tokens, width), "bf16"), value("dw", (vocab, width), dw or "fp32"))
    count = 3 if dw else 2 if has_dx else 1
    attrs: dict[str, Any] = {"chunks": chunks, **more.pop("attrs", {})}
    if has_dx:
        attrs["wrt"] = (0, 1)[: count - 1]
    kind = "fp8_lm_head_ce_grads" if has_dx else "fp8_lm_head_ce"
    return Op(kind, tuple(ins), outs[:count], attrs, **more), ins


def compared(
    x: Tensor, w: Tensor, targets: Tensor, *, chunks: int, dw: str | None, has_dx: bool = True, added: float = 0.0,
    softcap: float = 0.0, scale: float = 1 / 64,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """Return loss, dx and dw of the kernel and of the reference. Loss and dw are added to `added` if it is not 0."""
    (tokens, width), vocab = x.shape, w.shape[0]
    codes, codes_t, w_scale = fp8_quantize(w.cpu(), dtype="e4m3", scaling="current", transposed=True)
    sums = frozenset({0, 2} if added and dw == "fp32" else ())
    op, ins = head_op(tokens, width, vocab, chunks, dw, has_dx, accumulate=sums, attrs={"softcap": softcap})
    tensors = (x.cpu(), codes, targets.cpu(), torch.tensor(scale), w_scale, codes_t)
    contents = dict(zip(ins, tensors, strict=False))
    starts = {out: torch.full(out.shape, added) for i, out in enumerate(op.outs) if i in sums}
    found = run_kernel(head.KERNELS, op, contents | starts, labels=int((targets >= 0).sum()))
    reference = getattr(head_reference, op.kind)
    expected = reference(*tensors[:5], **op.attrs)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    return [f.double() - (added if i in sums else 0) for i, f in enumerate(found)], [e.double() for e in expected]


def exact_inputs(tokens: int, width: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return x and w with elements in {-1, 0, 1} and a sixteenth of these: sums of their codes are exact."""
    assert width <= 256
    return torch.randint(-1, 2, (tokens, width)).bfloat16(), (torch.randint(-1, 2, (vocab, width)) / 16).bfloat16()


def check(found: list[Tensor], expected: list[Tensor], targets: Tensor) -> None:
    """A product of FP8 operands has an error of 1e-4. Few codes differ, each by an eighth."""
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    if len(found) > 1:
        assert relative_error(found[1], expected[1]) < 5e-3
        assert not found[1][targets.cpu() < 0].any(), "a row without a label has a gradient"
    if len(found) > 2:
        assert relative_error(found[2], expected[2]) < 5e-3


@pytest.mark.parametrize(("dw", "has_dx"), [(None, False), (None, True), ("fp32", True), ("bf16", True)], ids=str)
@pytest.mark.parametrize(
    "sizes", cases([(64, 64, 1008, 1), (64, 48, 1024, 4), (96, 32, 784, 3)], more=[(512, 256, 151_936, 2)]), ids=str
)
def test_the_head_matches_its_reference(sizes: tuple[int, int, int, int], dw: str | None, has_dx: bool) -> None:
    tokens, width, vocab, chunks = sizes
    x, w = exact_inputs(tokens, width, vocab)
    targets = random_targets(tokens, vocab)
    check(*compared(x, w, targets, chunks=chunks, dw=dw, has_dx=has_dx), targets)


def test_random_operands_are_close_to_the_reference() -> None:
    """Sums in another order move a logit to the next bf16 number, which is 2^-8 of it away."""
    torch.manual_seed(7)
    x, w = torch.randn(128, 256).bfloat16(), (torch.randn(2048, 256) / 16).bfloat16()
    targets = random_targets(128, 2048)
    found, expected = compared(x, w, targets, chunks=2, dw="fp32")
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-3)
    assert max(relative_error(a, b) for a, b in zip(found[1:], expected[1:], strict=True)) < 2e-2


def test_loss_and_weight_gradient_are_added_to_what_there_is() -> None:
    x, w = exact_inputs(64, 64, 1008)
    targets = random_targets(64, 1008)
    check(*compared(x, w, targets, chunks=4, dw="fp32", added=0.5, scale=1.0), targets)


def test_a_cap_is_served() -> None:
    x, w = exact_inputs(64, 64, 1008)
    targets = random_targets(64, 1008)
    for dw, has_dx in ((None, False), (None, True), ("fp32", True)):
        found, expected = compared(x, w, targets, chunks=2, dw=dw, has_dx=has_dx, softcap=2.0)
        assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
        assert all(relative_error(a, b) < 2e-2 for a, b in zip(found[1:], expected[1:], strict=True))


@pytest.mark.parametrize("labels", [0, 1, 17, 64])
def test_running_only_the_chunks_with_labels_gives_the_same_results(labels: int) -> None:
    x, w = exact_inputs(64, 64, 1008)
    targets = torch.full((64,), -100, dtype=torch.int32)
    targets[torch.randperm(64)[:labels]] = torch.randint(0, 1008, (labels,), dtype=torch.int32)
    found, expected = compared(x, w, targets, chunks=4, dw="fp32")
    if labels:
        check(found, expected, targets)
    else:
        assert not any(result.any() for result in found)


def test_a_row_that_is_not_finite_makes_the_loss_nan() -> None:
    x, w = exact_inputs(64, 64, 1008)
    x[3, 5] = torch.inf
    targets = torch.zeros(64, dtype=torch.int32)
    assert not compared(x, w, targets, chunks=1, dw=None)[0][0].isfinite()
    targets[3] = -100
    assert compared(x, w, targets, chunks=1, dw=None)[0][0].isfinite(), "a row without a label counts"


@pytest.mark.parametrize(("dw", "has_dx"), [(None, False), (None, True), ("fp32", True), ("bf16", True)], ids=str)
@pytest.mark.parametrize("chunks", [1, 3])
def test_planned_workspace_equals_that_of_the_head(chunks: int, dw: str | None, has_dx: bool) -> None:
    from surogate_recipes_fp8 import _C

    op, _ = head_op(96, 48, 784, chunks, dw, has_dx)
    target = Target(training_device())
    code = DTYPES[dw].code if dw else head.NO_DW
    needed = _C.lm_head_workspace_bytes(96, 48, 784, chunks, has_dx, code, library_bytes(target))
    (kernel,) = {k for k in head.KERNELS if k.op == op.kind and k.dtypes == tuple(v.dtype for v in (*op.ins, *op.outs))}
    assert kernel.workspace(op, target) == needed


def test_products_are_timed_unless_they_must_not_be() -> None:
    op, ins = head_op(64, 64, 1008, 4, "fp32", True)
    contents = {v: torch.zeros(v.shape, dtype=TORCH_DTYPES[v.dtype]) for v in ins}
    launches = bind_kernel(head.KERNELS, op, contents).launches
    lines = launches[0].call[0].__self__.describe().splitlines()
    assert [("e4m3->bf16" in line, "e4m3->fp32" in line) for line in lines] == [
        (True, False), (True, False), (False, True), (False, True)
    ]  # fmt: skip
    assert all("TFLOP/s" in line for line in lines)
    assert [launch.labels_above for launch in launches] == [-1, -1, 16, 32, 48, -1]
    untimed = bind_kernel(head.KERNELS, op, contents, deterministic="true").launches[0].call[0].__self__.describe()
    assert "TFLOP/s" not in untimed


# -------------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("more", [{}, LORA, {"param_grad_dtype": "bf16"}], ids=["full", "lora", "bf16 gradients"])
def test_steps_are_those_of_the_references(more: dict[str, Any]) -> None:
    """Every op has a kernel. In the first step and in the second, losses and the mean error of gradients agree."""
    adapter = {key: given for key, given in more.items() if key == "adapter"}
    truth_setup, setup = (
        Setup(FAMILIES["qwen3"], model_dtype="fp32", **adapter),
        Setup(FAMILIES["qwen3"], **FP8, **more),
    )
    assert setup.missing_kernels() == set()
    truth_worker, cpu, gpu = truth_setup.cpu(), setup.cpu(), setup.gpu()
    for step in (1, 2):
        losses = [
            its.step(w, step, step=step, lr=0.0)[0]
            for w, its in ((truth_worker, truth_setup), (cpu, setup), (gpu, setup))
        ]
        assert losses[2] == pytest.approx(losses[1], rel=2e-3) and losses[2] == pytest.approx(losses[0], rel=1e-2)
        truth = truth_setup.gradients(truth_worker)
        known = [n for n, g in truth.items() if float(g.norm()) > 0]
        mean = [
            sum(relative_error(its[n].double(), truth[n].double()) for n in known) / len(known)
            for its in (setup.gradients(cpu), setup.gradients(gpu))
        ]
        assert mean[1] <= 1.15 * mean[0], (step, mean)


@pytest.mark.parametrize("more", [{}, LORA], ids=["full", "lora"])
def test_captured_and_eager_steps_are_bit_identical(more: dict[str, Any]) -> None:
    setup = Setup(**FP8, **more)
    eager, captured = setup.gpu(graphs=False), setup.gpu(graphs=True)
    batch = setup.batch(50)
    for step in range(1, 4):
        assert setup.step(eager, step, step=step) == setup.step(captured, step, step=step)
    assert eager.evaluate(batch) == captured.evaluate(batch)
    ours, theirs = setup.weights(captured), setup.weights(eager)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
