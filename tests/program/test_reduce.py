"""All-reduce over workers: each gradient once, as soon as it is complete, and only in the last micro-step.

With one worker there is no all-reduce.
"""

from __future__ import annotations

import pytest
from models.harness import OPS, PlannedModel, tiny_config

from surogate_core.api import PrecisionRequest, Program, Value
from surogate_core.errors import ProgramError
from surogate_core.program.op import Op
from surogate_core.program.passes.reduce import MicroStep, micro_step_counts, reduce
from surogate_core.runtime.collectives import ranges
from surogate_core.runtime.reference import ReferenceExecutor

DTYPES = {"fp32": PrecisionRequest(model_dtype="fp32"), "bf16": PrecisionRequest(param_grad_dtype="bf16")}


def model(world_size: int, steps: int, dtypes: str = "fp32", **changes: object) -> PlannedModel:
    settings = {"request": DTYPES[dtypes], "world_size": world_size, "grad_accum_steps": steps}
    return PlannedModel(tiny_config(**changes), 1, 16, **settings)


def reduces(program: Program) -> list[tuple[int, Op]]:
    return [(index, op) for index, op in enumerate(program.ops) if op.kind == "all_reduce"]


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_micro_step_program_that_is_built_is_run(steps: int, world_size: int) -> None:
    counts = micro_step_counts(steps, world_size)
    assembly = model(world_size, steps).assembly
    built = [p for p in assembly.programs.values() if p.stage == "micro"]
    assert [MicroStep(p.first, p.last) for p in built] == list(counts)
    runs = [assembly.micro_step(first=i == 0, last=i == steps - 1) for i in range(steps)]
    assert [runs.count(program) for program in built] == list(counts.values())


@pytest.mark.parametrize("steps", [1, 3])
def test_with_one_worker_there_is_no_all_reduce(steps: int) -> None:
    programs = model(1, steps).assembly.programs.values()
    assert not [op for program in programs for op in program.ops if op.lane != "compute" or op.kind == "all_reduce"]


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_gradients_and_loss_are_all_reduced_once_in_the_last_micro_step(steps: int, tied: bool, dtypes: str) -> None:
    assembly = model(4, steps, dtypes, tie_word_embeddings=tied).assembly
    *before, last = [p for p in assembly.programs.values() if p.stage == "micro"]
    assert not [op for program in (*before, assembly.programs["evaluate"]) for _, op in reduces(program)]
    summed = [v for _, op in reduces(last) for v in op.ins]
    assert len(set(summed)) == len(summed)
    assert set(summed) == {v for v in assembly.declared if v.role == "grad"} | {assembly.loss}
    assert all(op.lane == "comm" and op.ins == op.outs and op.attrs["world_size"] == 4 for _, op in reduces(last))


@pytest.mark.parametrize("dtypes", DTYPES)
def test_an_all_reduce_directly_follows_the_last_write_of_its_values(dtypes: str) -> None:
    program = model(2, 2, dtypes).assembly.programs["micro_last"]
    for index, op in reduces(program):
        writers = [i for i, other in enumerate(program.ops) for v in op.ins if v in other.outs and other is not op]
        between = program.ops[max(writers) + 1 : index]
        assert max(writers) < index and all(other.kind == "all_reduce" for other in between)


def test_a_block_is_reduced_as_one_contiguous_range() -> None:
    """The gradients of a block are adjacent in memory except for alignment padding."""
    assembly = model(2, 1).assembly
    offsets = assembly.memory.segments["grad"].offsets
    found = {op.block: op for _, op in reduces(assembly.programs["micro_only"]) if op.block >= 0}
    assert sorted(found) == [0, 1, 2, 3]
    for op in found.values():
        ((start, elements, dtype),) = ranges([(offsets[v], v) for v in op.ins])
        assert start == offsets[op.ins[0]] and dtype == "fp32"
        last = op.ins[-1]
        assert start + 4 * elements == offsets[last] + last.nbytes


def test_ranges_are_split_at_gaps_dtype_changes_and_order_changes() -> None:
    a, b, c = Value("a", (3,), "fp32", "grad"), Value("b", (64,), "fp32", "grad"), Value("c", (5,), "bf16", "grad")
    assert ranges([(0, a), (256, b)]) == ((0, 128, "fp32"),)
    assert ranges([(256, b), (0, a)]) == ((256, 64, "fp32"), (0, 3, "fp32"))
    assert ranges([(64, a), (320, b)]) == ((64, 128, "fp32"),)  # where memory begins differs between ranks
    assert ranges([(0, a), (512, b)]) == ((0, 3, "fp32"), (512, 64, "fp32"))
    assert ranges([(0, a), (256, c), (512, b)]) == ((0, 3, "fp32"), (256, 5, "bf16"), (512, 64, "fp32"))


def test_a_value_that_no_op_writes_cannot_be_reduced() -> None:
    planned = model(1, 1)
    orphan = Value("orphan", (3,), "fp32", "grad")
    with pytest.raises(ProgramError, match=r"micro_first: cannot sum values that no op writes: orphan"):
        reduce(planned.assembly.programs["micro_first"], {orphan: orphan}, {}, None, 2)  # type: ignore[arg-type]


def test_a_single_rank_cannot_run_the_program_of_two() -> None:
    planned = model(2, 1)
    with pytest.raises(ProgramError, match=r"all_reduce .*recorded for 2 ranks, but the communicator connects 1"):
        ReferenceExecutor(planned.assembly.programs, OPS, planned.buffers)
