"""`surogate plan --diff PASS`: what one pass does to the programs of a run, as a unified diff of their listings."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from difflib import unified_diff

from ..assembly.assemble import trace
from ..assembly.inputs import PlanInputs
from ..assembly.pass_runner import Pass
from ..errors import ConfigError
from ..program.op import Op
from ..reporting.program_listing import op_line

_CONTEXT = 2


def pass_diff(inputs: PlanInputs, name: str, all_blocks: bool) -> Iterator[str]:
    """Yield the lines of a diff for each program that the pass `name` made. Blocks whose ops are alike are shown once,
    unless `all_blocks`. Raises ConfigError, with the names of passes, if the run has no such pass."""
    passes = trace(inputs).passed.passes
    found = [ran for ran in passes if ran.name == name]
    if not found:
        names = ", ".join(dict.fromkeys(ran.name for ran in passes))
        raise ConfigError(f"--diff {name}: this run has no such pass. Its passes: {names}")
    for ran in found:
        yield from _diff(ran, all_blocks)


def _diff(ran: Pass, all_blocks: bool) -> Iterator[str]:
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
