"""What to change when a run does not fit: every knob is tried on the plan itself, so its saving is exact."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .assemble import Ingredients, assemble
from .prepare import Prepared, summarise


@dataclass(frozen=True)
class Knob:
    """A change of the config. saves: bytes on the device; costs: seconds a step; enough: alone it makes the run fit."""

    change: str
    saves: int
    costs: float
    enough: bool


def cheapest_knobs(prepared: Prepared, count: int = 3) -> list[Knob]:
    """The `count` cheapest changes that save memory: those that suffice first, then by the time that they cost.

    What saves less than a hundredth of the bytes that are missing is no help and is left out.
    """
    before = prepared.report
    least = max(0, before.device_bytes["total"] - before.device.memory_bytes) // 100
    knobs: list[Knob] = []
    for change, given in _changes(prepared):
        after = summarise(assemble(given), given, given.grad_accum_steps)
        saved = before.device_bytes["total"] - after.device_bytes["total"]
        if saved > least:
            knobs.append(Knob(change, saved, after.step.seconds - before.step.seconds, after.fits))
    return sorted(knobs, key=lambda k: (not k.enough, k.costs, -k.saves))[:count]


def _changes(prepared: Prepared) -> Iterator[tuple[str, Ingredients]]:
    """(what to write in the config, the changed ingredients)."""
    given = prepared.ingredients
    steps = given.grad_accum_steps
    for part in ("rmsnorm", "swiglu", "ffn", "att", "block"):
        if not {part, "block"} & given.recompute:
            covered = {"block": {"att", "ffn", "rmsnorm", "qkv", "swiglu"}, "att": {"qkv"}, "ffn": {"swiglu"}}
            parts = given.recompute | {part} | covered.get(part, set())
            yield f"recompute_{part}: true", replace(given, recompute=frozenset(parts))
    if given.batch_size > 1 and given.batch_size % 2 == 0:
        half = given.batch_size // 2
        change = f"per_device_train_batch_size: {half}, gradient_accumulation_steps: {2 * steps}"
        chunks = given.lmhead_chunks
        if chunks and half * given.seq_len % chunks:  # then it is even, and half as many leave the chunks as they are
            chunks //= 2
            change += f", lmhead_chunks: {chunks}"
        smaller = replace(
            given,
            batch_size=half,
            grad_accum_steps=2 * steps,
            max_documents=given.max_documents // 2,
            lmhead_chunks=chunks,
        )
        yield change, smaller
    for key in ("param_grad", "optimizer_state"):
        if getattr(given.precision, key) == "fp32":
            yield f"{key}_dtype: bf16", replace(given, precision=replace(given.precision, **{key: "bf16"}))
