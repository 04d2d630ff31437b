"""Settings that fit a device: the table of `surogate plan --fit`, and what `surogate train --fit` takes of it."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from surogate_core.errors import ConfigError
from surogate_core.machine.devices import GIB
from surogate_core.planning.plan import Plan

from .. import run
from ..config.load import LoadedConfig
from ..fitting.changes import Proposal
from ..reporting.text import counted
from ..training import start as training
from .options import RunArguments
from .plan_text import nothing_fits
from .render import output_width


def fitted(arguments: RunArguments, loaded: LoadedConfig, target: str) -> LoadedConfig:
    """Return the run with the first proposal for `target`, as if its lines were given by --set. Print what changes.

    Raises ConfigError if nothing fits, or only what changes what the run learns.
    """
    fit = run.fit(loaded, target)
    planned, here = fit.before.report.device, training.usable_device().device
    if planned.name != here.name:
        raise ConfigError(
            f"--fit {target}: this machine has {here.title}, not {planned.title}. Train with --fit auto or a size "
            "such as 24GiB; for another device: surogate plan --fit."
        )
    first = fit.proposals[0] if fit.proposals else None
    if first is None:
        raise ConfigError(f"{loaded.source}: --fit {target}: {nothing_fits(fit.before.report)}")
    if first.resort:
        lines = "; or ".join(f"{', '.join(p.lines)} ({p.resort})" for p in fit.proposals)
        raise ConfigError(
            f"{loaded.source}: --fit {target}: nothing fits without changing what the run learns. Change {lines}."
        )
    report = first.plan.report
    print(
        f"--fit {target}: {'no change' if not first.changes else 'changed'}; planned: "
        f"{report.tokens_per_second:,.0f} tokens/s, {report.device_bytes['total'] / GIB:.2f} GiB",
        *(f"  {line}" for line in first.lines),
        sep="\n",
        flush=True,
    )
    overrides = [f"{key}={json.dumps(value)}" for key, value in first.changes.items()]
    return run.load(arguments.config, [*arguments.overrides, *overrides], arguments.mode)


def print_fit(fit: run.Fit, target: str) -> None:
    """Print the proposals as a table, the run as it is on top."""
    console = Console(width=output_width() or 80, highlight=False)
    with console.capture() as printed:
        _print(console, fit, target)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))  # rich pads lines to the width


def _print(console: Console, fit: run.Fit, target: str) -> None:
    report = fit.before.report
    steps, rows = fit.before.inputs.grad_accum_steps, fit.before.inputs.batch_size
    each = " on each GPU" if report.world_size > 1 else ""
    memory = f"{report.device.memory_bytes / GIB:.2f} GiB"
    console.print(f"settings for {report.device.title}, {memory} (--fit {target})", markup=False)
    console.print(
        f"a step keeps its {counted(rows * steps, 'row')} of {fit.before.inputs.seq_len:,} tokens{each}", markup=False
    )
    console.print()
    if not fit.proposals:
        console.print(nothing_fits(report), markup=False)
        return
    console.print(_table(fit))
    if in_torch := fit.before.kernels.in_torch:
        console.print(f"tokens/s count {', '.join(in_torch)} as if compiled: plain torch is slower", markup=False)
    console.print()
    console.print(_advice(fit.proposals[0], target), markup=False)


def _table(fit: run.Fit) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for head in ("tokens/s", "GiB", "host GiB", "recompute"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("change")
    table.add_row("now", *figures(fit.before), Text("fits" if fit.before.report.fits else "does not fit"))
    for number, proposal in enumerate(fit.proposals, 1):
        lines = proposal.lines or ["nothing"]
        lines += [f"last resort: {proposal.resort}"] if proposal.resort else []
        style = "yellow" if proposal.resort else "bold" if number == 1 else ""
        table.add_row(
            f"{number} *" if number == 1 else str(number), *figures(proposal.plan), Text("\n".join(lines)), style=style
        )
    return table


def figures(plan: Plan) -> list[str]:
    """Return the columns of a plan: speed, memory of device and host, and what recomputation adds to a step."""
    report, chosen = plan.report, plan.chosen
    return [
        f"{report.tokens_per_second:,.0f}",
        f"{report.device_bytes['total'] / GIB:.2f}",
        f"{report.pinned_bytes / GIB:.2f}" if report.pinned_bytes else "",
        f"{chosen.costs / chosen.step:+.1%}" if chosen else "",
    ]


def _advice(first: Proposal, target: str) -> str:
    if first.resort:
        return "* changes what the run learns; nothing else that was tried fits: set its lines if you want that"
    if not first.changes:
        return "* nothing needs changing: nothing faster was found"
    if first.changes.keys() == {run.LIMIT}:
        return "* nothing needs changing but the limit: nothing faster was found"
    return f"* the fastest: add its lines to the file, or train with --fit {target}"


def to_json(proposal: Proposal) -> dict[str, Any]:
    """Return a proposal as data: an element of "proposals" of `surogate plan --fit --json`."""
    report, chosen = proposal.plan.report, proposal.plan.chosen
    return {
        "changes": dict(proposal.changes),
        "last_resort": proposal.resort,
        "tokens_per_second": report.tokens_per_second,
        "step_seconds": report.step.seconds,
        "device_bytes": report.device_bytes["total"],
        "pinned_bytes": report.pinned_bytes,
        "recompute_seconds": chosen.costs if chosen else 0.0,
    }
