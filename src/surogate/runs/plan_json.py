"""A plan as data: the contract of `surogate plan --json`, and of `plan.json` in the folder of a run. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from surogate_core.planning.memory_timeline import MemoryTimeline
from surogate_core.planning.plan import Plan

from ..config.adapter import Mode
from .disk import DiskUse

PLAN_FILE = "plan.json"
"""The plan of a run in its output folder."""

_PARTS = ("waiting", "copy", "product", "attention", "memory")


def to_json(plan: Plan, mode: Mode, chosen: str, problem: str = "", disk: DiskUse | None = None) -> dict[str, Any]:
    """Return the plan as data. Bytes, seconds and FLOPs are those of `Report`, `StepWork` and `MemoryTimeline`.

    chosen   why the run is planned for this device
    problem  why a run would not use a GPU of this machine; "" if there is no problem
    disk     what the run writes
    """
    report, timeline, work = plan.report, plan.memory_timeline(), plan.step_work()
    device = report.device
    return {
        "fits": report.fits,
        "defaults": mode,
        "weight_format": plan.inputs.weight_format[0].name if plan.inputs.weight_format else None,
        "device": {
            "name": device.name,
            "title": device.title,
            "flops": dict(device.flops),
            "source": device.source,
            "bytes": device.memory_bytes,
            "count": report.devices,
            "machines": report.nodes,
            "ranks_per_device": report.ranks_per_device,
            "chosen": chosen,
            "problem": problem,
        },
        "device_bytes": dict(report.device_bytes),
        "host_bytes": dict(report.host_bytes),
        "host_limit": report.host_memory,
        "recompute": _recompute(plan),
        "row_tiles": plan.row_tiles,
        "decoded_experts": plan.inputs.decoded_experts or 0,
        "step": {
            "seconds": report.step.seconds,
            "tokens": report.tokens,
            "tokens_per_second": report.tokens_per_second,
            "counted_as_compiled": list(plan.kernels.in_torch),
            "flops": report.step.flops,
            "model_flops": work.model_flops,
            "bytes": report.step.bytes,
            "collective_seconds": report.step.comm_seconds,
            **{f"{part}_seconds": getattr(report.step, f"{part}_seconds") for part in _PARTS},
            "link": asdict(report.route.link) if report.world_size > 1 else None,
            "scaling": report.scaling,
        },
        "kinds": [asdict(kind) for kind in work.kinds],
        "phases": dict(work.phases),
        "memory": _peak(timeline),
        "disk": disk and asdict(disk),
        "kernels": dict(plan.kernels.providers),
        "other_kernels": {kind: list(others) for kind, others in plan.kernels.others.items()},
        "refusals": {kind: list(reasons) for kind, reasons in plan.kernels.refusals.items()},
        "notices": [*plan.overridden, *plan.kernels.notices],
    }


def _recompute(plan: Plan) -> dict[str, Any] | None:
    """Return what `recompute: auto` recomputes and its price, or None if it recomputes nothing."""
    chosen = plan.chosen
    if chosen is None:
        return None
    recomputed = chosen.recomputation
    return {
        "parts": sorted(recomputed.parts),
        "first_blocks": {"count": recomputed.count, "parts": sorted(recomputed.first)},
        "saves": chosen.saves,
        "seconds": chosen.costs,
    }


def _peak(timeline: MemoryTimeline) -> dict[str, Any]:
    """Return what holds the memory where most is live: of each cause its bytes, values, and the largest of them."""
    at = timeline.peak
    op = timeline.ops[at] if timeline.ops else None
    ranked = sorted(timeline.held, key=lambda cause: -timeline.causes[cause][at])
    return {
        "program": timeline.program,
        "ops": len(timeline.ops),
        "peak": {
            "op": at,
            "kind": op.kind if op else None,
            "phase": op.phase if op else None,
            "block": op.block if op and op.block >= 0 else None,
            "bytes": timeline.totals[at] if op else sum(timeline.fixed.values()),
        },
        "fixed": dict(timeline.fixed),
        "gaps": timeline.gaps,
        "causes": {cause: {"bytes": timeline.causes[cause][at], **timeline.held[cause]._asdict()} for cause in ranked},
    }


def timeline_json(timeline: MemoryTimeline) -> dict[str, Any]:
    """Return the bytes over all ops, short enough to be kept: names once, and of each cause only where it changes.

    `kind`, `phase` and `block` have a number for each op: an index into `kinds` and `phases`, and -1 outside of blocks.
    `causes` has pairs of an op and the bytes from there on.
    """
    kinds, phases = (list(dict.fromkeys(getattr(op, of) for op in timeline.ops)) for of in ("kind", "phase"))
    where = {name: index for index, name in enumerate(kinds)}, {name: index for index, name in enumerate(phases)}
    return {
        "program": timeline.program,
        "peak": timeline.peak,
        "kinds": kinds,
        "kind": [where[0][op.kind] for op in timeline.ops],
        "phases": phases,
        "phase": [where[1][op.phase] for op in timeline.ops],
        "block": [op.block for op in timeline.ops],
        "fixed": dict(timeline.fixed),
        "causes": {
            cause: [[at, n] for at, n in enumerate(values) if n != (values[at - 1] if at else 0)]
            for cause, values in timeline.causes.items()
        },
    }
