"""The longest row that fits a device, for each way to train: `surogate plan --longest`.

Everything that changes no bit is used for it: recomputation, row tiles, what the host can hold. Bytes grow with the
tokens along a line, nearly: the search reads the next length from the line through the last two plans, and stops
between two lengths of the grid of which one fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, combinations
from math import inf
from typing import Any, Literal

from surogate_core.assembly.draft import Draft
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import SurogateError
from surogate_core.planning.plan import Plan, sketch_exactly
from surogate_core.planning.report import summarise
from surogate_core.program.passes.sum_in_blocks import BLOCK
from surogate_core.program.passes.tile import tiles_of

from ..config.keys import ADAPTER_FLAG
from ..config.schema import RECOMPUTE_KEYS
from ..runs.inputs import run_inputs, scaled_model
from ..runs.run import Run
from .changes import ALIKE, Axis, Changes, Proposal, batch_changes, changed, smallest_formats
from .search import Search, programs_of

LONG = BLOCK
"""Rows of more tokens are long."""
_FINE, _COARSE = 1_024, BLOCK
"""Lengths are multiples of the first below four blocks, of the second above."""
_MOST_TOKENS = 1 << 24
"""Longer rows are not tried."""
_FIRST = 2 * BLOCK, 4 * BLOCK
"""Lengths whose plans take little time, for the first line."""
_FARTHEST = 16
"""No row is tried that has more times the tokens of the last one: a line through short rows may not rise."""
_MOST_PLANS = 16
"""Lengths that are tried for one way and one choice of what the host holds."""

Held = tuple[int, ...]
"""The index of a setting for each axis of what the host can hold. The more it can hold, the higher: pairs of blocks,
whose recomputation leaves every second residual to be held, come before blocks."""
Limit = Literal["device", "host", "model"]
Point = tuple[int, float, float]
"""A length, and the bytes that its plan lacks of the device and of the host, negative if there is room."""


@dataclass(frozen=True)
class Longest:
    """The longest row with which a way to train fits.

    way         the way, in words
    tokens      of that row; 0: not even the shortest that is tried fits
    proposal    the changes of the run's keys, and their plan; None: nothing fits
    limited_by  what has no room for a longer row: the device, the host's memory, or the model, whose positions no RoPE
                scaling extends
    scaling     the RoPE scaling without which the model has too few positions; None: it has enough
    """

    way: str
    tokens: int
    proposal: Proposal | None
    limited_by: Limit
    scaling: Mapping[str, Any] | None = None


def longest(run: Run, plan: Plan) -> Iterator[Longest]:
    """Yield the longest row of a run on the device of `plan`, which is of any length: as an adapter on a base in the
    model's dtype and in formats of fewer bits, and with all weights trained. Ways that the run cannot take are left
    out."""
    guess = 0
    for way, changes in _ways(run, plan):
        try:
            one = changed(run, changes) if changes else run
            found = longest_of(one, plan, way, changes, guess=guess)
        except SurogateError:  # no adapter is installed, or this model, loss or format allows none
            continue
        guess = found.tokens or guess
        yield found


def short_row(run: Run) -> Changes:
    """Return the keys of a run with one row of few tokens a step, whose plan is that of a device."""
    tokens = min(_FINE, run.dims.max_positions)
    return {**batch_changes(run.config, 1, tokens, 1), **({"max_model_len": None} if run.config.max_model_len else {})}


def longest_of(
    run: Run,
    plan: Plan,
    way: str = "",
    changes: Changes | None = None,
    *,
    steps: int = 1,
    most: int = _MOST_TOKENS,
    guess: int = 0,
) -> Longest:
    """Return the longest row of one run, which has `changes` of the keys of another already, in `steps` micro-steps of
    one row, of at most `most` tokens. `guess`: about how many these are, 0: not known. Raises like a plan."""
    return _Rows(run, plan, steps, most).longest(way, changes or {}, guess)


def _ways(run: Run, plan: Plan) -> Iterator[tuple[str, Changes]]:
    """Yield each way in words, and the keys that the run must change for it."""
    own = run.weight_format[0].key if run.weight_format else ""
    whole: Changes = {own: False} if own else {}
    if not run.config.from_scratch:
        adapter: Changes = {} if run.config.adapter else {ADAPTER_FLAG.key: True}
        named = run.adapter[0].name if run.adapter else ADAPTER_FLAG.name
        name = ADAPTER_FLAG.title if named == ADAPTER_FLAG.name else named
        yield f"{name}, {plan.inputs.precision.model} base", {**adapter, **whole}
        for bits, key in smallest_formats(run, plan.target.device).items():
            yield f"{name}, {bits}-bit base", {**adapter, **whole, key: True} if key != own else {}
    yield "all weights", {**({ADAPTER_FLAG.key: False, "adapter": None} if run.config.adapter else {}), **whole}


class _Rows:
    """Plans of a run with one row a micro-step, of any length up to `most` tokens."""

    def __init__(self, run: Run, plan: Plan, steps: int, most: int) -> None:
        self._given, self._plan, self._steps = run, plan, steps
        scaled = scaled_model(run, _MOST_TOKENS)
        self._most = most if scaled else min(most, run.dims.max_positions)
        self._run = scaled[1] if scaled else run
        self._recordings: dict[object, Draft] = {}
        self._plans: dict[tuple[int, Held], Proposal | None] = {}
        self._axes: Sequence[Axis] = ()
        shortest = self._changes(min(self._most, BLOCK), ())
        base = changed(self._run, shortest)
        self._axes = Search(base, sketch_exactly(self._inputs(base)), 0).strategies
        if self._axes:
            self._axes = [Axis([{"recompute_pairs": True}, {}]), *self._axes]

    def longest(self, way: str, changes: Changes, guess: int) -> Longest:
        held = tuple(len(axis.settings) - 1 for axis in self._axes)
        if self._plan.inputs.host_memory is not None:
            held, guess = self._for_the_host(held, guess)
        tokens, limit = self._search(held, (_FIRST[1], guess) if guess else _FIRST)
        found = self._fitting(tokens, held)
        for index in range(len(held)) if found else ():
            fewer = _without(held, index)
            other = self._fitting(tokens, fewer) if found and self._may_do(fewer, held, found) else None
            if found and other and other.seconds <= (1 + ALIKE) * found.seconds:
                held, found = fewer, other
        if found is None:
            return Longest(way, 0, None, limit)
        scaled = scaled_model(self._given, tokens) if tokens > self._given.dims.max_positions else None
        found = replace(found, changes={**changes, **found.changes}).finished()
        return Longest(way, tokens, found, limit, scaled[0] if scaled else None)

    def _for_the_host(self, held: Held, guess: int) -> tuple[Held, int]:
        """Return what of `held` the host should hold so that rows are longest, and about how long they are, by lines
        through short rows: what strategies take of the host and free on the device adds up."""
        lengths = [_on_grid(min(first, self._most)) for first in _FIRST]
        whole = [self._point(tokens, held) for tokens in lengths]
        if _crossing(whole, 2) >= _crossing(whole, 1):
            return held, guess
        less = [[self._point(tokens, _without(held, index)) for tokens in lengths] for index in range(len(held))]

        def expected(off: Sequence[int]) -> float:
            def lacks(at: int, of: Literal[1, 2]) -> float:
                return whole[at][of] + sum(less[index][at][of] - whole[at][of] for index in off)

            points = [(tokens, lacks(at, 1), lacks(at, 2)) for at, tokens in enumerate(lengths)]
            return min(_crossing(points, 1), _crossing(points, 2), self._most)

        some = [index for index, setting in enumerate(held) if setting]
        choices = chain.from_iterable(combinations(some, count) for count in range(len(some) + 1))
        best = max(choices, key=lambda off: expected(off) // _COARSE)  # of equal ones the first: it turns off the least
        return reduce(_without, best, held), _on_grid(expected(best))

    def _may_do(self, fewer: Held, held: Held, found: Proposal) -> bool:
        """Return whether a row may fit, and be as fast, with fewer values on the host: of long rows these take as much
        of the device as of short ones, or more."""
        tokens = _on_grid(min(_FIRST[0], self._most))
        other, own = self._planned(tokens, fewer), self._planned(tokens, held)
        if fewer == held or not other or not own:
            return False
        more = other.plan.report.device_bytes["total"] - own.plan.report.device_bytes["total"]
        return found.plan.report.missing_bytes + more <= 0 and other.seconds <= (1 + ALIKE) * own.seconds

    def _search(self, held: Held, begin: Sequence[int]) -> tuple[int, Limit]:
        """Return the longest row that fits with what the host holds, 0 if none, and what has no room for more. Looks
        at the lengths `begin` first."""
        points = [self._point(_on_grid(min(first, self._most)), held) for first in begin]
        short, long = 0, _up(self._most)
        limit: Limit = "model" if self._most < _MOST_TOKENS else "device"
        for _ in range(_MOST_PLANS):
            for tokens, device, host in points:
                if max(device, host) <= 0:
                    short = max(short, tokens)
                elif tokens <= long:
                    long, limit = tokens, "host" if host > device else "device"
            if long - short <= (_FINE if short < _FIRST[1] else _COARSE):
                break
            guess = _on_grid(min(_FARTHEST * points[-1][0], *(_crossing(points, of) for of in (1, 2))))
            guess = min(max(guess, _up(short)), _on_grid(long - 1))
            points.append(self._point(guess, held))
        return short, limit

    def _point(self, tokens: int, held: Held) -> Point:
        found = self._planned(tokens, held)
        if found is None:
            return tokens, inf, -inf
        report = found.plan.report
        needed = report.pinned_bytes + sum(report.beside.values())
        return tokens, report.missing_bytes, -inf if report.host_memory is None else needed - report.host_memory

    def _fitting(self, tokens: int, held: Held) -> Proposal | None:
        found = self._planned(tokens, held) if tokens else None
        return found if found and found.fits else None

    def _planned(self, tokens: int, held: Held) -> Proposal | None:
        """Return the plan of a row. None: a plugin refuses it."""
        if (tokens, held) not in self._plans:
            try:
                self._plans[tokens, held] = self._sketched(tokens, held)
            except SurogateError:
                self._plans[tokens, held] = None
        return self._plans[tokens, held]

    def _sketched(self, tokens: int, held: Held) -> Proposal:
        changes = self._changes(tokens, held)
        inputs = self._inputs(changed(self._run, changes))
        programs = tokens, programs_of(inputs)
        plan = sketch_exactly(inputs, self._recordings.get(programs))
        self._recordings[programs] = plan.recording
        return Proposal(changes, replace(plan, report=summarise(plan.assembly, inputs)))

    def _changes(self, tokens: int, held: Held) -> Changes:
        config = self._run.config
        keys = dict(batch_changes(config, 1, tokens, self._steps))
        keys |= {"max_model_len": None} if config.max_model_len else {}
        keys |= {key: False for key in RECOMPUTE_KEYS.values() if getattr(config, key)}
        keys |= {"recompute": True} if config.recompute != "true" else {}
        tiles = tiles_of(tokens) if tokens > BLOCK else 0
        keys |= {"row_tiles": tiles} if tiles and config.row_tiles != tiles else {}
        for axis, index in zip(self._axes, held, strict=False):
            keys |= axis.settings[index]
        return keys

    def _inputs(self, run: Run) -> PlanInputs:
        own = self._plan.inputs
        inputs = run_inputs(run, self._plan.report.device, own.world_size, own.nodes)
        return replace(inputs, host_memory=own.host_memory, tiles_stand_in=True)


def _without(held: Held, index: int) -> Held:
    return (*held[:index], 0, *held[index + 1 :])


def _on_grid(tokens: float) -> int:
    """Return the longest row of the grid that is no longer."""
    step = _FINE if tokens < _FIRST[1] else _COARSE
    return max(_FINE, int(tokens // step) * step)


def _up(tokens: int) -> int:
    """Return the next row of the grid."""
    return tokens + (_FINE if tokens < _FIRST[1] else _COARSE)


def _crossing(points: Sequence[Point], of: Literal[1, 2]) -> float:
    """Return where the line through the last two points crosses 0: the length that lacks nothing of the device (1) or
    the host (2); infinite if what it lacks does not grow."""
    one, other = sorted(points[-2:])
    slope = (other[of] - one[of]) / max(1, other[0] - one[0])
    if other[of] == inf:
        return one[0] / 2 if one[of] == inf else (one[0] + other[0]) / 2
    return one[0] - one[of] / slope if slope > 0 else inf
