"""Combinations of changes that make a run smaller, each with an estimate of its memory and time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from .inputs import PlanInputs
from .plan import Plan, max_documents
from .recompute_estimate import RecomputeEstimate
from .recomputed import includes
from .run import Run

_CHOICES = (
    *((), ("rmsnorm",), ("swiglu",), ("swiglu", "rmsnorm"), ("ffn",), ("ffn", "rmsnorm"), ("att",), ("att", "rmsnorm")),
    *(("att", "swiglu"), ("att", "swiglu", "rmsnorm"), ("att", "ffn"), ("block",)),
)
"""The sets of recompute keys that are worth trying. No key of a set includes another."""

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
    arena = plan.assembly.memory.arena_bytes
    narrower = [key for key in ("param_grad", "optimizer_state") if getattr(inputs.precision, key) == "fp32"]
    halved = {"param_grad": sizes["gradients"] / 2, "optimizer_state": sizes["optimizer"] / 2}
    for (parts, needed, costs), (size, halvings, smaller), chosen in product(
        _recomputations(plan), _sizes(run, plan), product((False, True), repeat=len(narrower))
    ):
        keys = [key for key, wanted in zip(narrower, chosen, strict=True) if wanted]
        changes = (
            *(f"{key}_dtype: bf16" for key in keys),
            *filter(None, (size,)),
            *(f"recompute_{part}: true" for part in parts),
        )
        if changes:
            activations = needed * smaller.tokens / inputs.tokens
            total = sizes["total"] - arena + activations - sum(halved[key] for key in keys)
            precision = replace(inputs.precision, **dict.fromkeys(keys, "bf16"))
            changed = replace(smaller, recompute=inputs.recompute | set(parts), precision=precision)
            yield Candidate(changes, changed, total, costs, halvings)


def _recomputations(plan: Plan) -> list[tuple[tuple[str, ...], float, float]]:
    """Return (recompute keys, bytes of the arena, additional seconds per step) for each choice."""
    recomputed = plan.inputs.recompute
    if "block" in recomputed:
        return [((), plan.assembly.memory.arena_bytes, 0.0)]
    estimate = RecomputeEstimate.of(plan)
    choices = (parts for parts in _CHOICES if not any(includes(recomputed, part) for part in parts))
    return [(parts, estimate.arena_bytes(parts), estimate.seconds(parts)) for parts in choices]


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
