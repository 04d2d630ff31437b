"""The ladder of recomputation: each level keeps fewer bytes for the backward pass than the one below, and takes longer.

A block can be recomputed in 20 ways (`CHOICES`). Each is priced: bytes that the block keeps, seconds that it adds. Only
the ways on the lower convex hull of these points are worth taking, because any other is beaten by a mixture of two that
are. Two neighbours on the hull make as many levels as the model has blocks: the stronger way in the first block, in the
first two, and so on. It is applied to the first blocks because the backward pass reaches them last, when the memory of
the others is free for their recomputed values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from weakref import WeakKeyDictionary

from ..assembly.draft import Draft
from ..assembly.inputs import PlanInputs
from ..assembly.recomputed import CHOICES, Recomputation
from ..memory.alignment import align
from ..memory.cost import OpCosts
from ..program.builder import Builder
from ..program.op import Op, Program
from ..program.passes.recompute import recompute

_MOST_TRIALS = 8
_FAILURES = 2
"""Plans that do not fit before the last level is tried, unless it frees twice what is missing by what the others freed:
if that does not fit either, none does."""
_HALVINGS = 3
_LEAST_FREED = 0.1


@dataclass(frozen=True)
class RecomputeLevel:
    """A choice of what is recomputed, and its price.

    kept     bytes that all blocks keep between the forward and the backward pass
    seconds  time that it adds to an optimizer step
    """

    recomputation: Recomputation
    kept: int
    seconds: float


_known: WeakKeyDictionary[Draft, dict[tuple[frozenset[str], frozenset[str]], list[RecomputeLevel]]] = (
    WeakKeyDictionary()
)
"""{recorded programs: {(parts recomputed in any case, labels never recomputed): the levels}}, of runs planned so far"""


def ladder(recording: Draft, inputs: PlanInputs) -> list[RecomputeLevel]:
    """Return the levels of a run. The first is `inputs.recompute` in every block. Runs of one recording share them."""
    levels, key = _known.setdefault(recording, {}), (inputs.recompute, inputs.kept_labels)
    if key not in levels:
        levels[key] = _ladder(recording.programs["micro"], inputs)
    return levels[key]


def _ladder(program: Program, inputs: PlanInputs) -> list[RecomputeLevel]:
    points = _hull(_choices(program, inputs))
    levels = [_level(points[0], points[0], 0)]
    for light, strong in pairwise(points):
        between = (_level(light, strong, count) for count in range(1, len(light.blocks) + 1))
        levels += (level for level in between if level.kept < levels[-1].kept)  # a part may free nothing in some blocks
    return levels


def first_that_fits(levels: Sequence[RecomputeLevel], missing: int, missing_at: Callable[[int], int]) -> int:
    """Return the index of the lowest of several levels whose plan fits, or the last if none does.

    `missing`: bytes that do not fit with the first level. `missing_at` plans the run with another level and returns the
    same, 0 or less if it fits; it may be asked for a level twice. Each plan corrects the estimate of the next: two or
    three are enough as a rule. If an offload strategy moves some of what blocks keep, a level frees less than it says.
    """
    low, high, at, last = 0, len(levels), 0, len(levels) - 1
    failures, freed, freeing = 0, 1.0, 1.0  # bytes freed for each that blocks no longer keep: last time, as expected
    for _ in range(_MOST_TRIALS):
        allowed = levels[at].kept - missing / freeing
        guess = next((i for i in range(low + 1, last) if levels[i].kept <= allowed), last)
        if guess >= high:
            return high
        before, kept = missing, levels[at].kept
        at, missing = guess, missing_at(guess)
        if kept > levels[at].kept:
            freed = (before - missing) / (kept - levels[at].kept)
            freeing = min(1.0, max(_LEAST_FREED, freeing / 2, freed))  # one level may free nothing, as the peak moves
        if missing <= 0:
            high = at
        elif at == last:
            return last
        else:
            low, failures = at, failures + 1
            doubtful = 2 * missing > freed * (levels[at].kept - levels[last].kept)
            if failures == _FAILURES and doubtful:
                if missing_at(last) > 0:
                    return last
                if freed < _LEAST_FREED:
                    return _halved(low, last, missing_at)
    if high > last:
        missing_at(last)
    return min(high, last)


def _halved(low: int, high: int, missing_at: Callable[[int], int]) -> int:
    """Return a level that fits, of those above `low` up to `high`, which fits although the levels before freed next to
    nothing: what they freed does not say where the bytes fall."""
    for _ in range(_HALVINGS):
        if (middle := (low + high) // 2) == low:
            break
        low, high = (low, middle) if missing_at(middle) <= 0 else (middle, high)
    return high


# ---------------------------------------------------------------------------------------------------------- the prices


@dataclass(frozen=True)
class _Choice:
    """Parts recomputed in every block: bytes that each block keeps, and seconds that it adds to a step."""

    parts: frozenset[str]
    blocks: Sequence[tuple[int, float]]

    @property
    def kept(self) -> int:
        return sum(kept for kept, _ in self.blocks)

    @property
    def seconds(self) -> float:
        return sum(seconds for _, seconds in self.blocks)


def _level(light: _Choice, strong: _Choice, count: int) -> RecomputeLevel:
    blocks = [*strong.blocks[:count], *light.blocks[count:]]
    if count in (0, len(blocks)):
        recomputed = Recomputation((strong if count else light).parts)
    else:
        recomputed = Recomputation(light.parts, strong.parts, count)
    return RecomputeLevel(recomputed, sum(kept for kept, _ in blocks), sum(seconds for _, seconds in blocks))


def _hull(choices: Sequence[_Choice]) -> list[_Choice]:
    """Return the choices on the lower convex hull, from the one that adds no time to the one that keeps least."""
    hull = [choices[0]]
    while True:
        here = hull[-1]
        smaller = [c for c in choices if c.kept < here.kept]
        if not smaller:
            return hull
        hull.append(min(smaller, key=lambda c: ((c.seconds - here.seconds) / (here.kept - c.kept), c.kept)))


def _choices(program: Program, inputs: PlanInputs) -> list[_Choice]:
    """Return what `inputs` ask for, then all choices that add to it. Alike blocks are priced once."""
    assert inputs.target is not None
    by_block = _by_block(program)
    kind_of = [tuple(op.signature for op in ops) for ops in by_block]
    first_of_kind = dict(zip(reversed(kind_of), reversed(by_block), strict=True))
    costs = OpCosts(inputs.ops, inputs.target.device, lambda op: inputs.kernel_for(op).kernel)
    choices = []
    for more in (frozenset[str](), *CHOICES):
        parts = inputs.recompute | more
        prices = {kind: _price(program, ops, parts, inputs, costs) for kind, ops in first_of_kind.items()}
        choices.append(_Choice(parts, [prices[kind] for kind in kind_of]))
    return choices


def _by_block(program: Program) -> list[list[Op]]:
    blocks: dict[int, list[Op]] = {}
    for op in program.ops:
        if op.block >= 0:
            blocks.setdefault(op.block, []).append(op)
    return [blocks.get(index, []) for index in range(max(blocks, default=-1) + 1)]


def _price(
    program: Program, ops: Sequence[Op], parts: frozenset[str], inputs: PlanInputs, costs: OpCosts
) -> tuple[int, float]:
    """Return the bytes that the ops of a block keep for its backward pass, and the seconds added to a step."""
    builder = Builder(inputs.ops, inputs.precision.model)
    drops = inputs.dropped_by(Recomputation(parts))
    again = recompute(replace(program, ops=tuple(ops)), drops, builder, inputs.kept_labels)
    written = {v for op in again.ops if op.phase == "forward" for v in op.outs if v.role == "act"}
    kept = {v for op in again.ops if op.phase != "forward" for v in op.ins} & written
    seconds = sum(costs(op).seconds for op in again.ops) - sum(costs(op).seconds for op in ops)
    return sum(align(v.nbytes) for v in kept), seconds * inputs.grad_accum_steps
