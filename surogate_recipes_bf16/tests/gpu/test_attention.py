"""Attention kernels compared with the reference in fp64, document by document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from surogate_core.api import ConfigError, Deterministic, KernelDef, Op, Target, Value
from surogate_core.reference import attention as reference
from surogate_core.testing.binding import Binding, bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.devices import DEVICES
from surogate_core.testing.kernels import assert_close, eager_and_graph, guarded, relative_error
from surogate_recipes_bf16.kernels.attention import CUDNN, MMA, PLAIN
from surogate_recipes_bf16.kernels.attention_route import (
    ORDERED_CUDNN,
    SCORE_BYTES_LIMIT,
    BackwardAlgorithm,
    Route,
    algorithm_bytes,
    backward_algorithm,
    head_groups,
    of_chunk,
    packs_dkv,
    packs_dq,
    score_bytes,
    shape_of,
)

pytestmark = pytest.mark.gpu

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}

DOCUMENTS = cases(
    {"edges of tiles": [1, 7, 63, 64, 65, 100], "empty ones": [0, 5, 0, 0, 130, 0, 1, 2]},
    more={"whole row": [300], "single tokens": [1] * 67, "rows": [128] * 4},
)
HEADS = [(4, 2, 64), (3, 3, 96), (4, 1, 128), (8, 4, 32), (4, 2, 16)]
"""(n_heads, n_kv_heads, head_dim). The plain kernels are compiled for the first four values of head_dim, and 256."""
PLAIN_HEADS = cases(HEADS[:4], more=[*HEADS[4:], (2, 1, 80), (4, 2, 256)])
MMA_HEADS = cases([*HEADS[:3], (4, 2, 256)], more=[(8, 1, 64), (4, 2, 8), (2, 1, 80), (2, 2, 136), (2, 1, 200)])
"""Those by tensor cores are compiled for 64, 96, 128 and 256."""
CUDNN_HEADS = cases([HEADS[0], (4, 2, 256)], more=[*HEADS[1:], (2, 2, 192)])

ROWS = cases(
    {"tiles": [256] * 2, "odd rows": [77] * 3, "one row": [300]}, more={"short": [16] * 9, "128": [128], "long": [1024]}
)
"""Documents of equal lengths."""
ROW_HEADS = cases(
    [(4, 2, 64), (4, 4, 128)], more=[(3, 3, 96), (6, 2, 96), (8, 2, 128), (14, 2, 64), (4, 2, 16), (4, 2, 256)]
)


WINDOW_AND_SCALE = {"window": 40, "scale": 0.07}
SCORES: dict[str, dict[str, float]] = {"softcap": {"softcap": 3.0}, "all": {**WINDOW_AND_SCALE, "softcap": 1.5}}
"""Scores of this project's kernels other than q k^T / sqrt(D) of all keys. cuDNN has the window and the scale."""


class Case:
    """Random inputs, the forward and backward ops on them, and the expected results.

    `scores` are attributes: window, scale, softcap.
    """

    def __init__(
        self, lengths: Sequence[int], heads: tuple[int, int, int], dtype: str, unused: int = 3, **scores: float
    ) -> None:
        n_heads, n_kv_heads, head_dim = heads
        tokens = sum(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self.cu_seqlens = torch.cat([ends, torch.full((unused,), tokens)]).to(torch.int32)
        self.documents = [(int(a), int(b)) for a, b in pairwise(ends) if b > a]
        self.attrs: dict[str, Any] = {
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "seq_len": max(2, *lengths),
            **scores,
        }
        self.qkv = torch.randn(tokens, (n_heads + 2 * n_kv_heads) * head_dim).to(TORCH[dtype])
        self.dout = torch.randn(tokens, n_heads * head_dim).to(TORCH[dtype])
        self.pieces = [n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim]

        def value(name: str, tensor: Tensor, kind: str) -> Value:
            return Value(name=name, shape=tuple(tensor.shape), dtype=kind, role="act")

        lse = torch.empty(n_heads, tokens)
        qkv, cu_seqlens = value("qkv", self.qkv, dtype), value("cu_seqlens", self.cu_seqlens, "int32")
        self.out_value, self.lse_value = value("out", self.dout, dtype), value("lse", lse, "fp32")
        dout, dqkv = value("dout", self.dout, dtype), value("dqkv", self.qkv, dtype)
        self.op = Op("attention", (qkv, cu_seqlens), (self.out_value, self.lse_value), self.attrs)
        self.op_bwd = Op("attention_bwd", (dout, qkv, self.out_value, self.lse_value, cu_seqlens), (dqkv,), self.attrs)
        self.given = {qkv: self.qkv, cu_seqlens: self.cu_seqlens}
        self.given_bwd = {**self.given, dout: self.dout}

    def truth(self) -> tuple[Tensor, Tensor]:
        out, lse = reference.attention(self.qkv.double(), self.cu_seqlens, **self.attrs)
        return out, lse

    def truth_bwd(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return the backward reference in fp64, which corrects the rounding of `out` and `lse` as the kernel does."""
        return reference.attention_bwd(
            self.dout.double(), self.qkv.double(), out.double(), lse.double(), self.cu_seqlens, **self.attrs
        )

    def uncorrected_bwd(self, out: Tensor, lse: Tensor) -> Tensor:
        """Return the backward reference in fp64 by the given out and lse, whose rounding stays in the result."""
        return reference.attention_bwd(
            *(self.dout.double(), self.qkv.double(), out.double(), lse.double(), self.cu_seqlens),
            **{**self.attrs, "own": False},
        )

    def backward_inputs(self) -> dict[Value, Tensor]:
        """Return the inputs of the backward, with the out and lse of the forward reference."""
        out, lse = self.truth()
        return {**self.given_bwd, self.out_value: out.to(self.qkv.dtype), self.lse_value: lse.float()}

    @property
    def op_of_others(self) -> Op:
        """The backward op of an out and lse that are not those of attention."""
        return replace(self.op_bwd, attrs={**self.attrs, "own": False})

    def inputs_of_sinks(self) -> dict[Value, Tensor]:
        """Return the inputs of the backward, with the out and lse of a softmax with a sink for each head.

        Sinks are one more term: a head's keys keep a share of their weights, from nearly all to one in a hundred.
        """
        out, lse = self.truth()
        heads = self.attrs["n_heads"]
        sinks = torch.linspace(-4, 6, heads, dtype=torch.float64)[:, None]
        kept = (lse - sinks).sigmoid().T[..., None]
        sunk = (out.unflatten(1, (heads, -1)) * kept).flatten(1)
        return {
            **self.given_bwd,
            self.out_value: sunk.to(self.qkv.dtype),
            self.lse_value: torch.logaddexp(lse, sinks).float(),
        }

    @property
    def length(self) -> int:
        """Number of terms of the longest sum: a score, then all queries of a group for one key."""
        share = self.attrs["n_heads"] // self.attrs["n_kv_heads"]
        return self.attrs["head_dim"] + share * self.attrs["seq_len"]


@pytest.mark.parametrize("heads", PLAIN_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_plain_forward_matches_fp64(lengths: list[int], heads: tuple[int, int, int]) -> None:
    case = Case(lengths, heads, "fp32")
    out, lse = run_kernel(PLAIN, case.op, case.given)
    true_out, true_lse = case.truth()
    # The error of a weight is that of its score, which is proportional to the largest score, up to about 5 here.
    magnitude = 5 * float(case.qkv.double().abs().max())
    assert_close(out, true_out, torch.float32, case.length, magnitude)
    assert_close(lse, true_lse, torch.float32, case.length, 5.0)


@pytest.mark.parametrize("heads", PLAIN_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_plain_backward_matches_fp64(lengths: list[int], heads: tuple[int, int, int]) -> None:
    case = Case(lengths, heads, "fp32")
    given = case.backward_inputs()
    (dqkv,) = run_kernel(PLAIN, case.op_bwd, given)
    truth = case.truth_bwd(given[case.out_value], given[case.lse_value])
    # Terms of a sum are up to five times the largest result, because they cancel, and scores have errors of their own.
    assert_close(dqkv, truth, torch.float32, case.length, 5 * float(truth.abs().max()))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("heads", [(4, 2, 64), (2, 1, 256), (2, 2, 136)], ids=str)
def test_plain_kernels_with_a_window_a_scale_and_a_cap_match_fp64(heads: tuple[int, int, int], scores: str) -> None:
    """A window begins inside a tile, at its edge, and before a document; heads of 256 have tiles of half the rows."""
    case = Case([1, 7, 63, 0, 64, 65, 100, 130], heads, "fp32", **SCORES[scores])
    out, lse = run_kernel(PLAIN, case.op, case.given)
    true_out, true_lse = case.truth()
    assert_close(out, true_out, torch.float32, case.length, 5 * float(case.qkv.double().abs().max()))
    assert_close(lse, true_lse, torch.float32, case.length, 5.0)
    given = case.backward_inputs()
    (dqkv,) = run_kernel(PLAIN, case.op_bwd, given)
    truth = case.truth_bwd(given[case.out_value], given[case.lse_value])
    assert_close(dqkv, truth, torch.float32, case.length, 5 * float(truth.abs().max()))


@pytest.mark.parametrize("scores", [{}, *SCORES.values()], ids=["plain", *SCORES])
@pytest.mark.parametrize("heads", MMA_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_tensor_cores_match_fp64(lengths: list[int], heads: tuple[int, int, int], scores: dict[str, float]) -> None:
    """`run_kernel` also compares the bits of two runs. The tolerances are those of cuDNN, which rounds the same."""
    case = Case(lengths, heads, "bf16", **scores)
    out, lse = run_kernel(MMA, case.op, case.given)
    true_out, true_lse = case.truth()
    assert_documents_close(case, out, true_out, [case.dout.shape[1]], 2.0**-8)
    assert float((lse.double() - true_lse).abs().max()) < 1e-4
    given = case.backward_inputs()
    (dqkv,) = run_kernel(MMA, case.op_bwd, given)
    truth = case.truth_bwd(given[case.out_value], given[case.lse_value])
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


@pytest.mark.parametrize("bias", [0.0, 10.0, 100.0])
@pytest.mark.parametrize(
    ("dtype", "kernels", "backend"),
    [
        ("fp32", PLAIN, SDPBackend.MATH),
        ("bf16", MMA, SDPBackend.MATH),
        ("bf16", CUDNN, SDPBackend.FLASH_ATTENTION),
    ],
)
def test_backward_of_keys_that_are_nearly_alike(
    dtype: str, kernels: tuple[KernelDef, ...], backend: SDPBackend, bias: float
) -> None:
    """The error against float64 beside that of torch's SDPA by the plain formula, on the same GPU and inputs.

    Flash attention takes rowsum(dout out) for rowsum(p dp). Rows of ds then sum to the rounding of out, not to zero,
    and that sum multiplies what all keys share: with a key bias of 100, dq of cuDNN in bf16 is 150 times as far from
    float64 as that of the plain formula. So cuDNN is compared with torch's flash attention, which has the same
    formula. The kernels of this project correct the sum and are compared with the plain formula. Prints the ratios.
    """
    case = Case([48, 16], (4, 2, 64), dtype)
    n_heads, n_kv_heads, size = 4, 2, 64
    case.qkv[:, case.pieces[0] : sum(case.pieces[:2])] += (bias * torch.randn(case.pieces[1])).to(case.qkv.dtype)
    case.qkv[:, : case.pieces[0]] *= 0.1
    (ours,) = _launch(kernels, case.op_bwd, case.backward_inputs())[0]

    def gradient(wide: torch.dtype, device: str) -> Tensor:
        leaf = case.qkv.to(device, wide).requires_grad_()
        outs = []
        for start, stop in case.documents:
            q, k, v = (x[start:stop].unflatten(1, (-1, size)).transpose(0, 1) for x in leaf.split(case.pieces, 1))
            k, v = (x.repeat_interleave(n_heads // n_kv_heads, dim=0) for x in (k, v))
            with sdpa_kernel(SDPBackend.MATH if device == "cpu" else backend):
                outs.append(
                    torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
                )
        out = torch.cat([o.transpose(0, 1).flatten(1) for o in outs])
        (found,) = torch.autograd.grad(out, leaf, case.dout.to(device, wide))
        return found.double().cpu()

    exact, torchs = gradient(torch.float64, "cpu"), gradient(TORCH[dtype], "cuda")
    for name, mine, theirs, truth in zip(
        ("dq", "dk", "dv"), *(x.double().split(case.pieces, 1) for x in (ours, torchs, exact)), strict=True
    ):
        ratio = float((mine - truth).norm() / (theirs - truth).norm())
        print(f"{dtype} bias {bias:g} {name}: {relative_error(mine, truth):.1e}, {ratio:.2f} times torch's")
        assert ratio <= 2, f"{name}: {ratio:.2f} times as far from float64 as torch's SDPA"


def run_cudnn(op: Op, given: dict[Value, Tensor], deterministic: Deterministic = "true") -> list[Tensor]:
    """Run eagerly and captured, and return the outputs on the CPU.

    Eager and captured results must be bit-identical if `deterministic` is "true". The workspace is not compared.
    """
    binding = bind_kernel(CUDNN, op, given, deterministic=deterministic)
    assert not binding.notices
    if deterministic == "true":
        eager_and_graph(binding.launch, list(binding.buffers.values()), scratch=binding.workspaces)
    else:
        _captured(binding)
    for buffer in binding.everything:
        buffer.check()
    return [binding.buffers[out].tensor.cpu() for out in op.outs]


def _captured(binding: Binding) -> None:
    """Run eagerly, then capture and replay. The buffers then hold the outputs of the replay."""
    binding.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    for buffer in binding.buffers.values():
        if buffer.constant is None:
            buffer.tensor.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()


def assert_documents_close(case: Case, ours: Tensor, truth: Tensor, pieces: list[int], allowed: float) -> None:
    """Check that in every document and group of columns, the error is at most `allowed` times the document's norm."""
    assert ours.isfinite().all()
    for start, stop in case.documents:
        scale = float(truth[start:stop].norm())
        for a, b in zip(torch.split(ours.double(), pieces, 1), torch.split(truth, pieces, 1), strict=True):
            error = float((a[start:stop] - b[start:stop]).norm()) / scale
            assert error <= allowed, f"tokens {start} to {stop}: {error:.2g}"


@pytest.mark.parametrize("heads", CUDNN_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_cudnn_forward_matches_fp64(lengths: list[int], heads: tuple[int, int, int]) -> None:
    case = Case(lengths, heads, "bf16")
    out, lse = run_cudnn(case.op, case.given)
    true_out, true_lse = case.truth()
    # p is rounded to bf16 before the second product, and out is rounded too: two errors of half a unit of 2^-8, with an
    # rms of about 0.6 each.
    assert_documents_close(case, out, true_out, [case.dout.shape[1]], 2.0**-8)
    assert float((lse.double() - true_lse).abs().max()) < 1e-4  # fp32 with approximate exponentials


@pytest.mark.parametrize("deterministic", ["true", "false"])
@pytest.mark.parametrize("heads", CUDNN_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_cudnn_backward_matches_fp64(
    lengths: list[int], heads: tuple[int, int, int], deterministic: Deterministic
) -> None:
    case = Case(lengths, heads, "bf16")
    given = case.backward_inputs()
    (dqkv,) = run_cudnn(case.op_bwd, given, deterministic)
    truth = case.uncorrected_bwd(given[case.out_value], given[case.lse_value])
    # p, ds and the result are rounded to bf16; dk and dv of each query head may be.
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


@pytest.mark.parametrize("heads", ROW_HEADS, ids=str)
@pytest.mark.parametrize("lengths", ROWS)
def test_dense_forward_matches_fp64(lengths: list[int], heads: tuple[int, int, int]) -> None:
    case = Case(lengths, heads, "bf16", unused=0)
    assert shape_of(case.op).dense
    out, lse = run_cudnn(case.op, case.given)
    true_out, true_lse = case.truth()
    assert_documents_close(case, out, true_out, [case.dout.shape[1]], 2.0**-8)
    assert float((lse.double() - true_lse).abs().max()) < 1e-4


@pytest.mark.parametrize("deterministic", ["true", "false"])
@pytest.mark.parametrize("heads", ROW_HEADS, ids=str)
@pytest.mark.parametrize("lengths", ROWS)
def test_dense_backward_matches_fp64(
    lengths: list[int], heads: tuple[int, int, int], deterministic: Deterministic
) -> None:
    case = Case(lengths, heads, "bf16", unused=0)
    given = case.backward_inputs()
    (dqkv,) = run_cudnn(case.op_bwd, given, deterministic)
    truth = case.uncorrected_bwd(given[case.out_value], given[case.lse_value])
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 2, 128), (4, 2, 256)], ids=str)
@pytest.mark.parametrize(("lengths", "unused"), [([300] * 2, 0), ([7, 0, 40, 41, 300, 1], 3)], ids=["dense", "ragged"])
def test_cudnn_with_a_window_and_a_scale_matches_fp64(
    lengths: list[int], unused: int, heads: tuple[int, int, int]
) -> None:
    """Every algorithm of the backward: kept scores must not read those that the window leaves out."""
    case = Case(lengths, heads, "bf16", unused, **WINDOW_AND_SCALE)
    out, lse = run_cudnn(case.op, case.given)
    true_out, true_lse = case.truth()
    assert_documents_close(case, out, true_out, [case.dout.shape[1]], 2.0**-8)
    assert float((lse.double() - true_lse).abs().max()) < 1e-4
    given = case.backward_inputs()
    truth = case.uncorrected_bwd(given[case.out_value], given[case.lse_value])
    for algorithm in algorithms(case):
        first, second = gradients(case, algorithm, packed_dkv=packs_dkv(shape_of(case.op_bwd)), runs=2)
        assert_documents_close(case, first, truth, case.pieces, 2.0**-7)
        assert not algorithm.deterministic or torch.equal(first, second), algorithm


@pytest.mark.parametrize("heads", [(8, 2, 128), (4, 4, 64)], ids=str)
def test_dense_and_ragged_graphs_agree(heads: tuple[int, int, int]) -> None:
    """One empty document makes the graphs ragged. Each result is within the tolerance of fp64 of the other."""
    results: list[list[Tensor]] = []
    for unused in (0, 1):
        torch.manual_seed(0)
        case = Case([192] * 3, heads, "bf16", unused)
        assert shape_of(case.op).dense is (unused == 0)
        forward = run_cudnn(case.op, case.given)
        given = {**case.given_bwd, case.out_value: forward[0], case.lse_value: forward[1]}
        results.append([*forward, *run_cudnn(case.op_bwd, given)])
    for dense, ragged, allowed in zip(*results, (2.0**-7, 1e-5, 2.0**-6), strict=True):
        assert relative_error(dense, ragged) < allowed


@pytest.mark.exhaustive
@pytest.mark.parametrize("unused", [0, 60])
def test_cudnn_agrees_with_the_kernels_of_this_project_on_long_rows(unused: int) -> None:
    """Realistic sizes: two rows of 4096 tokens. `unused` is the number of empty documents after the last."""
    case = Case([4096, 1, 2500, 1595], (16, 8, 128), "bf16", unused)
    results: dict[str, list[Tensor]] = {}
    for name, kernels in (("own", MMA), ("cudnn", CUDNN)):
        forward, _ = _launch(kernels, case.op, case.given)
        given = {**case.given_bwd, case.out_value: forward[0], case.lse_value: forward[1]}
        backward, _ = _launch(kernels, case.op_bwd, given)
        results[name] = [*forward, *backward]
    for own, cudnn, allowed in zip(results["own"], results["cudnn"], (2.0**-7, 1e-5, 2.0**-6), strict=True):
        assert cudnn.isfinite().all()
        assert relative_error(cudnn, own) < allowed


def _launch(kernels: Sequence[KernelDef], op: Op, given: dict[Value, Tensor]) -> tuple[list[Tensor], Binding]:
    binding = bind_kernel(kernels, op, given)
    binding.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for buffer in binding.everything:
        buffer.check()
    return [binding.buffers[out].tensor.cpu() for out in op.outs], binding


# ---------------------------------------------------------------------------------------------- routes and head groups


def algorithms(case: Case) -> list[BackwardAlgorithm]:
    """Return the algorithms of the installed cuDNN: every route with every number of head groups."""
    from surogate_recipes_bf16 import _C

    kv_heads = shape_of(case.op_bwd).kv_heads
    ordered = [Route.ORDERED] if _C.cudnn_version() >= ORDERED_CUDNN else []
    return [
        BackwardAlgorithm(route, n)
        for route in (Route.ANY_ORDER, Route.KEPT_SCORES, *ordered)
        for n in range(1, kv_heads + 1)
        if kv_heads % n == 0
    ]


def gradients(
    case: Case,
    algorithm: BackwardAlgorithm,
    *,
    packed_dkv: bool,
    runs: int = 1,
    chunks: int = 1,
    given: dict[Value, Tensor] | None = None,
) -> list[Tensor]:
    """Return dqkv of each run of a plan. The workspace is filled with NaN before each run.

    `given`: the inputs, by default with the out and lse of the forward reference.
    Checks that the plan does not exceed its workspace, and that the workspace does not exceed its bound.
    """
    from surogate_recipes_bf16 import _C

    shape = shape_of(case.op_bwd)
    packed = packed_dkv, packs_dq(shape, algorithm)
    plan = _C.CudnnAttentionBackward(*shape.plan, algorithm.route, algorithm.groups, *packed, chunks)
    size = plan.workspace_bytes()
    if packed_dkv == packs_dkv(shape):
        assert size <= algorithm_bytes(of_chunk(shape, chunks), algorithm)
    given = given or case.backward_inputs()
    tensors = [given[value].cuda() for value in case.op_bwd.ins]
    workspace = guarded((size,), torch.uint8)
    dqkv = guarded(tuple(tensors[1].shape), torch.bfloat16)
    results = []
    for _ in range(runs):
        dqkv.poison()
        workspace.poison()
        pointers = [*(t.data_ptr() for t in tensors), dqkv.pointer, workspace.pointer]
        plan.run(*pointers, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        dqkv.check()
        workspace.check()
        results.append(dqkv.tensor.cpu())
    return results


ODD = [([200, 1, 55], (8, 2, 64)), ([129, 0, 300, 2], (6, 3, 96)), ([77, 64], (5, 5, 16)), ([301], (12, 6, 128))]
"""Odd numbers of tokens, so that lse of the second and later groups is not aligned to 16 bytes."""
EQUAL = [([201] * 2, (8, 2, 64)), ([129] * 3, (6, 3, 96)), ([128] * 2, (5, 5, 16)), ([301], (12, 6, 128))]


@pytest.mark.parametrize("packed_dkv", [False, True])
@pytest.mark.parametrize(
    ("lengths", "heads", "unused"), [*((*odd, 3) for odd in ODD), *((*equal, 0) for equal in EQUAL)], ids=str
)
def test_every_algorithm_matches_fp64_and_deterministic_ones_repeat_their_bits(
    lengths: list[int], heads: tuple[int, int, int], unused: int, packed_dkv: bool
) -> None:
    case = Case(lengths, heads, "bf16", unused)
    given = case.backward_inputs()
    truth = case.uncorrected_bwd(given[case.out_value], given[case.lse_value])
    for algorithm in algorithms(case):
        first, second, third = gradients(case, algorithm, packed_dkv=packed_dkv, runs=3)
        assert_documents_close(case, first, truth, case.pieces, 2.0**-7)
        if algorithm.deterministic:
            assert torch.equal(first, second) and torch.equal(first, third), algorithm


@pytest.mark.parametrize("unused", [0, 3], ids=["dense", "ragged"])
def test_groups_of_heads_change_no_bit(unused: int) -> None:
    """But those of dq where they change from run to run anyway."""
    case = Case([512] * 2, (8, 4, 128), "bf16", unused)
    shape = shape_of(case.op_bwd)
    columns = shape.heads * shape.head_dim
    whole: dict[Route, Tensor] = {}
    for algorithm in algorithms(case):
        (dqkv,) = gradients(case, algorithm, packed_dkv=packs_dkv(shape))
        before = whole.setdefault(algorithm.route, dqkv)
        assert torch.equal(dqkv[:, columns:], before[:, columns:]), algorithm
        assert not algorithm.deterministic or torch.equal(dqkv, before), algorithm
        assert relative_error(dqkv[:, :columns], before[:, :columns]) < 2.0**-8


def test_a_number_of_groups_that_does_not_divide_the_heads_is_rejected() -> None:
    from surogate_recipes_bf16 import _C

    with pytest.raises(ValueError, match=r"attention_bwd: 3 kv_heads cannot be divided into 2 groups"):
        _C.CudnnAttentionBackward(64, 1, 64, 6, 3, 64, 0, 0.125, Route.KEPT_SCORES, 2, True, False, 1)


# ------------------------------------------------------------------------ out and lse that are not those of attention

MIXED = [1, 7, 63, 0, 64, 65, 100, 130]
"""A window begins inside a tile, at its edge, and before a document."""


def truth_of_sinks(case: Case, given: dict[Value, Tensor], allowed: float) -> Tensor:
    """Return the backward by what is given, in fp64, which differs from that by a softmax of the keys alone."""
    out, lse = given[case.out_value], given[case.lse_value]
    truth = case.uncorrected_bwd(out, lse)
    assert relative_error(case.truth_bwd(out, lse), truth) > 10 * allowed
    return truth


@pytest.mark.parametrize("scores", [{}, {"window": 40}, *SCORES.values()], ids=["plain", "window", *SCORES])
@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 128), (4, 2, 256)], ids=str)
def test_plain_backward_of_sinks_is_by_the_out_and_lse_that_it_is_given(
    heads: tuple[int, int, int], scores: dict[str, float]
) -> None:
    case = Case(MIXED, heads, "fp32", **scores)
    given = case.inputs_of_sinks()
    truth = truth_of_sinks(case, given, 1e-3)
    (dqkv,) = run_kernel(PLAIN, case.op_of_others, given)
    assert_close(dqkv, truth, torch.float32, case.length, 5 * float(truth.abs().max()))


@pytest.mark.parametrize("scores", [{}, {"window": 40}, *SCORES.values()], ids=["plain", "window", *SCORES])
@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 128), (4, 2, 256)], ids=str)
def test_tensor_cores_backward_of_sinks_is_by_the_out_and_lse_that_it_is_given(
    heads: tuple[int, int, int], scores: dict[str, float]
) -> None:
    case = Case(MIXED, heads, "bf16", **scores)
    given = case.inputs_of_sinks()
    truth = truth_of_sinks(case, given, 2.0**-7)
    (dqkv,) = run_kernel(MMA, case.op_of_others, given)
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


@pytest.mark.parametrize("scores", [{}, WINDOW_AND_SCALE], ids=["plain", "window"])
@pytest.mark.parametrize("heads", [(8, 2, 64), (4, 1, 128), (4, 2, 256)], ids=str)
@pytest.mark.parametrize(("lengths", "unused"), [([300] * 2, 0), (MIXED, 3)], ids=["dense", "ragged"])
def test_cudnn_backward_of_sinks_is_by_the_out_and_lse_that_it_is_given(
    lengths: list[int], unused: int, heads: tuple[int, int, int], scores: dict[str, float]
) -> None:
    """Every algorithm of the backward, and the one that a run takes."""
    case = Case(lengths, heads, "bf16", unused, **scores)
    given = case.inputs_of_sinks()
    truth = truth_of_sinks(case, given, 2.0**-7)
    (dqkv,) = run_cudnn(case.op_of_others, given)
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)
    for algorithm in algorithms(case):
        (dqkv,) = gradients(case, algorithm, packed_dkv=packs_dkv(shape_of(case.op_bwd)), given=given)
        assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


@pytest.mark.parametrize("own", [True, False], ids=["own", "sinks"])
@pytest.mark.parametrize("scores", [{}, {"window": 40}, *SCORES.values()], ids=["plain", "window", *SCORES])
@pytest.mark.parametrize("heads", [(4, 2, 64), (4, 1, 128), (4, 2, 256)], ids=str)
@pytest.mark.parametrize(("dtype", "kernels", "allowed"), [("fp32", PLAIN, 1e-5), ("bf16", MMA, 2.0**-7)])
def test_a_gradient_of_lse_is_added(
    dtype: str,
    kernels: tuple[KernelDef, ...],
    allowed: float,
    heads: tuple[int, int, int],
    scores: dict[str, float],
    own: bool,
) -> None:
    """Rows of ds sum to it. It has the size of dp, so that dq and dk are others without it."""
    case = Case(MIXED, heads, dtype, **scores)
    given = case.backward_inputs() if own else case.inputs_of_sinks()
    dlse = torch.randn_like(given[case.lse_value]) * heads[2] ** 0.5
    op = case.op_bwd if own else case.op_of_others
    value = Value(name="dlse", shape=tuple(dlse.shape), dtype="fp32", role="act")
    ins = [given[value].double() if given[value].is_floating_point() else given[value] for value in op.ins]
    truth = reference.attention_bwd(*ins, dlse.double(), **op.attrs)
    assert relative_error(reference.attention_bwd(*ins, **op.attrs), truth) > 10 * allowed
    (dqkv,) = run_kernel(kernels, replace(op, ins=(*op.ins, value)), {**given, value: dlse})
    assert_documents_close(case, dqkv, truth, case.pieces, allowed)


@pytest.mark.parametrize(("dtype", "kernels"), [("fp32", PLAIN), ("bf16", MMA), ("bf16", CUDNN)])
def test_the_backward_without_correction_is_that_with_it_but_for_rounding(
    dtype: str, kernels: tuple[KernelDef, ...]
) -> None:
    """Of attention's own out and lse. cuDNN corrects nothing, so it gives the same bits."""
    case = Case(MIXED, (4, 2, 64), dtype)
    given = case.backward_inputs()
    own, other = (_launch(kernels, op, given)[0][0] for op in (case.op_bwd, case.op_of_others))
    assert relative_error(own, other) < (1e-5 if dtype == "fp32" else 2.0**-7)
    assert kernels is not CUDNN or torch.equal(own, other)


# -------------------------------------------------------------------------------------------------------------- chunks

CHUNKED = [
    ([128] * 4, (8, 2, 64), 0, 4),
    ([192] * 6, (6, 2, 96), 0, 3),
    ([77] * 4, (4, 2, 128), 0, 2),
    ([100, 28, 128, 1, 127, 64, 0, 64], (8, 2, 64), 5, 4),
    ([300, 84, 384, 5, 379, 384], (4, 4, 128), 3, 2),
]
"""(lengths, heads, unused documents, chunks): whole documents in every chunk, of equal and of different lengths."""


@pytest.mark.parametrize(("lengths", "heads", "unused", "chunks"), CHUNKED, ids=str)
def test_chunks_give_the_bits_of_the_whole(
    lengths: list[int], heads: tuple[int, int, int], unused: int, chunks: int
) -> None:
    """And what may differ from run to run is as close to the reference. Unused documents stand at the end."""
    case = Case(lengths, heads, "bf16", unused)
    given = case.backward_inputs()
    truth = case.uncorrected_bwd(given[case.out_value], given[case.lse_value])
    for algorithm in algorithms(case):
        for packed_dkv in (False, True):
            (whole,) = gradients(case, algorithm, packed_dkv=packed_dkv)
            first, second = gradients(case, algorithm, packed_dkv=packed_dkv, runs=2, chunks=chunks)
            assert_documents_close(case, first, truth, case.pieces, 2.0**-7)
            if algorithm.deterministic:
                assert torch.equal(first, second) and torch.equal(first, whole), algorithm


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("dtype", "kernels"), [("fp32", PLAIN), ("bf16", MMA)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("lengths", "heads", "unused", "chunks"), CHUNKED, ids=str)
def test_chunks_of_this_projects_kernels_give_the_bits_of_the_whole(
    lengths: list[int],
    heads: tuple[int, int, int],
    unused: int,
    chunks: int,
    dtype: str,
    kernels: tuple[KernelDef, ...],
    window: int,
) -> None:
    case = Case(lengths, heads, dtype, unused, window=window)
    given = case.backward_inputs()
    chunked = replace(case.op_bwd, attrs={**case.attrs, "chunks": chunks})
    (whole,), (first,) = (_launch(kernels, op, given)[0] for op in (case.op_bwd, chunked))
    assert torch.equal(whole, first)


def test_rows_that_cannot_be_divided_into_chunks_are_rejected() -> None:
    from surogate_recipes_bf16 import _C

    with pytest.raises(ValueError, match=r"attention_bwd: 64 tokens cannot be divided into 3 chunks"):
        _C.CudnnAttentionBackward(64, 1, 64, 6, 3, 64, 0, 0.125, Route.KEPT_SCORES, 1, True, False, 3)


def too_large() -> Case:
    """Return a case whose scores exceed the limit even for one group. Most documents are empty, so it runs fast."""
    case = Case([700, 3], (4, 2, 64), "bf16", unused=600)
    assert head_groups(shape_of(case.op_bwd)) == 0
    return case


def test_heads_are_split_into_groups_if_the_scores_of_all_are_too_large() -> None:
    case = Case([700, 3], (8, 4, 64), "bf16", unused=150)
    shape = shape_of(case.op_bwd)
    assert score_bytes(shape) > SCORE_BYTES_LIMIT
    assert 1 < head_groups(shape) <= 4
    given = case.backward_inputs()
    truth = case.uncorrected_bwd(given[case.out_value], given[case.lse_value])
    (dqkv,) = run_cudnn(case.op_bwd, given, "true")
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


def test_a_nondeterministic_backward_is_a_notice_with_auto_and_an_error_with_true() -> None:
    from surogate_recipes_bf16 import _C

    case = too_large()
    given = case.backward_inputs()
    binding = bind_kernel(CUDNN, case.op_bwd, given)
    if backward_algorithm(shape_of(case.op_bwd), Target(DEVICES["h200"]), _C.cudnn_version()).deterministic:
        assert not binding.notices
        run_cudnn(case.op_bwd, given, "true")
    else:
        assert len(binding.notices) == 1 and "may differ in their last bits" in binding.notices[0]
        with pytest.raises(ConfigError, match="deterministic: true cannot be kept by attention_bwd"):
            bind_kernel(CUDNN, case.op_bwd, given, deterministic="true")
    (dqkv,) = run_cudnn(case.op_bwd, given, "false")
    truth = case.uncorrected_bwd(given[case.out_value], given[case.lse_value])
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


@pytest.mark.parametrize("name", ["attention_plain", "attention_mma"])
def test_errors_name_the_invalid_argument(name: str) -> None:
    from surogate_recipes_bf16 import _C

    launch, x = getattr(_C, name), torch.zeros(4096, device="cuda")
    p, stream = x.data_ptr(), torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match=rf"{name}: lse is a null pointer"):
        launch(p, p, p, 0, 4, 1, 2, 1, 32, 0, 1.0, 0.0, stream)
    with pytest.raises(ValueError, match=r"3 heads cannot share 2 kv_heads"):
        launch(p, p, p, p, 4, 1, 3, 2, 32, 0, 1.0, 0.0, stream)
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8 up to 256, got 264"):
        launch(p, p, p, p, 4, 1, 2, 1, 264, 0, 1.0, 0.0, stream)
    with pytest.raises(ValueError, match=r"window must not be negative, got -1"):
        launch(p, p, p, p, 4, 1, 2, 1, 32, -1, 1.0, 0.0, stream)
    with pytest.raises(ValueError, match=r"qkv must be aligned to 16 bytes"):
        launch(p + 4, p, p, p, 4, 1, 2, 1, 32, 0, 1.0, 0.0, stream)
