"""FP8 products of groups of rows, bound through their KernelDefs and compared with fp64 for groups of any size.

Allowed errors are those of `test_products.py`: the tensor cores are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import UNIT, guarded, same_bits
from surogate_recipes_fp8.kernels.groups import KERNELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="the kernel needs an SM90"
    ),
]

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
EXACT, FAST = 3e-4, 3e-3
"""Allowed relative rms errors of sums."""
NAN = 0x7F

FORWARD, FORWARD_EXACT = ("e4m3", False, True), ("e4m3", False, False)
BACKWARD, BACKWARD_FAST = ("e5m2", True, False), ("e5m2", True, True)
MODES = (FORWARD, FORWARD_EXACT, BACKWARD, BACKWARD_FAST, ("e4m3", True, True), ("e5m2", False, False))
"""dtype of a, whether matrices are beside each other, fast sums."""

GROUPS: dict[str, tuple[Sequence[int], int, int]] = {
    # rows of each group; columns of the result, terms
    "one row": ([1], 16, 16),
    "uneven": ([0, 5, 130, 0, 128, 1, 0, 61, 0], 144, 80),
    "one has all": ([0, 0, 300, 0], 272, 48),
    "pairs of tiles": ([130, 0, 5], 512, 1024),
    "more groups than lanes": ([3, 0, 1, 2] * 18, 48, 144),
}
MORE: dict[str, tuple[Sequence[int], int, int]] = {
    "whole tiles": ([128, 256, 128], 256, 256),
    "Qwen3-30B-A3B, up": ([i * 7 % 509 for i in range(128)], 1536, 2048),
    "Qwen3-30B-A3B, down": ([i * 7 % 509 for i in range(128)], 2048, 768),
}


class Product:
    """An op with random operands, and its result in fp64."""

    def __init__(
        self, name: str, mode: tuple[str, bool, bool], *, ranks: int = 0, biased: bool = False, weight: str = "e4m3"
    ) -> None:
        counts, width, terms = (GROUPS | MORE)[name]
        dtype, beside, fast = mode
        rows, groups = sum(counts), len(counts)
        self.bounds = torch.tensor([0, *counts]).cumsum(0).tolist()
        self.tolerance = FAST if fast and dtype == "e4m3" else EXACT
        codes, scale_a, a = quantized((rows, terms), dtype)
        stack, scale_b, b = quantized((groups, width, terms), weight)
        held = stack.permute(1, 0, 2).reshape(width, -1).contiguous() if beside else stack.view(-1, terms)
        tensors = (codes, held, scale_a, scale_b, torch.tensor(self.bounds[1:], dtype=torch.int32))
        dtypes = (dtype, weight, "fp32", "fp32", "int32")
        names = ("a", "b", "scale_a", "scale_b", "ends", "a2", "b2")
        self.truth = torch.cat([a[self.rows(g)] @ b[g].T for g in range(groups)])
        if ranks:
            size = float(self.truth.square().mean().sqrt()) / ranks**0.5
            a2 = torch.randn(rows, ranks).cuda().bfloat16()
            b2 = (size * torch.randn(groups, *((ranks, width) if beside else (width, ranks)))).cuda().bfloat16()
            tensors, dtypes = (*tensors, a2, b2.flatten(0, 1)), (*dtypes, "bf16", "bf16")
            matrices = b2.double() if beside else b2.double().mT
            self.truth += torch.cat([a2[self.rows(g)].double() @ matrices[g] for g in range(groups)])
        if biased:
            bias = (float(self.truth.square().mean().sqrt()) * torch.randn(groups, width)).cuda().bfloat16()
            tensors, dtypes = (*tensors, bias), (*dtypes, "bf16")
            self.truth += torch.cat([bias[g].double().expand(counts[g], -1) for g in range(groups)])
        values = [Value(n, tuple(t.shape), d, "act") for n, t, d in zip(names, tensors, dtypes, strict=False)]
        self.out = Value("d", (rows, width), "bf16", "act")
        self.op = Op("fp8_grouped_linear", tuple(values), (self.out,), {"fast": fast, "beside": beside})
        self.contents: dict[Value, Tensor] = dict(zip(values, tensors, strict=True))

    def rows(self, group: int) -> slice:
        return slice(self.bounds[group], self.bounds[group + 1])

    def run(self) -> Tensor:
        (out,) = run_kernel(KERNELS, self.op, self.contents)
        return out.cuda()


def quantized(shape: Sequence[int], dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return random FP8 numbers, their (decode, encode) scale, and what they stand for in fp64."""
    x = torch.randn(*shape, device="cuda") * 10 ** float(torch.empty(1).uniform_(-3, 1))
    encode = LARGEST[dtype] / x.abs().max()
    q = (x * encode).clamp(-LARGEST[dtype], LARGEST[dtype]).to(TORCH_DTYPES[dtype])
    scale = torch.stack((1 / encode, encode))
    return q, scale, q.float().double() * scale[0].double()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", cases([*GROUPS], more=[*MORE]))
def test_products_of_the_dequantized_operands(name: str, mode: tuple[str, bool, bool]) -> None:
    assert_close(Product(name, mode))


@pytest.mark.parametrize("mode", [FORWARD, FORWARD_EXACT, BACKWARD], ids=str)
@pytest.mark.parametrize(("name", "ranks"), zip([*GROUPS, *MORE], (8, 16, 64, 40, 72, 24, 16, 32), strict=True))
def test_products_of_branches_are_added(name: str, ranks: int, mode: tuple[str, bool, bool]) -> None:
    assert_close(Product(name, mode, ranks=ranks))


@pytest.mark.parametrize("weight", ["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", [FORWARD, FORWARD_EXACT], ids=str)
@pytest.mark.parametrize("name", cases([*GROUPS], more=[*MORE]))
def test_the_bias_of_each_group_is_added(name: str, mode: tuple[str, bool, bool], weight: str) -> None:
    assert_close(Product(name, mode, biased=True, weight=weight))


@pytest.mark.parametrize("mode", [FORWARD, FORWARD_EXACT, BACKWARD], ids=str)
@pytest.mark.parametrize(("name", "ranks"), zip([*GROUPS, *MORE], (0, 16, 64, 40, 0, 24, 0, 32), strict=True))
def test_weights_in_e5m2_are_multiplied(name: str, ranks: int, mode: tuple[str, bool, bool]) -> None:
    assert_close(Product(name, mode, ranks=ranks, weight="e5m2"))


@pytest.mark.parametrize("weight", ["e4m3", "e5m2"])
@pytest.mark.parametrize("mode", [FORWARD, FORWARD_EXACT], ids=str)
def test_a_bias_of_zeros_changes_no_bit(mode: tuple[str, bool, bool], weight: str) -> None:
    x = Product("uneven", mode, biased=True, weight=weight)
    x.contents[x.op.ins[5]].zero_()
    alone = Op(x.op.kind, x.op.ins[:5], x.op.outs, x.op.attrs)
    (expected,) = run_kernel(KERNELS, alone, x.contents)
    assert same_bits(x.run(), expected.cuda())


@pytest.mark.parametrize("mode", [FORWARD, FORWARD_EXACT, BACKWARD], ids=str)
def test_a_branch_of_zeros_changes_no_bit(mode: tuple[str, bool, bool]) -> None:
    x = Product("uneven", mode, ranks=16)
    x.contents[x.op.ins[5]].zero_()
    alone = Op(x.op.kind, x.op.ins[:5], x.op.outs, x.op.attrs)
    (expected,) = run_kernel(KERNELS, alone, x.contents)
    assert same_bits(x.run(), expected.cuda())


def assert_close(x: Product) -> None:
    out = x.run()
    assert out.isfinite().all()
    size = float(x.truth.square().mean().sqrt())
    excess = ((out.double() - x.truth).abs() - UNIT[out.dtype] * x.truth.abs()).clamp(min=0)
    assert float(excess.square().mean().sqrt()) <= x.tolerance * size
    assert float(excess.max()) <= 20 * x.tolerance * size


@pytest.mark.parametrize("mode", [FORWARD, FORWARD_EXACT, BACKWARD], ids=str)
def test_undefined_rows_and_matrices_reach_no_other_group(mode: tuple[str, bool, bool]) -> None:
    """Tiles end within groups, and in the summed dimension within matrices: behind them is the next one's memory."""
    x = Product("uneven", mode)
    clean, first = x.run(), x.bounds[3]  # the first row of the group behind the one with 130
    x.contents[x.op.ins[0]].view(torch.uint8)[first] = NAN
    broken = x.run()
    assert broken.isnan().any(1).nonzero().flatten().tolist() == [first]
    assert same_bits(broken[:first], clean[:first]) and same_bits(broken[first + 1 :], clean[first + 1 :])

    x = Product("uneven", mode)
    whole, (_, width, terms) = x.run(), GROUPS["uneven"]
    codes = x.contents[x.op.ins[1]].view(torch.uint8)
    (codes[:, 4 * terms : 5 * terms] if mode[1] else codes[4 * width : 5 * width]).fill_(NAN)
    broken, own = x.run(), x.rows(4)
    assert broken[own].isnan().all()
    assert same_bits(broken[: own.start], whole[: own.start]) and same_bits(broken[own.stop :], whole[own.stop :])


@pytest.mark.parametrize("mode", [FORWARD, BACKWARD], ids=str)
def test_groups_and_scales_are_read_when_the_product_runs(mode: tuple[str, bool, bool]) -> None:
    """A graph that was captured once follows routes and scales that change from step to step."""
    x = Product("uneven", mode)
    binding = bind_kernel(KERNELS, x.op, x.contents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    out, scale_a, scale_b, ends = (binding.buffers[v].tensor for v in (x.out, *x.op.ins[2:]))
    graph.replay()
    before = out.clone()
    scale_a[0] *= 4
    scale_b[0] /= 2
    graph.replay()
    assert same_bits(out, 2 * before)
    ends.copy_(torch.tensor([0, 0, 0, 0, 325, 325, 325, 325, 325]))
    graph.replay()
    own = x.rows(4)
    assert same_bits(out[own], 2 * before[own]) and not same_bits(out[: own.start], 2 * before[: own.start])
    scale_a[0] = torch.nan  # of a tensor that is not finite
    graph.replay()
    assert out.isnan().all()


@pytest.mark.parametrize("added", [{}, {"ranks": 16}, {"biased": True}], ids=str)
@pytest.mark.parametrize("mode", [FORWARD, FORWARD_EXACT, BACKWARD], ids=str)
@pytest.mark.parametrize("weight", ["e4m3", "e5m2"])
@pytest.mark.parametrize("name", ["uneven", "one has all", "more groups than lanes"])
def test_rows_of_some_groups_have_the_bits_of_the_whole(
    name: str, weight: str, mode: tuple[str, bool, bool], added: dict[str, Any]
) -> None:
    """Other rows are left as they are: a buffer of NaN."""
    if mode[1] and "biased" in added:
        pytest.skip("a bias is of the forward pass")
    x = Product(name, mode, weight=weight, **added)
    whole, (counts, width, terms) = x.run(), GROUPS[name]
    a, b, *rest = x.op.ins
    base, axis, one = Value("base", tuple(whole.shape), "bf16", "act"), int(mode[1]), terms if mode[1] else width
    for first, count in ((0, 2), (1, 3), (len(counts) - 2, 2)):
        held = x.contents[b].view(torch.uint8).narrow(axis, first * one, count * one).contiguous()
        held = held.view(TORCH_DTYPES[weight])
        some = Value("some", tuple(held.shape), weight, "act")
        attrs = {**x.op.attrs, "first": first}
        op = Op("fp8_grouped_linear_part", (base, a, some, *rest), x.op.outs, attrs, in_place={0: 0})
        (found,) = run_kernel(KERNELS, op, {**x.contents, base: torch.zeros_like(whole), some: held})
        found, own = found.cuda(), slice(x.bounds[first], x.bounds[first + count])
        assert same_bits(found[own], whole[own])
        assert found[: own.start].isnan().all() and found[own.stop :].isnan().all()


def test_the_workspace_is_what_the_module_needs() -> None:
    from surogate_recipes_fp8 import _C

    for name, (counts, *_) in GROUPS.items():
        x = Product(name, FORWARD)
        (scratch,) = bind_kernel(KERNELS, x.op, x.contents).workspaces
        assert scratch.tensor.numel() == _C.grouped_fp8_workspace(len(counts))


def test_wrong_arguments_are_named() -> None:
    from surogate_recipes_fp8 import _C

    p = guarded((64,), torch.float32).pointer
    pointers, plain = (p,) * 7, (0, p, p)  # no bias, the result, the workspace
    for arguments, message in (
        ((*pointers, *plain, 8, 12, 16, 1, 5, 5, False, False, 0, 0), "width must be a multiple of 8, got 12"),
        ((*pointers, *plain, 8, 16, 24, 1, 5, 5, False, False, 0, 0), "terms must be a multiple of 16, got 24"),
        ((*pointers, *plain, 8, 16, 16, 0, 5, 5, False, False, 0, 0), "groups must be 1 to 65535, got 0"),
        ((*pointers, *plain, 8, 16, 16, 1, 1, 5, False, False, 0, 0), "a must be e4m3 or e5m2, not bf16"),
        ((*pointers, *plain, 8, 16, 16, 1, 5, 1, False, False, 0, 0), "b must be e4m3 or e5m2, not bf16"),
        ((*pointers, *plain, 8, 16, 16, 1, 5, 5, False, False, 4, 0), "terms2 must be a multiple of 8, got 4"),
        ((*pointers, *plain, 8, 16, 16, 1, 5, 5, True, False, 8, 0), "beside each other where a is e5m2"),
        ((*pointers, p, p, p, 8, 16, 16, 1, 5, 5, False, False, 8, 0), "a bias is added to a product of a in e4m3"),
        ((*pointers, p + 8, p, p, 8, 16, 16, 1, 5, 5, False, False, 0, 0), "bias must be aligned to 16 bytes"),
        ((*pointers, *plain, 8, 16, 16, 1, 5, 5, False, False, 0, -1), "the first group must be 0 to 65535, got -1"),
        ((p + 8, *pointers[1:], *plain, 8, 16, 16, 1, 5, 5, False, False, 0, 0), "a must be aligned to 16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            _C.GroupedFp8(*arguments)
