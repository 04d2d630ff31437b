"""`surogate plan`: the memory and time of a run, from the config.json of its model alone."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path

from surogate_core.assembly.assemble import trace
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.assembly.resolve import idle_kernels, idle_modules
from surogate_core.assembly.verifier import PassRun
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_core.program.op import Op

from .. import run
from ..machine.rates_file import this_machine
from ..reporting.program_listing import listing as program_listing
from ..reporting.program_listing import op_line
from ..runs.disk import disk_use
from ..runs.plan_json import timeline_json, to_json
from .assumed_verb import assumed_verb
from .json_output import print_json
from .options import RunArguments
from .plan_text import plan_text
from .render import output_width, paint, paragraph
from .written_page import print_written


@dataclass(frozen=True)
class Machines:
    """The machines that a run is planned for.

    device  name of a device; None: what a run on this machine would train on
    gpus    of all machines; None: on each machine those of the key `gpus`
    nodes   machines
    """

    device: str | None = None
    gpus: int | None = None
    nodes: int = 1


def plan_command(
    arguments: RunArguments,
    machines: Machines,
    *,
    as_json: bool,
    listing: bool,
    check: bool = False,
    html: Path | None = None,
) -> int:
    """Print the plan of a run: as text, with the op lists if `listing`, or as JSON; and write it as a page to `html`.

    Returns 1 if the run does not fit and `check` is set, else 0.
    """
    with _without_collections():
        fits = _plan(arguments, machines, as_json, listing, html)
        return int(check and not fits)


def diff_command(arguments: RunArguments, machines: Machines, name: str, *, all_blocks: bool) -> int:
    with _without_collections():
        opened = run.open_run(run.load(arguments.config, arguments.overrides, arguments.mode))
        plan = run.plan(opened, machines.device, machines.gpus, machines.nodes)
        for line in pass_diff(plan.inputs, name, all_blocks):
            print(paint(line, {"+": "green", "-": "red"}[line[0]]) if line[0] in "+-" else line)
    return 0


def fit_command(arguments: RunArguments, target: str, machines: Machines, *, as_json: bool, check: bool = False) -> int:
    """Print settings with which a run fits `target` (see `run.fit`), as a table or as JSON.

    Returns 1 if there are none and `check` is set, else 0.
    """
    with _without_collections():
        loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
        fit = run.fit(loaded, target, machines.device, machines.gpus, machines.nodes)
    from .fit import print_fit
    from .fit import to_json as proposal_json

    if as_json:
        proposals = {"proposals": [proposal_json(proposal) for proposal in fit.proposals]}
        print_json(to_json(fit.before, loaded.mode, f"--fit {target}") | proposals)
    else:
        print_fit(fit, target)
    return int(check and not any(proposal.fits for proposal in fit.proposals))


def longest_command(arguments: RunArguments, machines: Machines, *, as_json: bool) -> int:
    """Print the longest row that fits for each way to train a run, as a table or as JSON. Returns 1 if none fits."""
    from .longest import print_longest
    from .longest import to_json as row_json

    with _without_collections():
        loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
        here = None if machines.device else this_machine()
        found = run.longest(loaded, here or machines.device, machines.gpus, machines.nodes)
    chosen = here.chosen if here else f"--device {machines.device}"
    if as_json:
        print_json(to_json(found.plan, loaded.mode, chosen) | {"longest": [row_json(row) for row in found.rows]})
    else:
        print_longest(found, chosen)
    return int(not any(row.proposal for row in found.rows))


@contextmanager
def _without_collections() -> Iterator[None]:
    """Turn the garbage collector off: a plan is a million objects that nearly all stay, and collections take a quarter
    of the time. Those objects are never collected, or the first collection afterwards would take seconds."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _plan(arguments: RunArguments, machines: Machines, as_json: bool, listing: bool, html: Path | None) -> bool:
    """Print the plan. Return whether the run fits."""
    if html is not None:
        from ..pages.page import refuse_other

        refuse_other(html)
    loaded = run.load(arguments.config, arguments.overrides, arguments.mode)
    here = None if machines.device else this_machine()
    opened = run.open_run(loaded)
    plan = run.plan(opened, here or machines.device, machines.gpus, machines.nodes)
    chosen = here.chosen if here else f"--device {machines.device}"
    problem = here.idle or _idle(plan) if here else ""
    document = to_json(plan, loaded.mode, chosen, problem, disk_use(opened, plan)) if as_json or html else {}
    if html is not None:
        from ..pages.reports import plan_page  # it needs numpy, which a plan as text does not

        name = loaded.config.resolved_run_name
        nbytes = plan_page(document | {"timeline": timeline_json(plan.memory_timeline())}, name, html)
        print_written(html, nbytes)
    if as_json:
        print_json(document)
        return plan.report.fits
    if problem:
        print(f"{paint('problem:', 'red')} {problem}")
    if listing:
        print(_passes(plan))
        for program in plan.assembly.programs.values():
            print(f"\n{program_listing(program)}")
        print()
    for line in plan_text(opened, plan, chosen, assumed_verb(loaded, arguments)):
        print(line, flush=True)  # one by one: suggestions take seconds to find
    if ends := run.unknown_turn_ends(opened):
        print(paragraph(ends, output_width()))
    return plan.report.fits


def _idle(plan: Plan) -> str:
    idle = idle_modules(plan.kernels)
    return idle_kernels(plan.target.device, idle) if idle else ""


def _passes(plan: Plan) -> str:
    rows = [f"  {p.name:<16}{p.program:<14}{p.ops_before:>6} -> {p.ops_after}" for p in plan.assembly.passed.passes]
    return "\n".join(["passes, each verified:", *rows])


_CONTEXT = 2


def pass_diff(inputs: PlanInputs, name: str, all_blocks: bool) -> Iterator[str]:
    """Yield the lines of a unified diff of listings for each program that the pass `name` made. Blocks whose ops are
    alike are shown once, unless `all_blocks`. Raises ConfigError, with the names of passes, if the run has none such.
    """
    passes = trace(inputs).passed.passes
    found = [ran for ran in passes if ran.name == name]
    if not found:
        names = ", ".join(dict.fromkeys(ran.name for ran in passes))
        raise ConfigError(f"--diff {name}: this run has no such pass. Its passes: {names}")
    for ran in found:
        yield from _diff(ran, all_blocks)


def _diff(ran: PassRun, all_blocks: bool) -> Iterator[str]:
    assert ran.programs is not None
    before, after = ran.programs
    old, new = before.ops if before else (), after.ops
    by = f", {ran.by}" if ran.by else ""
    alike = {} if all_blocks else _alike(old, new)
    one, other = ([op_line(op) for op in ops if op.block not in alike] for ops in (old, new))
    heads = f"{before.name if before else 'nothing'} before {ran.name}", f"{after.name} after {ran.name}{by}"
    lines = list(unified_diff(one, other, *heads, n=_CONTEXT, lineterm=""))
    yield from lines or [f"  {after.name}: {ran.name}{by} changes no line"]
    for block in dict.fromkeys(alike.values()) if lines else ():
        others = [b for b in alike if alike[b] == block]
        yield f"  {_blocks(others)}: as block {block}"


def _alike(old: Sequence[Op], new: Sequence[Op]) -> dict[int, int]:
    """Return {block: the first block whose ops are alike, before and after the pass}, without the first ones."""
    forms: dict[int, list[Hashable]] = {}
    for which, ops in enumerate((old, new)):
        for op in ops:
            if op.block >= 0:
                forms.setdefault(op.block, []).append((which, *_form(op)))
    first: dict[Hashable, int] = {}
    places = {block: first.setdefault(tuple(forms[block]), block) for block in sorted(forms)}
    return {block: place for block, place in places.items() if block != place}


def _form(op: Op) -> tuple[Hashable, ...]:
    """Return what the ops of blocks that are alike share: all but names, and attributes such as random streams."""
    values = tuple(v.form for v in (*op.ins, *op.outs))
    return op.kind, op.phase, op.lane, op.accumulate, tuple(op.in_place.items()), len(op.ins), values


def _blocks(blocks: Sequence[int]) -> str:
    """Return "blocks 1 to 34", or each of them if they are not in a row."""
    if len(blocks) > 2 and blocks[-1] - blocks[0] == len(blocks) - 1:
        return f"blocks {blocks[0]} to {blocks[-1]}"
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
