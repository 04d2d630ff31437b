"""What the kernels of reductions are given: tables, the order of sums, workspace, and whose part a value is.

Functions of torch stand for the compiled ones, and numbers for addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import DTYPES, KernelDef, Op, Shard, Target, Value
from surogate_core.reference import collectives
from surogate_core.reference import ops as reference
from surogate_core.testing.binding import choose
from surogate_core.testing.devices import DEVICES
from surogate_recipes_bf16.kernels.reductions import CHUNK_SIZE, KERNELS

H200 = Target(DEVICES["h200"])
OUTS = tuple(Value(name, (), "fp32", "act") for name in ("norm", "clip_coef"))
SIZES = (1000, 2 * CHUNK_SIZE + 5, 7)


def gradients(*sizes: int, **fields: Any) -> tuple[Value, ...]:
    return tuple(Value(f"g{i}", (size,), ("fp32", "bf16")[i % 2], "grad", **fields) for i, size in enumerate(sizes))


def sums(count: int) -> Value:
    return Value("sums", (count,), "fp64", "act")


class Context:
    """A `BindContext` and the compiled module. `memory` is what lies at an address."""

    target, stream = H200, 0

    def __init__(self, rank: int, contents: Mapping[Value, Tensor]) -> None:
        self.comm = SimpleNamespace(rank=rank)
        self.memory: list[Any] = [None]
        self.contents = dict(contents)
        self.addresses: dict[Value, int] = {}
        self.workspace = self.place(None)

    def place(self, content: Any) -> int:
        self.memory.append(content)
        return len(self.memory) - 1

    def pointer(self, value: Value) -> int:
        if value not in self.addresses:
            self.addresses[value] = self.place(self.contents.get(value))
        return self.addresses[value]

    def call(self, function: Callable[..., None], *arguments: Any) -> Any:
        return function, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        return self.place(list(words))

    def square_sums(self, table: int, sums: int, tensors: int, chunks: int, stream: int) -> None:
        words, found = self.memory[table], []
        assert len(words) == 5 * tensors
        for address, size, first, dtype, chunk in zip(*(words[i::5] for i in range(5)), strict=True):
            x = self.memory[address]
            assert (x.numel(), first) == (size, len(found))
            assert DTYPES[{torch.float32: "fp32", torch.bfloat16: "bf16"}[x.dtype]].code == dtype
            found += [part.double().square().sum() for part in x.split(chunk)]
        assert len(found) == chunks
        self.memory[sums] = torch.stack(found)

    def norm_of_sums(
        self, sums: int, order: int, norm: int, clip_coef: int, count: int, max_norm: float, stream: int
    ) -> None:
        indices = self.memory[order] if order else list(range(count))
        assert len(indices) == count
        total = self.memory[sums][indices].sum().sqrt().float()
        self.memory[norm], self.memory[clip_coef] = total, (max_norm / (total + 1e-6)).clamp(max=1)

    def accumulate_rounded(self, *arguments: int) -> None:
        addend, total, out, step, seed, stream_id, first, size, _, _ = arguments
        operands = [self.memory[i] for i in (addend, total, step, seed)]
        assert operands[1].numel() == size
        self.memory[out] = reference.accumulate_rounded(*operands, stream=stream_id, firsts=(first,))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Tensor]]:
    """Return the function that binds an op, runs its launches and returns its outputs."""
    import surogate_recipes_bf16

    def bound(op: Op, contents: Mapping[Value, Tensor], rank: int = 0) -> list[Tensor]:
        ctx = Context(rank, contents)
        monkeypatch.setitem(sys.modules, "surogate_recipes_bf16._C", ctx)
        monkeypatch.setattr(surogate_recipes_bf16, "_C", ctx, raising=False)
        calls: Any = kernel_of(op).bind(op, ctx)  # type: ignore[arg-type]
        for function, arguments in [launch.call for launch in calls] if op.kind == "global_norm" else [calls]:
            function(*arguments)
        return [ctx.memory[ctx.pointer(out)] for out in op.outs]

    return bound


def kernel_of(op: Op) -> KernelDef:
    return choose(KERNELS, op, H200)


def drawn(values: Sequence[Value]) -> dict[Value, Tensor]:
    gen = torch.Generator().manual_seed(0)
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    return {v: torch.randn(v.shape, generator=gen).to(dtypes[v.dtype]) for v in values}


def test_the_global_norm_is_two_launches_with_the_sums_in_the_workspace(run: Callable[..., list[Tensor]]) -> None:
    grads = gradients(*SIZES)
    op, contents = Op("global_norm", grads, OUTS, {"max_norm": 0.5}), drawn(grads)
    assert kernel_of(op).workspace(op, H200) == 8 * (1 + 3 + 1)
    expected = list(collectives.global_norm(*contents.values(), max_norm=0.5))  # fp32 sums, the others are fp64
    torch.testing.assert_close(run(op, contents), expected, rtol=1e-5, atol=0)


def test_the_sums_of_chunks_are_those_of_the_reference(run: Callable[..., list[Tensor]]) -> None:
    grads, chunks = gradients(*SIZES), (256, 1024, 256)
    contents = drawn(grads)
    expected = collectives.square_sums(*contents.values(), chunks=chunks)
    (found,) = run(Op("square_sums", grads, (sums(len(expected)),), {"chunks": chunks}), contents)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("ranges", [((0, 8),), ((0, 2), (4, 4)), ((4, 3), (0, 1), (8, 3), (1, 2)), ((7, 1),)])
def test_the_sums_of_the_ranges_are_added_in_their_order(
    ranges: Sequence[tuple[int, int]], run: Callable[..., list[Tensor]]
) -> None:
    """Sums that are not to be added are NaN."""
    content = torch.full((12,), torch.nan, dtype=torch.float64)
    for first, count in ranges:
        content[first : first + count] = torch.rand(count, dtype=torch.float64)
    attrs = {"ranges": tuple(ranges), "max_norm": 0.5}
    op = Op("norm_of_sums", (sums(12),), OUTS, attrs)
    found = run(op, {op.ins[0]: content})
    torch.testing.assert_close(found, list(collectives.norm_of_sums(content, **attrs)))


def test_a_rounded_sum_of_a_part_has_the_random_bits_of_its_place(run: Callable[..., list[Tensor]]) -> None:
    scalars = tuple(Value(name, (), dtype, "input") for name, dtype in (("step", "int32"), ("seed", "int64")))
    addend, total = Value("addend", (512,), "fp32", "act"), Value("total", (512,), "bf16", "grad")
    part = replace(total, shard=Shard((3, 400), 3))
    contents = {addend: torch.randn(512), total: torch.randn(512).bfloat16(), scalars[0]: torch.tensor(3)}
    contents |= {scalars[1]: torch.tensor(5), part: contents[total]}
    for rank in range(3):
        for value, first in ((total, 0), (part, 512 * rank)):
            op = Op("accumulate_rounded", (addend, value, *scalars), (value,), {"stream": 9})
            (found,) = run(op, contents, rank)
            ins = [contents[v] for v in op.ins]
            assert torch.equal(found, reference.accumulate_rounded(*ins, stream=9, firsts=(first,)))


def test_gradients_may_be_on_the_host_and_are_fp32_or_bf16() -> None:
    hosted = gradients(*SIZES, place="host")
    ops = {
        "global_norm": Op("global_norm", hosted, OUTS, {"max_norm": 0.0}),
        "square_sums": Op("square_sums", hosted, (sums(6),), {"chunks": (256, 65536, 256)}),
    }
    for kind, op in ops.items():
        assert kernel_of(op).op == kind
        wide = replace(op, ins=(replace(hosted[0], dtype="fp64"), *hosted[1:]))
        with pytest.raises(AssertionError, match=r"gradients must be fp32 or bf16, got g0:fp64\[1000\]"):
            kernel_of(wide)


def test_chunks_are_whole_octets() -> None:
    op = Op("square_sums", gradients(1000), (sums(84),), {"chunks": (12,)})
    with pytest.raises(AssertionError, match="chunks must be multiples of 8 elements, got 12"):
        kernel_of(op)
