"""Combinations of changes that make a run smaller, each with an estimate of its memory and time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from .inputs import PlanInputs
from .plan import Plan, max_documents
from .recompute_ladder import Rung, arena_bytes, ladder
from .run import Run

_SHORTEST = 256
"""Rows are not made shorter than this many tokens."""


@dataclass(frozen=True)
class Candidate:
    """A combination of changes.

    inputs    what to plan
    total     estimated bytes on the device
    costs     estimated additional seconds per step
    halvings  how often the length of rows is halved. This changes what the model learns, so it is the last resort.
    """

    changes: tuple[str, ...]
    inputs: PlanInputs
    total: float
    costs: float
    halvings: int


def candidates(run: Run, plan: Plan) -> Iterator[Candidate]:
    """Yield every combination of changes that `run` can make."""
    inputs, sizes = plan.inputs, plan.report.device_bytes
    arena, room = plan.assembly.memory.arena_bytes, plan.report.device.memory_bytes
    recompute = _Recomputing.of(plan)
    narrower = [key for key in ("param_grad", "optimizer_state") if getattr(inputs.precision, key) == "fp32"]
    halved = {"param_grad": sizes["gradients"] / 2, "optimizer_state": sizes["optimizer"] / 2}
    for recomputes, (size, halvings, smaller), chosen in product(
        (False, True) if recompute else (False,),
        _sizes(run, plan),
        product((False, True), repeat=len(narrower)),
    ):
        keys = [key for key, wanted in zip(narrower, chosen, strict=True) if wanted]
        changes = (
            *(f"{key}_dtype: bf16" for key in keys),
            *filter(None, (size,)),
            *((recompute.change,) if recompute and recomputes else ()),
        )
        if changes:
            share, costs = smaller.tokens / inputs.tokens, 0.0
            total = sizes["total"] - arena + arena * share - sum(halved[key] for key in keys)
            changed = replace(smaller, precision=replace(inputs.precision, **dict.fromkeys(keys, "bf16")))
            if recompute and recomputes:
                freed, costs = recompute.until(max(0.0, total - room) / share)
                total -= freed * share
                changed = recompute.applied(changed)
            yield Candidate(changes, changed, total, costs, halvings)


@dataclass(frozen=True)
class _Recomputing:
    """Estimates what recomputation frees in a plan that does not choose it by itself.

    change  the YAML that asks for it: all of it on a CPU, whose memory is not known to be for this run alone
    most    bytes of the arena that it frees at most
    """

    change: str
    rungs: Sequence[Rung]
    most: int

    @classmethod
    def of(cls, plan: Plan) -> _Recomputing | None:
        """Return None if the plan chooses recomputation by itself."""
        inputs = plan.inputs
        if inputs.recompute_more:
            return None
        rungs = ladder(plan.assembly, inputs)
        if len(rungs) == 1:
            return None
        most = plan.assembly.memory.arena_bytes - arena_bytes(plan.assembly, inputs, rungs[-1])
        return cls("recompute: true" if plan.target.device.sm is None else "recompute: auto", rungs, most)

    def applied(self, inputs: PlanInputs) -> PlanInputs:
        """Return the inputs with the change."""
        if self.change == "recompute: auto":
            return replace(inputs, recompute_more=True)
        return replace(inputs, recompute=frozenset({"block", "adapter"} if inputs.adapters else {"block"}))

    def until(self, nbytes: float) -> tuple[float, float]:
        """Return the bytes freed, at most `most`, and the seconds of the rung that the planner would take."""
        kept, last = self.rungs[0].kept, self.rungs[-1]
        cheaper = self.rungs if self.change == "recompute: auto" else ()
        rung = next((rung for rung in cheaper if kept - rung.kept >= nbytes), last)
        return min(kept - rung.kept, self.most), rung.seconds - self.rungs[0].seconds


def _sizes(run: Run, plan: Plan) -> Iterator[tuple[str, int, PlanInputs]]:
    """Yield (YAML of the change, halvings of the length of rows, what to plan) for smaller and smaller micro-steps.

    Halves the batch while it is even, then the rows. A step keeps its tokens.
    """
    inputs = plan.inputs
    yield "", 0, inputs
    rows, length, steps, halvings = inputs.batch_size, inputs.seq_len, inputs.grad_accum_steps, 0
    while rows % 2 == 0 or (length % 2 == 0 and length > _SHORTEST):
        if rows % 2 == 0:
            rows //= 2
        else:
            length, halvings = length // 2, halvings + 1
        steps *= 2
        chunks = inputs.lmhead_chunks
        while chunks and rows * length % chunks:  # then it is even
            chunks //= 2
        keys = {
            "per_device_train_batch_size": (rows, inputs.batch_size),
            "sequence_len": (length, inputs.seq_len),
            "gradient_accumulation_steps": (steps, inputs.grad_accum_steps),
            "lmhead_chunks": (chunks, inputs.lmhead_chunks),
        }
        smaller = replace(
            inputs,
            batch_size=rows,
            seq_len=length,
            grad_accum_steps=steps,
            max_documents=max_documents(run.config.sample_packing, length, rows),
            lmhead_chunks=chunks,
        )
        yield ", ".join(f"{key}: {new}" for key, (new, old) in keys.items() if new != old), halvings, smaller
