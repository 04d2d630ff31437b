"""The references of ops on parts give the bits of those on whole values."""

from __future__ import annotations

import pytest
import torch
from sharding.parts import divided, firsts, joined

from surogate_core.errors import ProgramError
from surogate_core.program.op import Op
from surogate_core.program.shards import chunk_size, part_size
from surogate_core.program.value import Value
from surogate_core.reference import collectives
from surogate_core.reference import ops as reference
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


@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_the_norm_has_the_same_bits_however_many_ranks_sum(parts: int) -> None:
    gen = torch.Generator().manual_seed(0)
    values = [torch.randn(size, generator=gen) for size in SIZES]
    chunks = [chunk_size(size) for size in SIZES]
    kept = [-(-size // chunk) for size, chunk in zip(SIZES, chunks, strict=True)]
    counts = [*(part_size(size, parts) // chunk for size, chunk in zip(SIZES[:-1], chunks, strict=False)), kept[-1]]
    of_rank = []
    for rank in range(parts):
        held = [
            torch.nn.functional.pad(x, (0, parts * part_size(len(x), parts) - len(x))).view(parts, -1)[rank]
            for x in values[:-1]
        ]
        of_rank.append(collectives.square_sums(*held, values[-1], chunks=chunks))
    whole = collectives.norm_of_sums(
        collectives.square_sums(*values, chunks=chunks), parts=1, counts=kept, kept=kept, max_norm=1.0
    )
    found = collectives.norm_of_sums(torch.cat(of_rank), parts=parts, counts=counts, kept=kept, max_norm=1.0)
    assert all(map(torch.equal, found, whole))


def test_sums_that_no_rank_has_are_refused() -> None:
    (op,) = (definition for definition in OPS if definition.kind == "norm_of_sums")
    sums = Value("sums", (2 * 3,), "fp64", "act")
    attrs = {"parts": 2, "counts": (1, 2), "kept": (2, 4), "max_norm": 1.0}
    assert len(op.infer((sums,), attrs)) == 2
    with pytest.raises(ProgramError, match=r"2 ranks with \(1, 2\) sums each do not have the \(3, 4\) to add"):
        op.infer((sums,), attrs | {"kept": (3, 4)})
