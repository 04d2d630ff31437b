"""From a run to its plan: the programs, the memory and the time that they take on a device. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import inf
from typing import NamedTuple

from ..api import Target
from ..assembly.assemble import record, sketch
from ..assembly.assembly import Assembly
from ..assembly.draft import Draft
from ..assembly.inputs import PlanInputs
from ..assembly.passes.decode_some import decodes_experts
from ..assembly.recomputed import ChosenRecomputation, Recomputation
from ..assembly.resolve import KernelTable
from ..memory.cost import OpCosts, program_cost
from ..program.passes.sum_in_blocks import BLOCK
from ..program.passes.tile import tiles_of
from .memory_timeline import MemoryTimeline, memory_timeline
from .recompute_ladder import RecomputeLevel, first_that_fits, ladder
from .report import Report, at_least, device_parts, largest_arena, summarise
from .step_kinds import StepWork, step_work

DECODED_BYTES = 256 << 20
"""Of a weight of experts that are decoded at a time. Products of fewer experts have too few tiles for all
multiprocessors: with 256 rows each, 8 experts of gpt-oss 20B have 368 tiles for 132."""

_LONG_OPS = 1e-3
"""Seconds of an op, on average, from which on launches are free: the host takes some 10 us for one, ahead of the
device."""

_LITTLE = 0.02
"""A run is not planned in parts, such as row tiles, to win less than this share of a step."""

_CERTAIN = 0.9
"""Of the bytes that recomputation can free: near its end, recomputed values and copies take what it frees."""


class Expected(NamedTuple):
    """The seconds of a step with recomputation, which adds a share to those without it; infinite if the plan does not
    fit. A sketch's is an estimate: not `certain` to fit if it needs most of what can be freed."""

    seconds: float
    share: float = inf
    certain: bool = True


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run planned for a device: its programs, the kernels that run them, and the report of memory and time.

    overridden  lines for the user about keys without effect, and dtypes that the recipe does not use
    chosen      what is recomputed because of `recompute: auto`; None: nothing
    recompute_levels  of a sketch that does not fit: the recomputation to choose from (`recomputed`)
    recording   what other plans of the run can be made from (`sketch_run`)
    """

    inputs: PlanInputs = field(repr=False)  # its text, with all programs, has megabytes
    target: Target = field(repr=False)
    assembly: Assembly = field(repr=False)
    report: Report
    recording: Draft = field(repr=False)
    overridden: tuple[str, ...] = ()
    chosen: ChosenRecomputation | None = None
    recompute_levels: Sequence[RecomputeLevel] = field(default=(), repr=False)

    @property
    def row_tiles(self) -> int:
        """Rows of a tile; 0: ops run on all rows at once. Where rows of micro-steps depend on which others are in their
        tile, these are the same in every plan (`RowWise.together`)."""
        rows = tiles_of(self.inputs.tokens) if self._divides_together else self.inputs.row_tiles or 0
        return rows if rows < self.inputs.tokens else 0

    @property
    def _divides_together(self) -> bool:
        programs = self.assembly.programs.values()
        micro = (program for program in programs if (program.stage, program.purpose) == ("micro", "train"))
        alike = {op.signature: op for program in micro for op in program.ops}.values()
        rows = (op.ins[0].shape[0] for op in alike if (of := self.inputs.ops[op.kind].row_wise(op)) and of.together)
        return any(count % self.inputs.tokens for count in rows)

    @property
    def tiles_line(self) -> str:
        """A line for the user about row tiles; "": there are none."""
        rows, tokens = self.row_tiles, self.inputs.tokens
        return f"row_tiles: {-(-tokens // rows)} tiles of {rows:,} of {tokens:,} rows" if rows else ""

    @property
    def gains_by_graphs(self) -> bool:
        """Whether CUDA graphs may save time.

        They take memory for each launch, which long rows in tiles have many of: 0.7 GiB for 36 blocks of 131,072 tokens
        in 8 tiles (H200, 2026-11-30), where an op takes 4 ms.
        """
        launches = self.inputs.grad_accum_steps * max(len(p.ops) for p in self.assembly.programs.values())
        return self.report.step.seconds < _LONG_OPS * launches

    @property
    def decoded_line(self) -> str:
        """A line for the user about weights of experts that are decoded in parts; "": none are."""
        most = self.inputs.decoded_experts
        return f"decoded_experts: at most {most / (1 << 20):,.0f} MiB of a weight at a time" if most else ""

    @property
    def kernels(self) -> KernelTable:
        return self.assembly.kernels

    @property
    def expected(self) -> Expected:
        if not self.recompute_levels:
            share = self.chosen.costs / self.chosen.step if self.chosen else 0.0
            return Expected(self.report.step.seconds if self.report.fits else inf, share)
        return self._expected(self.report.missing_bytes)

    @property
    def least_seconds(self) -> float:
        """The least seconds of a step with recomputation, of a sketch that does not fit, however what runs between two
        ops on whole values is divided: at the end of the forward pass, what blocks keep is whole."""
        programs = self.assembly.programs
        name, arena = largest_arena(self.assembly.memory)
        forward = takewhile(lambda op: op.phase != "backward", programs[name].ops)
        whole = [i for i, op in enumerate(forward) if not self.inputs.ops[op.kind].row_wise(op)]
        kept = sum(life.nbytes for life in arena.lives if whole and life.first < whole[-1] < life.last)
        less = (arena.lower_bound - kept) * self.inputs.ranks_per_device
        return self._expected(self.report.missing_bytes - less).seconds

    def _expected(self, missing_bytes: int) -> Expected:
        """Return what is expected of recomputation that frees so many bytes."""
        step, ranks = self.report.step.seconds, self.inputs.ranks_per_device
        kept, missing = self.recompute_levels[0].kept, -(-missing_bytes // ranks)
        for level in self.recompute_levels:
            if kept - level.kept >= missing:
                added, most = level.seconds * ranks, kept - self.recompute_levels[-1].kept
                return Expected(step + added, added / step, missing <= _CERTAIN * most)
        return Expected(inf)

    def eval_seconds(self, rows: int) -> float:
        """Return the planned time of an evaluation of `rows` rows, which a prepass reads too."""
        batches = -(-rows // (self.inputs.batch_size * self.report.devices)) * (2 if self.inputs.loss.prepass else 1)
        costs = OpCosts(self.inputs.ops, self.report.device, self.kernels.kernel)
        return batches * program_cost(self.assembly.only("evaluate"), costs).seconds

    def memory_timeline(self) -> MemoryTimeline:
        """Return what holds the device's memory while each op of the fullest program runs."""
        return memory_timeline(self.assembly, self.inputs, self.report)

    def step_work(self) -> StepWork:
        """Return the planned seconds, calls, FLOPs and bytes of an optimizer step by kind of op."""
        return step_work(self.assembly, self.inputs, self.report)

    def verify(self) -> None:
        """Run the last checks of a plan. Raises ProgramError."""
        self.assembly.passed.verify()


def sketched(inputs: PlanInputs, recording: Draft | None = None) -> Plan:
    """Return a plan without its last checks (`Plan.verify`) and without the recomputation that the planner chooses.

    `Plan.expected` says what that would make of it, and `settled` makes it. The report of a plan that does not fit
    may count only live bytes (`at_least`). `recording`: of a plan that this one can be made from (`assemble.record`).

    Of a run that does not fit and may have row tiles, or decode weights of experts in parts, this is the plan without
    them if it is expected to be faster and can fit, else the one with them, which is the smaller one with everything
    recomputed.
    """
    plan = sketch_exactly(replace(inputs, recompute_chosen=None), recording)
    with plan.assembly.passed.finding_causes():
        levels = ladder(plan.recording, inputs) if plan.report.missing_bytes > 0 and inputs.recompute_more else ()
    plan = replace(plan, recompute_levels=levels if len(levels) > 1 else ())
    for smaller in _smaller(inputs, plan.recording) if plan.report.missing_bytes > 0 else ():
        if not (fits := _can_fit(plan)) or plan.expected.seconds > (1 + _LITTLE) * plan.least_seconds:
            divided = sketched(smaller, plan.recording)
            plan = plan if fits and plan.expected.seconds <= divided.expected.seconds else divided
    return plan


def _smaller(inputs: PlanInputs, recording: Draft) -> Iterator[PlanInputs]:
    """Yield the inputs of plans of a run that divide what it may divide: row tiles, then weights of experts alone."""
    if inputs.row_tiles is None and (rows := tiles_of_long_rows(inputs)):
        yield replace(inputs, row_tiles=rows)
    if inputs.decoded_experts is None and decodes_experts(recording):
        yield replace(inputs, row_tiles=inputs.row_tiles or 0, decoded_experts=DECODED_BYTES)


def _can_fit(plan: Plan) -> bool:
    """Return whether a sketch is expected to fit. With all recomputation it is planned where that is not certain: a
    strategy may move what blocks keep, which the estimate then counts twice."""
    if not plan.recompute_levels or plan.expected.seconds == inf or plan.expected.certain:
        return plan.expected.seconds < inf
    given = replace(plan.inputs, recompute_chosen=plan.recompute_levels[-1].recomputation)
    return _missing(given, sketch(given, plan.recording)) <= 0


def tiles_of_long_rows(inputs: PlanInputs) -> int:
    """Return the rows of a tile that are tried for a run whose rows are long; 0 for others.

    They are a multiple of the rows of which sums are made (`sum_in_blocks`), so that tiles do not change these.
    """
    return tiles_of(inputs.tokens) if inputs.seq_len > BLOCK else 0


def recomputed(plan: Plan) -> Plan:
    """Return what `settled` does, with all tiles written out: a plan that can run."""
    found = settled(plan)
    whole = replace(found.inputs, tiles_stand_in=False)
    if not found.assembly.is_partial:
        return replace(found, inputs=whole)
    assembly = sketch(whole, plan.recording)
    with assembly.passed.finding_causes():
        exact = replace(found, inputs=whole, assembly=assembly, report=summarise(assembly, whole))
    if found.report.missing_bytes <= 0 < exact.report.missing_bytes:  # other places were found for more values
        return settled(sketched(replace(plan.inputs, tiles_stand_in=False), plan.recording))
    return exact


def settled(plan: Plan) -> Plan:
    """Return a sketch with more recomputation if it does not fit: the cheapest that fits, or all of it if nothing does.

    A plan that recomputation does not make smaller keeps its own. One that was expected to fit and does not is divided
    (`sketched`), if that fits. The report's bytes are exact: where values of a tile that stands for others are, theirs
    can be.
    """
    if plan.report.missing_bytes <= 0:
        return plan
    with plan.assembly.passed.finding_causes():
        exact = replace(plan, report=summarise(plan.assembly, plan.inputs))
        found = _recomputing(exact) if plan.recompute_levels else exact
    was_expected = plan.expected.seconds < inf and found.report.missing_bytes > 0
    for smaller in _smaller(plan.inputs, plan.recording) if was_expected else ():
        divided = settled(sketched(smaller, plan.recording))
        if divided.report.missing_bytes <= 0:
            return divided
    return found


def _missing(given: PlanInputs, assembly: Assembly) -> int:
    """Return by how many bytes the device has too little for each of its ranks."""
    assert given.target is not None
    needed = sum(device_parts(assembly, given, at_least(assembly, given)).values())
    return -(-(needed - given.target.device.memory_bytes) // given.ranks_per_device)


def _recomputing(plan: Plan) -> Plan:
    expected, inputs, levels = plan.expected, plan.inputs, plan.recompute_levels
    plan = replace(plan, recompute_levels=())
    missing = -(-plan.report.missing_bytes // inputs.ranks_per_device)
    sketches: dict[int, tuple[PlanInputs, Assembly]] = {}

    def missing_at(index: int) -> int:
        if index not in sketches:
            given = replace(inputs, recompute_chosen=levels[index].recomputation)
            sketches[index] = given, sketch(given, plan.recording)
        return _missing(*sketches[index])

    last = len(levels) - 1
    searches = (expected.certain and expected.seconds < inf) or missing_at(last) <= 0
    index = first_that_fits(levels, missing, missing_at) if searches else last
    given, assembly = sketches[index]
    after = replace(plan, inputs=given, assembly=assembly, report=summarise(assembly, given))
    chosen = _chosen(levels[index].recomputation, plan, after)
    return replace(after, chosen=chosen) if chosen.saves > 0 else plan


def _chosen(recomputation: Recomputation, before: Plan, after: Plan) -> ChosenRecomputation:
    step = before.report.step.seconds
    return ChosenRecomputation(
        recomputation=recomputation,
        saves=before.report.device_bytes["total"] - after.report.device_bytes["total"],
        costs=after.report.step.seconds - step,
        step=step,
        n_blocks=1 + max(op.block for op in before.assembly.micro.ops),
    )


def sketch_exactly(inputs: PlanInputs, recording: Draft | None = None) -> Plan:
    """Return the sketch with the recomputation that `inputs` name. `recording`: of a plan that it can be made from."""
    if inputs.target is None:
        raise ValueError("a plan needs a device")
    recording = recording or record(inputs)
    assembly = sketch(inputs, recording)
    with assembly.passed.finding_causes():
        report = summarise(assembly, inputs, at_least(assembly, inputs))
    return Plan(inputs=inputs, target=inputs.target, assembly=assembly, report=report, recording=recording)
