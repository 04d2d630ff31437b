"""Settings that fit a device, the fastest first: what `--fit` shows, and the suggestions of a run that does not fit.

An optimizer step keeps its rows, so a search (`search.py`) changes nothing but the order in which gradients are summed.
Last resorts change what the run learns: gradients and optimizer states in bf16, an adapter, a base in few bits, shorter
rows. Each is searched on its own, as a run with that change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from math import inf

from surogate_core.assembly.resolve import resolve
from surogate_core.errors import SurogateError
from surogate_core.planning.plan import Plan

from ..runs.inputs import run_inputs
from ..runs.plan import sketch_run
from ..runs.run import Run
from .changes import (
    ALIKE,
    ANY_ORDER,
    MOST_STEPS,
    WORTH,
    Changes,
    Proposal,
    changed,
    divided_axes,
    given_up,
    gives_up_less,
    longest_that_may_fit,
    offload_axes,
    recompute_axis,
    resorts,
    resorts_if_nothing_fits,
    shorter_rows,
    whole_blocks,
    with_level,
    worthwhile_whole_blocks,
)
from .longest import LONG, longest_of
from .search import Search

_MOST_PLANS = 13, 7
"""Plans of the search for the run, and of that for each last resort."""
_MOST_PLANS_TO_SUGGEST = 8, 5
"""The same for suggestions, which `surogate plan` and the start of a run wait for."""
_LESS = 0.98
"""A slower proposal is shown if it takes at most this share of the device memory of a faster one."""
_LESS_HOST = 0.75
"""The same of the host memory."""
_SLOWER = 1.25
"""A proposal that takes longer than this, over the fastest, is not shown."""
_FASTER = 0.95
"""A last resort is shown next to what gives up less if its step takes at most this share of the time, or less pinned
memory and not much longer (`_SLOWER`)."""
_WORTH_SAYING = 0.98
"""Settings that are faster than those of a run that fits are named if a step takes at most this share of its time."""


def propose(run: Run, plan: Plan, count: int = 5) -> list[Proposal]:
    """Return up to `count` settings that fit the device of `plan`, the fastest first; for a run that does not fit, then
    the last resorts that are faster still.

    The first one has no changes if the run as it is is the fastest.
    """
    return [proposal for proposal in _all(run, plan, count, _MOST_PLANS) if proposal.fits]


def suggest(run: Run, plan: Plan, count: int = 3) -> list[Proposal]:
    """Return up to `count` proposals for a run that does not fit, and none for a run that fits.

    If nothing fits, return the one that needs least: `plan.report` says what is missing.
    """
    if plan.report.fits:
        return []
    every = _all(run, plan, count, _MOST_PLANS_TO_SUGGEST)
    return [p for p in every if p.fits] or [p for p in every if p.saves(plan) > 0]


def faster_settings(run: Run, plan: Plan) -> Proposal | None:
    """Return the run with less of what its keys divide, offload and recompute, or with more that its ranks divide in
    place of that, if it fits too and is faster: the fastest of these.

    None for a run that does not fit, and where nothing of this kind is set or chosen. Makes five plans at most, and one
    for a single rank.
    """
    if not plan.report.fits:
        return None
    found = [_sketched(run, plan, changes) for changes in _less_and_divided(run, plan)]
    for proposal in sorted(filter(None, found), key=lambda proposal: proposal.seconds):
        if proposal.seconds <= _WORTH_SAYING * plan.report.step.seconds:
            finished = proposal.finished()
            if finished.fits and finished.seconds <= _WORTH_SAYING * plan.report.step.seconds:
                return finished
    return None


def _less_and_divided(run: Run, plan: Plan) -> list[Changes]:
    """Return the changes that `faster_settings` tries: all that is set turned off, and whatever else ranks can divide.

    They divide more only in place of what takes time now: recomputation, or offloading. If they divide weights, blocks
    may stay whole in what memory is free.
    """
    recompute, inputs = recompute_axis(run, plan.target.device), plan.inputs
    axes = [*divided_axes(run, plan)] if inputs.world_size > 1 else []
    off = {key: value for axis in (recompute, *offload_axes(run), *axes) for key, value in axis.settings[0].items()}
    kept = recompute.settings[0] if inputs.recompute else {}
    tried = [with_level(run.config, off)] if off else []
    for settings in product(*(axis.settings for axis in axes)):
        divided = {key: value for setting in settings for key, value in setting.items()}
        more = any(divided.values())
        if divided and (not more or plan.chosen or inputs.offload or inputs.recompute):
            tried.append(with_level(run.config, {**divided, **(kept if more else {})}))
    tried += [whole] if (whole := whole_blocks(plan)) else []
    return [changes for index, changes in enumerate(tried) if changes not in tried[:index]]


def _sketched(run: Run, plan: Plan, changes: Changes) -> Proposal | None:
    """Return the plan of the run with changes, as a sketch; None if it cannot have them."""
    own = plan.inputs
    try:
        sketch = sketch_run(
            changed(run, changes), plan.report.device, own.world_size, host_memory=own.host_memory, nodes=own.nodes
        )
    except SurogateError:
        return None
    return Proposal(changes, sketch)


def _all(run: Run, plan: Plan, count: int, most: tuple[int, int]) -> list[Proposal]:
    others: list[Proposal] = []
    found = _searched(run, plan, {}, most[0])
    same = [*islice(found, 1)]
    if not plan.report.fits:
        others = list(_last_resorts(run, plan, same, most[1]))
    every = [*same, *islice(found, max(0, count - len(others) - 1)), *others][:count]
    for proposal in every:
        proposal.plan.verify()
    return every


def _searched(run: Run, plan: Plan, resort: Changes, most: int, seconds: float = inf) -> Iterator[Proposal]:
    """Yield what fits with the changes `resort`, the fastest first, without what is in no respect better than another.

    If nothing fits, yield what needs least.
    """
    if resort:
        run, own = changed(run, resort), plan.inputs
        plan = sketch_run(run, plan.report.device, own.world_size, host_memory=own.host_memory, nodes=own.nodes)
        if _takes_too_long(plan, seconds):
            return
    found = Search(run, plan, most, seconds).proposals()
    if fitting := [proposal for proposal in found if proposal.fits]:
        found += _with_whole_blocks(run, plan, min(fitting, key=lambda proposal: proposal.seconds))
    best = min(proposal.seconds for proposal in found)
    key = (lambda p: p.missing) if best == inf else lambda p: (round(min(p.seconds / best, 9) / ALIKE), len(p.changes))
    shown: list[Proposal] = []
    for proposal in sorted(found, key=key):
        if proposal.seconds <= _SLOWER * best and not any(_is_no_smaller(proposal, faster) for faster in shown):
            finished = proposal.finished()
            if finished.fits or (best == inf and not shown):
                shown.append(finished)
                yield replace(finished, changes={**resort, **proposal.changes}, resort=given_up(run, resort))


def _with_whole_blocks(run: Run, plan: Plan, fastest: Proposal) -> list[Proposal]:
    """Return the fastest settings of a search with more blocks whole, as a sketch, if these may make them faster."""
    more = worthwhile_whole_blocks(fastest.plan)
    found = _sketched(run, plan, {**fastest.changes, **more}) if more else None
    return [found] if found else []


def _takes_too_long(plan: Plan, seconds: float) -> bool:
    """Return whether a step of long rows takes about as long as `seconds`, or longer, with nothing recomputed or moved:
    of these, larger micro-batches are hardly faster."""
    inputs = plan.inputs
    is_least = inputs.seq_len > LONG and not inputs.recompute and not inputs.offload
    return is_least and plan.report.step.seconds > _FASTER * seconds


def _is_no_smaller(proposal: Proposal, faster: Proposal) -> bool:
    """Return whether a proposal takes about as much device and pinned memory as a faster one, or more."""
    report, other = proposal.plan.report, faster.plan.report
    total = min(report.device_bytes["total"], report.device.memory_bytes)  # a sketch is finished to fit
    return total > _LESS * other.device_bytes["total"] and report.pinned_bytes >= _LESS_HOST * other.pinned_bytes


def _last_resorts(run: Run, plan: Plan, same: Sequence[Proposal], most: int) -> Iterator[Proposal]:
    """Yield the fastest proposal of each last resort that fits, if it is faster than all before it.

    A resort is not tried if what gives up less fits easily: without recomputation and offloading; nor searched if what
    it computes alone takes too long. If nothing fits, yield what gives up more, or else what needs least.
    """
    tried: list[tuple[Changes, Proposal]] = [({}, proposal) for proposal in same[:1]]

    def try_resort(resort: Changes) -> Iterator[Proposal]:
        best = min((p for _, p in tried), key=lambda p: p.seconds, default=None)
        try:
            found = [*islice(_searched(run, plan, resort, most, best.seconds if best else inf), 1)]
        except SurogateError:  # no adapter is installed, or this run cannot have one
            return
        tried.extend((resort, proposal) for proposal in found)
        yield from (p for p in found if p.fits and (best is None or _is_worth_it(p, best)))

    if _waits_for_order(run, plan):
        yield from try_resort(ANY_ORDER)
    for resort in resorts(run, plan, same[0].plan if same else plan):
        if not any(gives_up_less(run, less, resort) and _fits_easily(proposal) for less, proposal in tried):
            yield from try_resort(resort)
    for resort in resorts_if_nothing_fits(run, plan):
        if not any(proposal.fits for _, proposal in tried):
            yield from try_resort(resort)
    if run.config.sequence_len > LONG and not any(proposal.fits for _, proposal in tried):
        tried.extend(({}, proposal) for proposal in _longest_row(run, plan))
        yield from (proposal for _, proposal in tried if proposal.fits)
        if any(proposal.fits for _, proposal in tried):
            return
    least = min((p for _, p in tried), key=lambda p: p.missing, default=Proposal({}, plan)).plan
    every = list(shorter_rows(run.config))
    for rows in every:
        if any(proposal.fits for _, proposal in tried):
            break
        if rows["sequence_len"] <= longest_that_may_fit(least) or rows is every[-1]:
            yield from try_resort(rows)
            least = tried[-1][1].plan if tried else plan
    if not any(proposal.fits for _, proposal in tried):
        yield from sorted((proposal for _, proposal in tried), key=lambda p: p.missing)[:1]


def _waits_for_order(run: Run, plan: Plan) -> bool:
    """Return whether sums in a fixed order take workspace that is worth a change."""
    own = plan.inputs
    if run.config.deterministic == "false":
        return False
    try:
        inputs = run_inputs(changed(run, ANY_ORDER), plan.report.device, own.world_size, own.nodes)
    except SurogateError:
        return False
    ops = dict.fromkeys(op for program in plan.assembly.programs.values() for op in program.ops)
    other = resolve(ops, inputs.kernel_for, inputs.target, inputs.ops)
    most, least = (max(map(table.workspace, ops), default=0) for table in (plan.kernels, other))
    return most - least >= WORTH * plan.report.device.memory_bytes


def _longest_row(run: Run, plan: Plan) -> Iterator[Proposal]:
    """Yield the longest row that fits with everything that changes no number, with the rows of a step that the run has,
    one a micro-step."""
    config = run.config
    steps = config.per_device_train_batch_size * config.gradient_accumulation_steps
    if steps <= MOST_STEPS:
        try:
            found = longest_of(run, plan, steps=steps, most=config.sequence_len).proposal
        except SurogateError:  # this run allows no row that is planned first
            return
        if found and found.plan.inputs.seq_len < config.sequence_len:
            yield replace(found, resort=given_up(run, {"sequence_len": found.plan.inputs.seq_len}))


def _is_worth_it(resort: Proposal, best: Proposal) -> bool:
    """Return whether a last resort is faster than what gives up less, or about as fast with less pinned memory."""
    less = resort.plan.report.pinned_bytes < _LESS_HOST * best.plan.report.pinned_bytes
    return resort.seconds <= (_SLOWER if less else _FASTER) * best.seconds


def _fits_easily(proposal: Proposal) -> bool:
    """Return whether settings fit with nothing recomputed or offloaded, but to keep blocks whole."""
    inputs = proposal.plan.inputs
    return proposal.fits and not inputs.offload and not (proposal.plan.chosen and not inputs.sharding.whole_blocks)
