"""What to change when a run does not fit.

Changes are chosen by an estimate, which costs little for any combination, and planned before they are suggested: what
a suggestion says that it saves is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from ..config.keys import ADAPTER_FLAG
from ..config.load import load_config, resolved
from ..errors import SurogateError
from ..memory.cost import op_cost
from ..memory.devices import GIB
from ..memory.lifetimes import live_bytes
from ..memory.report import Report
from ..program.value import Value
from .inputs import PlanInputs
from .plan import Plan, max_documents, plan_inputs, plan_run
from .recomputed import includes, selector
from .run import Run, open_run

_CHOICES = (
    *((), ("rmsnorm",), ("swiglu",), ("swiglu", "rmsnorm"), ("ffn",), ("ffn", "rmsnorm"), ("att",), ("att", "rmsnorm")),
    *(("att", "swiglu"), ("att", "swiglu", "rmsnorm"), ("att", "ffn"), ("block",)),
)
"""The sets of recompute keys that are worth trying, none of them included in another key of its set."""

_TRIES = 3
"""Combinations whose estimate fits that are planned at most."""

_SHORTEST = 256
"""Rows are not made shorter than this many tokens."""


@dataclass(frozen=True)
class Suggestion:
    """Changes of the config to make together. Each is a line of YAML, or several separated by ", ".

    saves: bytes on the device. costs: seconds for the tokens of a step. missing: bytes that are still too many; 0: the
    run fits.
    """

    changes: tuple[str, ...]
    saves: int
    costs: float
    missing: int


@dataclass(frozen=True)
class _Candidate:
    """A combination: the changes, what would be planned, the estimated bytes on the device and seconds a step more.

    halvings: how often rows are halved, which changes what is learnt and is therefore the last resort.
    """

    changes: tuple[str, ...]
    given: PlanInputs
    total: float
    costs: float
    halvings: int


def suggest(run: Run, plan: Plan, count: int = 3) -> list[Suggestion]:
    """What makes a run fit that does not: up to `count` alternatives, the cheapest in time first.

    Single changes where one is enough. Else the cheapest combination that fits; where that needs shorter rows, first
    the one that saves most without; and training an adapter, where all weights are trained now. Empty for a run that
    fits, and where nothing can be changed.
    """
    if plan.report.fits:
        return []
    room, step = plan.report.device.memory_bytes, plan.report.step.seconds
    candidates = sorted(_candidates(run, plan), key=lambda c: (c.halvings, round(c.costs / step, 2), len(c.changes)))
    hopeful = [c for c in candidates if c.total <= room]
    alone = [_planned(plan, c) for c in [c for c in hopeful if len(c.changes) == 1 and not c.halvings][: count + 1]]
    enough = sorted((s for s in alone if not s.missing), key=lambda s: (s.costs, -s.saves))
    return enough[:count] or [*_combined(plan, candidates, hopeful), *_adapter(run, plan)][:count]


def one_line(suggestion: Suggestion) -> str:
    """A suggestion inside a sentence: `a: true, b: 1 (saves 5.1 GiB)`."""
    missing = f", {suggestion.missing / GIB:.1f} GiB still missing" if suggestion.missing else ""
    return f"{', '.join(suggestion.changes)} (saves {suggestion.saves / GIB:.1f} GiB{missing})"


def _combined(plan: Plan, candidates: list[_Candidate], hopeful: list[_Candidate]) -> Iterator[Suggestion]:
    """The first of `hopeful` that fits when it is planned. If it has shorter rows, first what saves most without."""
    whole = [c for c in candidates if not c.halvings]
    if whole and not (hopeful and not hopeful[0].halvings):
        most = _planned(plan, min(whole, key=lambda c: c.total))
        if most.saves > 0:
            yield most
        if not most.missing:
            return
    for candidate in hopeful[:_TRIES]:
        planned = _planned(plan, candidate)
        if not planned.missing:
            yield planned
            return


def _adapter(run: Run, plan: Plan) -> Iterator[Suggestion]:
    """Suggest training an adapter with the other keys unchanged, if all weights are trained now."""
    loaded = run.loaded
    if loaded.config.adapter is not None:
        return
    try:
        raw = {**resolved(loaded), ADAPTER_FLAG.key: True}
        changed = load_config(raw, registry=run.registry, mode=loaded.mode, source=loaded.source)
        adapted = open_run(changed, run.registry)
        after = plan_run(adapted, plan.target.device, plan.report.world_size)
    except SurogateError:  # no adapter is installed, or this run cannot have one
        return
    own = _suggestion(plan, (f"{ADAPTER_FLAG.key}: true",), after.report)
    further = next((s for s in suggest(adapted, after, 1) if not s.missing), None)
    if further:
        yield Suggestion((*own.changes, *further.changes), own.saves + further.saves, own.costs + further.costs, 0)
    elif own.saves > 0:
        yield own


def _planned(plan: Plan, candidate: _Candidate) -> Suggestion:
    return _suggestion(plan, candidate.changes, plan_inputs(candidate.given).report)


def _suggestion(plan: Plan, changes: tuple[str, ...], after: Report) -> Suggestion:
    before, total = plan.report, after.device_bytes["total"]
    seconds = after.step.seconds * before.tokens / after.tokens
    missing = max(0, total - before.device.memory_bytes)
    return Suggestion(changes, before.device_bytes["total"] - total, seconds - before.step.seconds, missing)


# ----------------------------------------------------------------------------------------------------------- estimates


def _candidates(run: Run, plan: Plan) -> Iterator[_Candidate]:
    """Every combination of changes that this run can make, with its estimate."""
    given, sizes = plan.inputs, plan.report.device_bytes
    arena = plan.assembly.memory.arena_bytes
    recomputed = [
        (parts, *_without(plan, parts))
        for parts in _CHOICES
        if not any(includes(given.recompute, part) for part in parts)
    ]
    if "block" in given.recompute:
        recomputed = [((), arena, 0.0)]
    narrower = [key for key in ("param_grad", "optimizer_state") if getattr(given.precision, key) == "fp32"]
    halved = {"param_grad": sizes["gradients"] / 2, "optimizer_state": sizes["optimizer"] / 2}
    for (parts, needed, costs), (size, halvings, smaller), chosen in product(
        recomputed, _sizes(run, plan), product((False, True), repeat=len(narrower))
    ):
        keys = [key for key, wanted in zip(narrower, chosen, strict=True) if wanted]
        changes = (
            *(f"{key}_dtype: bf16" for key in keys),
            *filter(None, (size,)),
            *(f"recompute_{part}: true" for part in parts),
        )
        if changes:
            activations = needed * smaller.batch_size * smaller.seq_len / (given.batch_size * given.seq_len)
            total = sizes["total"] - arena + activations - sum(halved[key] for key in keys)
            precision = replace(given.precision, **dict.fromkeys(keys, "bf16"))
            changed = replace(smaller, recompute=given.recompute | set(parts), precision=precision)
            yield _Candidate(changes, changed, total, costs, halvings)


def _sizes(run: Run, plan: Plan) -> Iterator[tuple[str, int, PlanInputs]]:
    """(what to write, halvings of the rows' length, what is planned): smaller and smaller micro-steps.

    First the batch is halved while it is even, then the rows; a step keeps its tokens.
    """
    given = plan.inputs
    yield "", 0, given
    rows, length, steps, halvings = given.batch_size, given.seq_len, given.grad_accum_steps, 0
    while rows % 2 == 0 or (length % 2 == 0 and length > _SHORTEST):
        if rows % 2 == 0:
            rows //= 2
        else:
            length, halvings = length // 2, halvings + 1
        steps *= 2
        chunks = given.lmhead_chunks
        while chunks and rows * length % chunks:  # then it is even
            chunks //= 2
        keys = {
            "per_device_train_batch_size": (rows, given.batch_size),
            "sequence_len": (length, given.seq_len),
            "gradient_accumulation_steps": (steps, given.grad_accum_steps),
            "lmhead_chunks": (chunks, given.lmhead_chunks),
        }
        smaller = replace(
            given,
            batch_size=rows,
            seq_len=length,
            grad_accum_steps=steps,
            max_documents=max_documents(run.config.sample_packing, length, rows),
            lmhead_chunks=chunks,
        )
        yield ", ".join(f"{key}: {new}" for key, (new, old) in keys.items() if new != old), halvings, smaller


def _without(plan: Plan, parts: tuple[str, ...]) -> tuple[float, float]:
    """(bytes of the arena, seconds a step more) with `parts` recomputed.

    A value that would be dropped is counted twice for a while instead of once for long: up to its last reader in the
    forward pass, and from its first in the backward pass.
    """
    assembly, given, report = plan.assembly, plan.inputs, plan.report
    arenas = assembly.memory.arenas
    micro = {name: p for name, p in assembly.programs.items() if p.stage == "micro"}
    name = max(micro, key=lambda name: arenas[name].arena_bytes)
    program, arena = micro[name], arenas[name]
    drops = selector(parts)
    backward = next((i for i, op in enumerate(program.ops) if op.phase == "backward"), len(program.ops))
    last_forward: dict[Value, int] = {}
    first_backward: dict[Value, int] = {}
    seconds = 0.0
    for index, op in enumerate(program.ops):
        for value in (*op.ins, *op.outs):
            if index < backward:
                last_forward[value] = index
            else:
                first_backward.setdefault(value, index)
        if op.phase == "forward" and op.block >= 0 and any(map(drops, op.outs)):
            seconds += op_cost(op, given.ops[op.kind], report.device).seconds
    lives = []
    for life in arena.lives:
        value = life.value
        if drops(value) and value.block >= 0 and value in last_forward and value in first_backward:
            lives += [replace(life, last=last_forward[value]), replace(life, first=first_backward[value])]
        else:
            lives.append(life)
    peak = max(live_bytes(lives, len(program.ops)), default=0)
    rest = max(arenas[other].arena_bytes for other in assembly.programs if other not in micro)
    return max(peak * arena.arena_bytes / max(arena.lower_bound, 1), rest), seconds * given.grad_accum_steps
