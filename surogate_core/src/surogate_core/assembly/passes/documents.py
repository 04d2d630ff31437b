"""Programs that read documents have variants for batches of few."""

from __future__ import annotations

from dataclasses import replace

from ...program.op import Program
from ...program.passes.documents import for_fewer, refuse_sizes_by_documents, smaller_bounds
from ...program.verify import check_collectives
from ..draft import Draft


def vary_documents(draft: Draft) -> Draft:
    """Declare shorter inputs of documents, and make of each program that reads documents a variant for each."""
    whole, inputs = draft.batch.cu_seqlens, draft.inputs
    bounds = smaller_bounds(inputs.max_documents, inputs.batch_size)
    shorter = {n: draft.builder.input(f"{whole.name}@{n}", (n + 1,), whole.dtype) for n in bounds}
    variants: dict[str, tuple[Program, ...]] = {}
    for program in draft.programs.values() if shorter else ():
        found = for_fewer(program, whole, shorter.values())
        for read, fewer in zip(shorter.values(), found, strict=False):  # none if it does not read the whole
            refuse_sizes_by_documents(fewer, read, inputs.ops)
            check_collectives(program, draft.verified(program, fewer))
            variants[program.name] = (*variants.get(program.name, ()), fewer)
    return replace(draft, cu_seqlens=shorter, variants=variants)
