"""Program variants for batches with few documents: which exist, what they share, and that results are bit-identical."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models.harness import OPS, plan_inputs, tiny_config

from surogate_core.api import OutSpec
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.assembly import Assembly
from surogate_core.batch import MicroBatch
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.program.passes.documents import for_fewer, refuse_sizes_by_documents, smaller_bounds
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.worker import Worker

CONFIG = tiny_config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=8)
ROWS, SEQ_LEN, TOKENS = 2, 32, 64
FULL = [0, 32]
"""The starts of two documents that fill their rows."""


def assembled(max_documents: int, **changes: Any) -> Assembly:
    return assemble(plan_inputs(CONFIG, batch_size=ROWS, seq_len=SEQ_LEN, max_documents=max_documents, **changes))


def batch(starts: list[int], max_documents: int) -> MicroBatch:
    cu_seqlens = np.full(max_documents + 1, TOKENS, np.int32)
    cu_seqlens[: len(starts)] = starts
    lengths = np.diff([*starts, TOKENS])
    positions = np.concatenate([np.arange(n) for n in lengths]).astype(np.int32)
    tokens = np.random.default_rng(0).integers(0, CONFIG["vocab_size"], TOKENS, dtype=np.int32)
    return MicroBatch(tokens, np.roll(tokens, -1), positions, cu_seqlens, TOKENS, TOKENS)


def worker(assembly: Assembly) -> Worker:
    made = Worker.on_cpu(assembly, OPS, seed=1, poison=True)
    initialize((v for v in assembly.declared if v.init), made.buffers.persistent, 3)
    made.start()
    return made


@pytest.mark.parametrize(
    ("max_documents", "rows", "bounds"),
    [(2052, 4, (4, 32, 256)), (257, 1, (1, 4, 32)), (64, 2, (2, 8)), (63, 2, (2,)), (8, 4, (4,)), (4, 4, ())],
)
def test_bounds_are_one_document_per_row_and_every_eighth_down_to_four_per_row(
    max_documents: int, rows: int, bounds: tuple[int, ...]
) -> None:
    assert smaller_bounds(max_documents, rows) == bounds


def test_a_batch_runs_the_smallest_variant_that_holds_its_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    made = worker(assembled(64))
    ran: list[str] = []
    run = made._run
    monkeypatch.setattr(made, "_run", lambda program, labels=None: (ran.append(program.name), run(program, labels)))
    for starts in (FULL, [0, 32, 63], [*range(0, 64, 8)], [*range(0, 63, 7)]):
        made.micro_step(batch(starts, 64), first=True, loss_scale=1 / TOKENS, index=0)
    made.evaluate(batch(FULL, 64))
    assert ran == ["micro_first@2", "micro_first@8", "micro_first@8", "micro_first", "evaluate@2"]


@pytest.mark.parametrize("starts", [FULL, [0, 5, 32, 40]])
def test_variants_are_bit_identical_to_the_full_program(starts: list[int]) -> None:
    full = assembled(64)
    a, b = worker(full), worker(replace(full, variants={}))
    for made in (a, b):
        for first in (True, False):
            made.micro_step(batch(starts, 64), first=first, loss_scale=1 / TOKENS, index=0)
        made.update(lr=1e-2, step=1)
    assert all(torch.equal(w, b.params()[name]) for name, w in a.params().items())
    assert a.evaluate(batch(starts, 64)) == b.evaluate(batch(starts, 64))


def test_only_the_variant_for_full_rows_has_documents_of_equal_lengths() -> None:
    """Documents cover all tokens and none is longer than a row: kernels may conclude it from the sizes alone."""
    programs = assembled(64).all_programs.values()
    bounds = {op.ins[1].shape[0] - 1 for program in programs for op in program.ops if op.kind == "attention"}
    assert bounds == {2, 8, 64} and [n for n in bounds if n * SEQ_LEN == TOKENS] == [2]


def test_variants_share_one_plan_whose_workspace_is_the_largest_of_them() -> None:
    def scratch(op: Any) -> int:
        return 1000 * (op.ins[1].shape[0] - 1)

    none = {kind: replace(definition, workspace=lambda op: 0) for kind, definition in OPS.items()}
    ops = {**none, "attention": replace(OPS["attention"], workspace=scratch)}
    memory = assembled(64, ops=ops).memory
    assert memory.arenas["micro_first@8"] is memory.arenas["micro_first"]
    assert {nbytes for _, nbytes in memory.arenas["micro_first@8"].workspace.values()} == {64_000 // 256 * 256}


def test_an_op_with_an_output_for_each_document_is_refused_with_the_reason() -> None:
    """As a state of each document would be written. The variants would give it other shapes."""

    def infer(ins: Any, attrs: Any) -> list[OutSpec]:
        return [OutSpec("attention", (ins[1].shape[0] - 1, 4), "fp32"), *OPS["attention"].infer(ins, attrs)[1:]]

    attention = replace(OPS["attention"], infer=infer)
    b = Builder({"attention": attention}, "fp32")
    cu_seqlens, fewer = b.input("cu", (65,), "int32"), b.input("cu@2", (3,), "int32")
    with b.record("forward"):
        b.emit(
            "attention", b.input("qkv", (64, 64), "fp32"), cu_seqlens, n_heads=4, n_kv_heads=2, head_dim=8, seq_len=32
        )
        (variant,) = for_fewer(b.program("micro"), cu_seqlens, [fewer])
    with pytest.raises(
        ProgramError, match=r"test_documents.py:.* is \[64, 4\], and \[2, 4\] where cu@2 is \[3\]\. .* no output"
    ):
        refuse_sizes_by_documents(variant, fewer, b.ops)
