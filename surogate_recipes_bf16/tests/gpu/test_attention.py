"""Attention kernels against the reference in fp64, document by document."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from surogate_core.api import KernelDef, Op, Value
from surogate_core.memory.devices import DEVICES
from surogate_core.reference import ops as reference
from surogate_core.testing.binding import Binding, bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, eager_and_graph, relative_error
from surogate_recipes_bf16.kernels.attention import CUDNN, PLAIN, Shape, backward_way, shape_of

pytestmark = pytest.mark.gpu

TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}

DOCUMENTS = cases(
    {"edges of tiles": [1, 7, 63, 64, 65, 100], "empty ones": [0, 5, 0, 0, 130, 0, 1, 2]},
    more={"whole row": [300], "single tokens": [1] * 67, "rows": [128] * 4},
)
HEADS = [(4, 2, 64), (3, 3, 96), (4, 1, 128), (8, 4, 32), (4, 2, 16)]
"""n_heads, n_kv_heads, head_dim; the plain kernel is compiled for the first four sizes of a head."""
PLAIN_HEADS = cases(HEADS[:4], more=[*HEADS[4:], (2, 1, 80)])
CUDNN_HEADS = cases(HEADS[:1], more=HEADS[1:])


class Case:
    """Random inputs, the two ops on them and what they should give."""

    def __init__(self, lengths: Sequence[int], heads: tuple[int, int, int], dtype: str, unused: int = 3) -> None:
        n_heads, n_kv_heads, head_dim = heads
        tokens = sum(lengths)
        ends = torch.tensor([0, *lengths]).cumsum(0)
        self.cu_seqlens = torch.cat([ends, torch.full((unused,), tokens)]).to(torch.int32)
        self.documents = [(int(a), int(b)) for a, b in pairwise(ends) if b > a]
        self.attrs = {
            "n_heads": n_heads,
            "n_kv_heads": n_kv_heads,
            "head_dim": head_dim,
            "seq_len": max(2, *lengths),
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
        """From the out and lse that the kernel is given."""
        return reference.attention_bwd(
            self.dout.double(), self.qkv.double(), out.double(), lse.double(), self.cu_seqlens, **self.attrs
        )

    def backward_inputs(self) -> dict[Value, Tensor]:
        """With out and lse as a forward would leave them."""
        out, lse = self.truth()
        return {**self.given_bwd, self.out_value: out.to(self.qkv.dtype), self.lse_value: lse.float()}

    @property
    def length(self) -> int:
        """Terms of the longest sum: a score, then all queries of a group for one key."""
        share = self.attrs["n_heads"] // self.attrs["n_kv_heads"]
        return self.attrs["head_dim"] + share * self.attrs["seq_len"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", PLAIN_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_plain_forward_matches_fp64(lengths: list[int], heads: tuple[int, int, int], dtype: str) -> None:
    case = Case(lengths, heads, dtype)
    out, lse = run_kernel(PLAIN, case.op, case.given)
    true_out, true_lse = case.truth()
    # A weight is off by the error of its score, which is of the size of the largest score, up to about 5 here.
    magnitude = 5 * float(case.qkv.double().abs().max())
    assert_close(out, true_out, TORCH[dtype], case.length, magnitude)
    assert_close(lse, true_lse, torch.float32, case.length, 5.0)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", PLAIN_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_plain_backward_matches_fp64(lengths: list[int], heads: tuple[int, int, int], dtype: str) -> None:
    case = Case(lengths, heads, dtype)
    given = case.backward_inputs()
    (dqkv,) = run_kernel(PLAIN, case.op_bwd, given)
    truth = case.truth_bwd(given[case.out_value], given[case.lse_value])
    # Terms of a sum are up to five times the largest result: they cancel, and scores carry errors of their own size.
    assert_close(dqkv, truth, TORCH[dtype], case.length, 5 * float(truth.abs().max()))


def run_cudnn(op: Op, given: dict[Value, Tensor], *, repeatable: bool) -> list[Tensor]:
    """Outputs on the CPU; eager and captured, bits compared if `repeatable`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that bits may differ
        binding = bind_kernel(CUDNN, op, given)
    if repeatable:
        eager_and_graph(binding.launch, list(binding.buffers.values()), scratch=binding.workspaces)
    else:
        _captured(binding)
    for buffer in binding.everything:
        buffer.check()
    return [binding.buffers[out].tensor.cpu() for out in op.outs]


def _captured(binding: Binding) -> None:
    """Run eagerly, then captured; the outputs are those of the replay."""
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
    """In every document and every group of columns the error is a small part of the document's norm."""
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
    out, lse = run_cudnn(case.op, case.given, repeatable=True)
    true_out, true_lse = case.truth()
    # p is rounded to bf16 before the second product, and out once more: two half units of 2^-8, rms about 0.6 each.
    assert_documents_close(case, out, true_out, [case.dout.shape[1]], 2.0**-8)
    assert float((lse.double() - true_lse).abs().max()) < 1e-4  # fp32 with approximate exponentials


@pytest.mark.parametrize("heads", CUDNN_HEADS, ids=str)
@pytest.mark.parametrize("lengths", DOCUMENTS)
def test_cudnn_backward_matches_fp64(lengths: list[int], heads: tuple[int, int, int]) -> None:
    from surogate_recipes_bf16 import _C

    case = Case(lengths, heads, "bf16")
    given = case.backward_inputs()
    way = backward_way(shape_of(case.op_bwd), DEVICES["h200"], _C.cudnn_version())
    (dqkv,) = run_cudnn(case.op_bwd, given, repeatable=way.deterministic)
    truth = case.truth_bwd(given[case.out_value], given[case.lse_value])
    # p and ds are rounded to bf16, dk and dv of each query head may be, and the result is.
    assert_documents_close(case, dqkv, truth, case.pieces, 2.0**-7)


@pytest.mark.exhaustive
@pytest.mark.parametrize("unused", [0, 60])
def test_cudnn_agrees_with_the_plain_kernel_on_long_rows(unused: int) -> None:
    """Real sizes: two rows of 4096 tokens. `unused`: empty documents behind the last."""
    case = Case([4096, 1, 2500, 1595], (16, 8, 128), "bf16", unused)
    results: dict[str, list[Tensor]] = {}
    for name, kernels in (("plain", PLAIN), ("cudnn", CUDNN)):
        forward, _ = _launch(kernels, case.op, case.given)
        given = {**case.given_bwd, case.out_value: forward[0], case.lse_value: forward[1]}
        backward, _ = _launch(kernels, case.op_bwd, given)
        results[name] = [*forward, *backward]
    for plain, cudnn, allowed in zip(results["plain"], results["cudnn"], (2.0**-7, 1e-5, 2.0**-6), strict=True):
        assert cudnn.isfinite().all()
        assert relative_error(cudnn, plain) < allowed


def _launch(kernels: Sequence[KernelDef], op: Op, given: dict[Value, Tensor]) -> tuple[list[Tensor], Binding]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        binding = bind_kernel(kernels, op, given)
    binding.launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for buffer in binding.everything:
        buffer.check()
    return [binding.buffers[out].tensor.cpu() for out in op.outs], binding


@pytest.mark.parametrize("packed_dkv", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_backward_plan_gives_the_same_gradients(deterministic: bool, packed_dkv: bool) -> None:
    from surogate_recipes_bf16 import _C

    case = Case([200, 1, 55], (8, 2, 64), "bf16")
    shape: Shape = shape_of(case.op_bwd)
    plan = _C.CudnnAttentionBackward(*shape.plan, deterministic, packed_dkv, 1 << 30)
    given = case.backward_inputs()
    tensors = [given[value].cuda() for value in case.op_bwd.ins]
    dqkv = torch.full_like(tensors[1], float("nan"))
    workspace = torch.empty(plan.workspace_bytes(), dtype=torch.uint8, device="cuda")
    pointers = [t.data_ptr() for t in (*tensors, dqkv, workspace)]
    bits = set()
    for _ in range(3):
        dqkv.fill_(float("nan"))
        plan.run(*pointers, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        bits.add(dqkv.cpu().view(torch.int16).numpy().tobytes())
    assert len(bits) == 1 or not deterministic
    truth = case.truth_bwd(given[case.out_value], given[case.lse_value])
    assert_documents_close(case, dqkv.cpu(), truth, case.pieces, 2.0**-7)


def test_arguments_are_checked() -> None:
    from surogate_recipes_bf16 import _C

    x = torch.zeros(4096, device="cuda")
    p, stream = x.data_ptr(), torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match=r"attention_plain: lse is a null pointer"):
        _C.attention_plain(p, p, p, 0, 4, 1, 2, 1, 32, 0, stream)
    with pytest.raises(ValueError, match=r"3 heads cannot share 2 kv_heads"):
        _C.attention_plain(p, p, p, p, 4, 1, 3, 2, 32, 0, stream)
    with pytest.raises(ValueError, match=r"head_dim must be a multiple of 8 up to 128, got 136"):
        _C.attention_plain(p, p, p, p, 4, 1, 2, 1, 136, 0, stream)
    with pytest.raises(ValueError, match=r"qkv must be aligned to 16 bytes"):
        _C.attention_plain(p + 4, p, p, p, 4, 1, 2, 1, 32, 0, stream)
    with pytest.raises(ValueError, match=r"dtype must be fp32 or bf16, got int32"):
        _C.attention_plain(p, p, p, p, 4, 1, 2, 1, 32, 3, stream)
