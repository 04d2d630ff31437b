"""`surogate plugins trace`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

import typer

from surogate import run
from surogate.cli.json_output import JsonOption, print_json
from surogate.cli.options import (
    ConfigArgument,
    ConfigOption,
    DeviceOption,
    GpusOption,
    NodesOption,
    PtOption,
    SetOption,
    SftOption,
    mode_of,
    run_arguments,
)
from surogate.cli.render import table
from surogate_core.assembly.assemble import trace as traced_assembly
from surogate_core.origin import Origin
from surogate_core.planning.plan import Plan

from .trace import Change, Served, Traced, served, traced

SIGNS = {"added": "+", "changed": "~", "dropped": "-"}
CORE = "core"
MOST_NAMES = 6
"""Programs with the same changes that are all named."""


def trace(
    ctx: typer.Context,
    path: ConfigArgument = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    sft: SftOption = False,
    pt: PtOption = False,
    device: DeviceOption = None,
    gpus: GpusOption = None,
    nodes: NodesOption = 1,
    as_json: JsonOption = False,
) -> None:
    """Show what each pass and plugin does to the programs of a run, and which package's kernel runs each op.

    Examples:
    surogate plugins trace run.yaml
    surogate plugins trace run.yaml --device h100
    """
    arguments = run_arguments(ctx, path, config, overrides, mode_of(sft, pt))
    opened = run.open_run(run.load(arguments.config, arguments.overrides, arguments.mode))
    plan = run.plan(opened, device, gpus, nodes)
    passes = traced(traced_assembly(plan.inputs).passed.passes)
    kernels = served(plan, opened.registry)
    if as_json:
        print_json(to_json(plan, passes, kernels))
        return
    for line in text(plan, passes, kernels):
        print(line)


def text(plan: Plan, passes: Iterable[Traced], kernels: Iterable[Served]) -> Iterator[str]:
    """Yield the lines of the trace. Programs in which a pass does the same share their lines."""
    for step, group in groupby(passes, lambda one: one.ran.step):
        yield f"{step.name}: {step.does}"
        programs: dict[frozenset[str], tuple[list[str], list[str]]] = {}
        for one in group:
            lines = list(_lines(one))
            programs.setdefault(frozenset(lines), (lines, []))[1].append(one.ran.program)
        for (head, *lines), names in programs.values():
            yield f"  {_shortened(names)}{head}"
            yield from lines
    yield f"\nkernels on {plan.target.device.title}"
    rows = [("OP", "OPS", "OP OF", "RUN BY")]
    rows += [(one.op, str(one.count), one.op_of, one.kernel_of) for one in kernels]
    yield "\n".join(f"  {line}" for line in table(rows, None).splitlines())


def _shortened(names: Sequence[str]) -> str:
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:2])} ... {names[-1]} ({len(names)} programs)"


def _lines(one: Traced) -> Iterator[str]:
    """Yield what follows the names of the programs, then a line for each change."""
    by = f", by {one.ran.by}" if one.ran.by else ""
    yield f"{by}{'' if one.changes else ': no change'}{'; the order of ops changes' if one.reordered else ''}"
    counts = [_count(change.blocks) for change in one.changes]
    width = max(map(len, counts), default=0)
    for change, count in zip(one.changes, counts, strict=True):
        how = f" ({', '.join(change.how)})" if change.how else ""
        whose = "" if change.by == one.ran.by else f", by {change.by or CORE}"
        yield f"    {SIGNS[change.what]} {count:>{width}}  {change.op}{how}{whose}"


def _count(blocks: Mapping[int, int]) -> str:
    """Return the number of ops: "4 x 36" if there are four in each of 36 blocks, "4 x 36 + 1" with one outside."""
    inside = [n for block, n in blocks.items() if block >= 0]
    if len(inside) < 2 or len(set(inside)) > 1:
        return str(sum(blocks.values()))
    outside = f" + {blocks[-1]}" if -1 in blocks else ""
    return f"{inside[0]} x {len(inside)}{outside}"


def to_json(plan: Plan, passes: Iterable[Traced], kernels: Iterable[Served]) -> dict[str, Any]:
    """Return the trace as data: the contract of `surogate plugins trace --json`."""
    return {
        "device": plan.target.device.name,
        "passes": [
            {
                "pass": one.ran.name,
                "program": one.ran.program,
                "by": _origin(one.ran.by),
                "ops_before": one.ran.ops_before,
                "ops_after": one.ran.ops_after,
                "reordered": one.reordered,
                "changes": [_change(change) for change in one.changes],
            }
            for one in passes
        ],
        "kernels": [asdict(one) for one in kernels],
        "refusals": {kind: list(reasons) for kind, reasons in plan.kernels.refusals.items()},
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "change": change.what,
        "op": change.op,
        "how": list(change.how),
        "by": _origin(change.by),
        "count": change.count,
        "blocks": {str(block): count for block, count in change.blocks.items()},
    }


def _origin(origin: Origin | None) -> dict[str, str] | None:
    """Return who provides a definition; None for core."""
    if origin is None:
        return None
    return {name: getattr(origin, name) for name in ("kind", "name", "distribution", "version")}
