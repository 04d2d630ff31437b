"""The compiled normuon: momenta are bit-identical to the reference, all else is within the error of bf16 products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES, store
from surogate_core.testing.binding import Binding, bind_kernel, run_kernel
from surogate_core.testing.kernels import relative_error, same_bits
from surogate_optim_normuon import batches as planned
from surogate_optim_normuon import reference
from surogate_optim_normuon.batches import Shape, layout
from surogate_optim_normuon.iterations import METHODS, Iterations
from surogate_optim_normuon.kernels import KERNELS
from surogate_optim_normuon.reference import normuon
from surogate_optim_normuon.scaling import factor

pytestmark = pytest.mark.gpu

CLIP_COEF = Value(name="clip_coef", shape=(), dtype="fp32", role="act")
LR = Value(name="lr", shape=(), dtype="fp32", role="input")
STEP = Value(name="step", shape=(), dtype="int32", role="input")
SEED = Value(name="seed", shape=(), dtype="int64", role="input")
SCALARS = (CLIP_COEF, LR, STEP, SEED)

SHAPES = [((48,), 64), ((64, 16, 16), 64), ((200,), 40), ((33, 7), 61), ((1,), 9), ((300, 300), 128)]
"""(rows of the logical matrices, columns) of params. Some are padded, wide, tall, square, or larger than a chunk."""

Params = Sequence[tuple[Sequence[int], int]]


class Update:
    """A `normuon` op, and the contents of its inputs."""

    def __init__(
        self,
        params: Params = SHAPES,
        grad: str = "fp32",
        master: str = "fp32",
        momentum: str = "fp32",
        copy: str | None = None,
        *,
        clip_coef: float = 0.7,
        lr: float = 0.02,
        **attrs: Any,
    ) -> None:
        n = len(params)
        gen = torch.Generator().manual_seed(n)
        shapes = [(sum(rows), columns) for rows, columns in params]

        def values(name: str, dtype: str, indices: Iterable[int], rows_only: bool = False) -> list[Value]:
            chosen = [(i, shapes[i][:1] if rows_only else shapes[i]) for i in indices]
            return [Value(name=f"{name}{i}", shape=shape, dtype=dtype, role="state") for i, shape in chosen]

        def drawn(value: Value) -> Tensor:
            x = torch.randn(value.shape, generator=gen) * 0.1
            return (x.square() if value.name.startswith("v") else x).to(TORCH_DTYPES[value.dtype])

        copied = tuple(i for i in range(n) if i % 3 != 2) if copy else ()
        measured = tuple(i for i in range(n) if i % 4 != 1)
        self.grads, self.masters, self.momenta = (
            values(name, dtype, range(n)) for name, dtype in (("g", grad), ("p", master), ("m", momentum))
        )
        self.variances = values("v", "fp32", range(n), rows_only=True)
        self.copies = values("copy", copy, copied) if copy else []
        self.amaxes = [Value(name=f"amax{i}", shape=(), dtype="fp32", role="act") for i in measured]
        self.attrs: dict[str, Any] = {
            "n": n,
            "rows": tuple(tuple(rows) for rows, _ in params),
            "copied": copied,
            "copy_dtypes": tuple(c.dtype for c in self.copies),
            "measured": measured,
            "weight_decay": 0.1,
            "streams": tuple((0x9ABCDEF1 * (i + 1)) & 0xFFFFFFFF for i in range(n)),
            "momentum": 0.95,
            "beta2": 0.9,
            "cautious": True,
            "lr_scale": "match_adamw",
            "method": "polar_express",
        } | attrs
        kept = (*self.masters, *self.momenta, *self.variances)
        self.op = Op("normuon", (*SCALARS, *self.grads, *kept), (*kept, *self.copies, *self.amaxes), self.attrs)
        self.contents: dict[Value, Tensor] = {
            CLIP_COEF: torch.tensor(clip_coef),
            LR: torch.tensor(lr),
            STEP: torch.tensor(7, dtype=torch.int32),
            SEED: torch.tensor(1234567890123),
            **{value: drawn(value) for value in (*self.grads, *kept)},
        }

    def run(self, skew: int = 0) -> dict[Value, Tensor]:
        return dict(zip(self.op.outs, run_kernel(KERNELS, self.op, self.contents, skew=skew), strict=True))

    def reference(self, **scalars: Tensor) -> dict[Value, Tensor]:
        ins = [scalars.get(v.name, self.contents[v]) for v in self.op.ins]
        return dict(zip(self.op.outs, normuon(*ins, **self.attrs), strict=True))


def in_bf16(x: Tensor, iterations: Iterations) -> Tensor:
    """As `orthogonalized`, with operands and results of the products in bf16, and fp32 sums, as the kernel has them."""

    def rounded(y: Tensor) -> Tensor:
        return y.bfloat16().float()

    wide = rounded(x if x.shape[0] <= x.shape[1] else x.T)
    wide = rounded(wide / (x.norm() * iterations.safety + iterations.epsilon))
    for a, b, c in iterations.coefficients:
        square = rounded(wide @ wide.T)
        wide = rounded(wide * a + rounded(square * b + square @ square * c) @ wide)
    return wide if x.shape[0] <= x.shape[1] else wide.T


def in_fp64(x: Tensor, iterations: Iterations) -> Tensor:
    return ORTHOGONALIZED(x.double(), iterations).float()


ORTHOGONALIZED = reference.orthogonalized


# --------------------------------------------------------------------------------------------------- orthogonalization


@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize(
    ("shape", "panels"),
    [((200, 1000), 1), ((333, 77), 1), ((512, 512), 1), ((512, 512), 4)]
    + [(shape, panels) for shape in ((256, 1024), (1024, 256)) for panels in (1, 2)],
    ids=str,
)
def test_an_update_is_as_near_to_fp64_as_bf16_products_allow(
    method: str, shape: tuple[int, int], panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update is what a step with a learning rate of 1 subtracts from masters of zeros.

    The limit is 1.25 times the error of torch in the same dtypes, about 1 %. Kernel and torch add in different orders,
    so elements are rounded differently, but the errors of thousands of elements have nearly the same norm.
    """
    monkeypatch.setattr(planned, "PANELS", panels)
    monkeypatch.setattr(planned, "PANEL_SIDE", 256)
    update = Update([((shape[0],), shape[1])], lr=1.0, method=method, lr_scale="spectral")
    (p,), (m,) = update.masters, update.momenta
    update.contents[p] = torch.zeros(shape)
    update.contents[m] = torch.zeros(shape)
    ours = update.run()[p]
    monkeypatch.setattr(reference, "orthogonalized", in_fp64)
    truth = update.reference()[p]
    monkeypatch.setattr(reference, "orthogonalized", in_bf16)
    allowed = relative_error(update.reference()[p], truth)
    assert allowed < 0.05
    assert relative_error(ours, truth) < 1.25 * allowed


@pytest.mark.parametrize(("method", "low", "high"), [("polar_express", 0.84, 1.16), ("newton_schulz", 0.66, 1.15)])
@pytest.mark.parametrize("shape", [(256, 1024), (1024, 256)], ids=str)
def test_singular_values_are_in_the_band_of_the_polynomials_and_singular_vectors_stay(
    method: str, low: float, high: float, shape: tuple[int, int]
) -> None:
    """The band is 0.86 to 1.14, for `newton_schulz` 0.68 to 1.13, and 0.02 on both sides for bf16.

    Torch in the same dtypes reaches 0.858 to 1.141 and 0.682 to 1.135, with 0.005 outside of the diagonal.
    """
    update = Update([((shape[0],), shape[1])], method=method)
    (g,), (m,) = update.grads, update.momenta
    update.contents[m] = torch.zeros(shape)
    u, _, vh = torch.linalg.svd(update.contents[g].double(), full_matrices=False)
    singular = u.T @ orthogonal_of(update).double() @ vh.T
    assert low < singular.diagonal().min() and singular.diagonal().max() < high
    assert (singular - singular.diagonal().diag()).abs().max() < 0.02


def bound(update: Update) -> Binding:
    binding = bind_kernel(KERNELS, update.op, update.contents)
    binding.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    return binding


def orthogonal_of(update: Update, binding: Binding | None = None) -> Tensor:
    """The orthogonalized matrix, in the workspace, of an op with one matrix: after an odd number of iterations in y."""
    binding = binding or bound(update)
    ((rows,),), columns = update.attrs["rows"], update.grads[0].shape[1]
    shape = Shape(rows, columns)
    at = layout(shape, 1)
    assert binding.scratch is not None
    begin = binding.scratch.tensor.numel() - at.total + at.y
    words = binding.scratch.tensor[begin : begin + 2 * shape.elements].view(torch.bfloat16)
    padded = words.view(shape.padded).float().cpu()
    assert not padded[rows:].any() and not padded[:, columns:].any()
    return padded[:rows, :columns]


# --------------------------------------------------------------------------------------------------- element-wise parts


DTYPES = [
    ("fp32", "fp32", "fp32", None),
    ("fp32", "fp32", "fp32", "bf16"),
    ("bf16", "bf16", "bf16", None),
    ("bf16", "fp32", "bf16", "bf16"),
    ("fp32", "bf16", "bf16", "fp32"),
    ("bf16", "bf16", "fp32", "bf16"),
]


@pytest.mark.parametrize("skew", [0, 1])
@pytest.mark.parametrize(("grad", "master", "momentum", "copy"), DTYPES)
def test_momenta_are_bit_identical_to_the_reference_and_copies_and_amaxes_are_of_the_master(
    grad: str, master: str, momentum: str, copy: str | None, skew: int
) -> None:
    update = Update(SHAPES, grad, master, momentum, copy)
    ours, theirs = update.run(skew), update.reference()
    for m in update.momenta:
        assert same_bits(ours[m], theirs[m]), m
    params = dict(enumerate(ours[p] for p in update.masters))
    for i, value in zip(update.attrs["copied"], update.copies, strict=True):
        params[i] = params[i].to(TORCH_DTYPES[value.dtype])
        assert same_bits(ours[value], params[i]), value
    for i, value in zip(update.attrs["measured"], update.amaxes, strict=True):
        assert ours[value] == params[i].abs().max().float(), value


@pytest.mark.parametrize(("grad", "master", "momentum", "copy"), DTYPES)
def test_masters_and_second_moments_are_near_the_reference(
    grad: str, master: str, momentum: str, copy: str | None
) -> None:
    """The error is that of bf16 products: torch in the same dtypes has 1.5 % of the update and of a second moment.
    Twice that is allowed, and for bf16 masters a unit, where both may be rounded to different neighbours."""
    update = Update([((96, 96), 256), ((300,), 128)], grad, master, momentum, copy)
    ours, theirs = update.run(), update.reference()
    for p, v in zip(update.masters, update.variances, strict=True):
        torch.testing.assert_close(ours[v], theirs[v], rtol=0.03, atol=0)
        old = update.contents[p].float()
        step = theirs[p].float() - old
        allowed = 0.03 * step.norm() + (2.0**-8 * old.norm() if master == "bf16" else 0)
        assert (ours[p].float() - theirs[p].float()).norm() < allowed, p


@pytest.mark.parametrize("lr_scale", ["match_adamw", "spectral", "paper"])
@pytest.mark.parametrize("cautious", [True, False])
@pytest.mark.parametrize("master", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(96, 256), (300, 61)], ids=str)
def test_rows_decay_and_update_follow_from_the_orthogonalized_matrix(
    lr_scale: str, cautious: bool, master: str, shape: tuple[int, int]
) -> None:
    """The truth is computed in fp64 from the kernel's own orthogonalized matrix.

    A sum of 256 squares has a relative error of 16 units of fp32 at most, 2e-6. A bf16 master is rounded to the other
    neighbour if such an error crosses a multiple of 2^-16 of its unit: in less than one of a thousand elements.
    """
    update = Update([((shape[0],), shape[1])], master=master, cautious=cautious, lr_scale=lr_scale)
    binding = bound(update)
    o = orthogonal_of(update, binding).double()
    (p,), (v,) = update.masters, update.variances
    old, moments = update.contents[p].double(), update.contents[v].double()
    moments = moments * 0.9 + o.square().mean(dim=1) * 0.1
    torch.testing.assert_close(binding.buffers[v].tensor.cpu().double(), moments, rtol=1e-5, atol=0)
    scaled = o / (moments.sqrt() + 1e-10)[:, None]
    constant, divided = factor(*shape, lr_scale)
    change = scaled * (o.norm() / scaled.norm()) * (constant / float(o.norm()) if divided else constant)
    decay = old * 0.1 * ((change * old >= 0) if cautious else 1)
    truth = old - float(update.contents[LR]) * (decay + change)
    ours = binding.buffers[p].tensor.cpu()
    if master == "fp32":
        torch.testing.assert_close(ours.double(), truth, rtol=1e-5, atol=1e-6)
        return
    rounded = store(truth.float(), torch.bfloat16, seed=1234567890123, stream=update.attrs["streams"][0], step=7)
    assert (ours != rounded).double().mean() < 1e-3
    torch.testing.assert_close(ours.float(), rounded.float(), rtol=2.0**-7, atol=1e-6)


def test_a_matrix_of_zeros_only_decays() -> None:
    update = Update([((64,), 64)], lr=0.5)
    for value in (*update.grads, *update.momenta):
        update.contents[value].zero_()
    (p,) = update.masters
    torch.testing.assert_close(update.run()[p], update.contents[p] * (1 - 0.5 * 0.1))


# ---------------------------------------------------------------------------------------------------- batches and steps


def test_bits_do_not_depend_on_the_other_params_of_the_op() -> None:
    """Matrices are orthogonalized in batches: of 13 alone, of 4, and of all 17."""
    params = [((64, 32), 128)] * 13 + [((64, 32), 128)] * 4

    def part(begin: int, end: int) -> list[Tensor]:
        whole, some = Update(params), Update(params[begin:end])
        names = zip(some.op.ins[4:], (v for c in columns_of(whole) for v in c[begin:end]), strict=True)
        for value, original in names:
            some.contents[value] = whole.contents[original]
        results = some.run()
        return [results[p] for p in some.masters]

    together = part(0, 17)
    for a, b in zip(together, [*part(0, 13), *part(13, 17)], strict=True):
        assert same_bits(a, b)


def test_matrices_of_experts_are_each_updated_as_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of 300 thin matrices, in several batches: near the reference, with the bits of each by itself."""
    shapes, experts = [(16, 192), (72, 16), (8, 64)], 300
    monkeypatch.setattr(planned, "BATCH_BYTES", 1 << 20)
    stacks = Update([((rows,) * experts, columns) for rows, columns in shapes])
    ours, truth = stacks.run(), stacks.reference()
    monkeypatch.setattr(reference, "orthogonalized", in_bf16)
    rounded = stacks.reference()
    for p in stacks.masters:
        old = stacks.contents[p]
        assert relative_error(ours[p] - old, truth[p] - old) < 1.25 * relative_error(rounded[p] - old, truth[p] - old)
    one, i = Update([((rows,), columns) for rows, columns in shapes]), experts - 1
    for mine, whole in zip(columns_of(one), columns_of(stacks), strict=True):
        for value, stack, (rows, _) in zip(mine, whole, shapes, strict=True):
            one.contents[value] = stacks.contents[stack][i * rows :]
    alone = one.run()
    for value, stack, (rows, _) in zip(one.masters, stacks.masters, shapes, strict=True):
        assert same_bits(alone[value], ours[stack][i * rows :])


def columns_of(update: Update) -> tuple[list[Value], ...]:
    return update.grads, update.masters, update.momenta, update.variances


@pytest.mark.parametrize("coef", [float("nan"), float("inf")])
@pytest.mark.parametrize("skew", [0, 1])
def test_a_coefficient_that_is_not_finite_writes_the_amaxes_alone(coef: float, skew: int) -> None:
    update = Update(SHAPES, "bf16", "bf16", "bf16", "fp32", clip_coef=coef)
    ours, theirs = update.run(skew), update.reference()
    for value in update.op.outs:
        if value in update.contents:
            assert same_bits(ours[value], update.contents[value]), value
        elif value in update.amaxes:
            assert same_bits(ours[value], theirs[value]), value
        else:
            assert ours[value].isnan().all(), f"{value!r} was written"


@pytest.mark.parametrize("special", [torch.nan, torch.inf])
def test_an_amax_is_not_finite_if_the_param_is_not(special: float) -> None:
    update = Update([((64, 64), 64)], master="bf16")
    update.contents[update.masters[0]][70, 3] = special
    assert not update.run()[update.amaxes[0]].isfinite()


def test_a_captured_step_reads_its_scalars_when_it_runs() -> None:
    update = Update([((64, 64), 128)], "fp32", "fp32", "bf16")
    binding = bind_kernel(KERNELS, update.op, update.contents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    later = {
        CLIP_COEF: torch.tensor(0.25),
        LR: torch.tensor(0.5),
        STEP: torch.tensor(123, dtype=torch.int32),
        SEED: torch.tensor(-5),
    }
    for value, content in later.items():
        binding.buffers[value].tensor.copy_(content)
    graph.replay()
    torch.cuda.synchronize()
    update.contents |= later
    eager = update.run()
    for value in update.op.outs:
        assert same_bits(binding.buffers[value].tensor.cpu(), eager[value]), value
    assert same_bits(eager[update.momenta[0]], update.reference()[update.momenta[0]])


def test_with_deterministic_true_no_algorithm_is_timed() -> None:
    update = Update([((64,), 192)])
    (first, again) = (run_kernel(KERNELS, update.op, update.contents, deterministic="true")[0] for _ in range(2))
    assert same_bits(first, again)


def test_errors_name_the_invalid_argument() -> None:
    from surogate_optim_normuon import _C

    x = torch.zeros(64, device="cuda", dtype=torch.int64)
    p, stream = x.data_ptr(), torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match="normuon: clip_coef is a null pointer"):
        _C.momentum(p, 1, 8, 8, 0, p, p, p, p, 1, 0.9, 0, 0, stream)
    with pytest.raises(ValueError, match="normuon: norms must have 1 elements, got 2"):
        _C.momentum(p, 1, 8, 8, p, p, p, p, p, 2, 0.9, 0, 0, stream)
    with pytest.raises(ValueError, match="normuon: rows must be positive"):
        _C.normalize(p, 1, 0, 8, p, p, 1, 1.0, 1e-7, stream)
    with pytest.raises(ValueError, match="normuon: height must be a multiple of 64 and divide side, got 96 and 192"):
        _C.mirror(p, 1, 192, 96, stream)
    with pytest.raises(ValueError, match="normuon: beta2 must be in"):
        _C.row_moments(p, 1, 8, 8, p, p, p, 8, p, 2, 1.0, stream)
