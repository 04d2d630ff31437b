"""The references of ops on parts give the bits of those on whole values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from sharding.parts import divided, firsts, joined
from torch import Tensor

from surogate_core.assembly.passes.optimizer import emit_norm
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.program.op import Op
from surogate_core.program.shards import part_of, room
from surogate_core.program.value import Value
from surogate_core.reference import collectives
from surogate_core.reference import ops as reference
from surogate_core.runtime.collectives import call
from surogate_core.runtime.comms import copies
from surogate_core.standard_ops import OPS

SIZES = (1000, 70_000, 131_072, 5)
"""The last is not divided."""


def vector(name: str, size: int, dtype: str = "fp32") -> Value:
    return Value(name, (size,), dtype, "grad")


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_the_parts_of_a_rounded_sum_have_the_bits_of_the_whole(parts: int) -> None:
    addend, total = vector("addend", 5000), vector("total", 5000, "bf16")
    scalars = [Value(name, (), dtype, "input") for name, dtype in (("micro_step", "int32"), ("seed", "int64"))]
    op = Op("accumulate_rounded", (addend, total, *scalars), (total,), {"stream": 7})
    drawn = torch.randn(5000), torch.randn(5000).bfloat16()
    contents = dict(zip(op.ins, (*drawn, torch.tensor(3), torch.tensor(11)), strict=True))
    whole = reference.accumulate_rounded(*(contents[v] for v in op.ins), stream=7)
    ranks = [
        [reference.accumulate_rounded(*(held[v] for v in part.ins), stream=7, firsts=firsts(part, rank))]
        for rank, (part, held) in enumerate(divided(op, contents, parts))
    ]
    ((_, found),) = joined(op, ranks)
    assert torch.equal(found, whole)
    elsewhere = [contents[v][1024:] if v.shape else contents[v] for v in op.ins]
    assert not torch.equal(reference.accumulate_rounded(*elsewhere, stream=7), whole[1024:])


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_the_norm_has_the_same_bits_however_many_ranks_sum(ranks: int, owned: bool) -> None:
    gen = torch.Generator().manual_seed(0)
    wholes = {vector(f"g{i}", size): torch.randn(size, generator=gen) for i, size in enumerate(SIZES)}
    *divisible, small = wholes
    owners = (ranks - 1, None, 0) if owned else (None, None, None)
    parts = {v: part_of(v, ranks, owner) for v, owner in zip(divisible, owners, strict=True)} | {small: small}
    held = {v: (parts[v], list(of_ranks(parts[v], x, ranks))) for v, x in wholes.items()}
    expected, _ = norms({v: (v, [x, x]) for v, x in wholes.items()}, 2)
    for found in norms(held, ranks):
        assert all(map(torch.equal, found, expected))


def of_ranks(part: Value, x: Tensor, ranks: int) -> Iterator[Tensor]:
    """Yield what each rank has of a value; of one that another rank owns NaN."""
    for rank in range(ranks):
        if part.shard is None:
            yield x
        elif part.owner is None:
            yield torch.nn.functional.pad(x, (0, ranks * part.size - len(x))).view(ranks, -1)[rank]
        else:
            yield x if rank == part.owner else torch.full_like(x, torch.nan)


def norms(held: Mapping[Value, tuple[Value, Sequence[Tensor]]], ranks: int) -> list[tuple[Tensor, Tensor]]:
    """Run what `emit_norm` emits on ranks, of which each has one of the tensors of a value."""
    b = Builder({op.kind: op for op in OPS}, "fp32")
    outs = [b.state("norm", (), "fp32", None), b.activation("coef", (), "fp32")]
    with b.record("update") as ops:
        emit_norm(b, [(whole, own) for whole, (own, _) in held.items()], outs, ranks=ranks, max_norm=1.0)
    memory = [{own: tensors[rank] for own, tensors in held.values()} for rank in range(ranks)]
    for op in ops:
        if op.lane == "comm":
            senders = [v.owner for v in op.ins] if op.kind == "broadcast" else [*range(ranks)]
            sent = [memory[r or 0][v] for r, v in zip(senders, op.ins * (len(senders) // len(op.ins)), strict=True)]
            for of_rank in memory:
                of_rank[op.outs[0]] = torch.cat(sent)
            continue
        for rank, of_rank in enumerate(memory):
            if op.owner in (None, rank):
                result = getattr(collectives, op.kind)(*(of_rank[v] for v in op.ins), **op.attrs)
                of_rank |= dict(zip(op.outs, result if isinstance(result, tuple) else (result,), strict=True))
    return [(of_rank[outs[0]], of_rank[outs[1]]) for of_rank in memory]


@pytest.mark.parametrize(("dtype", "parts"), [("bf16", 3), ("e2m1", 3), ("fp32", 4)])
def test_the_padding_of_a_part_holds_zeros_whatever_is_behind_the_whole(dtype: str, parts: int) -> None:
    whole = Value("whole", (10, 50), dtype, "act", room=room((10, 50), dtype, parts))
    part = replace(part_of(whole, parts), name="part")
    assert part.size * parts > whole.size
    memory = torch.full((whole.room,), 0xFF, dtype=torch.uint8)
    memory[: whole.nbytes] = torch.arange(1, whole.nbytes + 1) % 255
    found = []
    for comm in copies.connect([0] * parts):
        own = torch.full((part.nbytes,), 0xFF, dtype=torch.uint8)
        places = {whole: memory.data_ptr(), part: own.data_ptr()}
        function, arguments = call(
            Op("take_part", (whole,), (part,), {"world_size": parts}), comm, places.__getitem__, 0
        )
        function(*arguments)
        found.append(own)
    ours = torch.cat(found)
    assert torch.equal(ours[: whole.nbytes], memory[: whole.nbytes]) and not ours[whole.nbytes :].any()


def test_sums_that_no_rank_has_are_refused() -> None:
    (op,) = (definition for definition in OPS if definition.kind == "norm_of_sums")
    sums = Value("sums", (6,), "fp64", "act")
    assert len(op.infer((sums,), {"ranges": ((0, 2), (3, 3)), "max_norm": 1.0})) == 2
    for wrong in ((3, 4), (-1, 2), (2, 0)):
        with pytest.raises(ProgramError, match=rf"sums:fp64\[6\] has no {wrong[1]} sums from {wrong[0]} on"):
            op.infer((sums,), {"ranges": ((0, 2), wrong), "max_norm": 1.0})
