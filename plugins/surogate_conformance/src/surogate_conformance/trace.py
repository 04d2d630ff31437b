"""The ops that passes of a run add to its programs, change in them and drop from them, whose they are, and who runs the
ops that result. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from surogate_core.api import Op, Program
from surogate_core.assembly.verifier import PassRun
from surogate_core.origin import Origin
from surogate_core.planning.plan import Plan
from surogate_core.plugins.registry import Registry

What = Literal["added", "changed", "dropped"]
FIELDS: Mapping[str, str] = {
    "ins": "reads",
    "outs": "writes",
    "accumulate": "adds",
    "in_place": "in place",
    "lane": "lane",
    "phase": "phase",
    "block": "block",
}
"""Fields of an op that a pass may change, and how the trace calls that."""


@dataclass(frozen=True)
class Change:
    """Equal changes that one pass makes to ops of one program.

    op      kind of the ops; "linear -> acme_linear" if the pass gives them another
    how     what is different about changed ops: "reads", "writes", names of attributes ...
    by      the plugin's definition that does it; None: core
    blocks  {index of a block, -1 outside of blocks: ops}
    """

    what: What
    op: str
    how: tuple[str, ...]
    by: Origin | None
    blocks: Mapping[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.blocks.values())


@dataclass(frozen=True)
class Traced:
    """A pass that ran. reordered: whether ops that it left as they are have another order."""

    ran: PassRun
    changes: tuple[Change, ...]
    reordered: bool


@dataclass(frozen=True)
class Served:
    """Ops of one kind that the same package runs. kernel_of: "reference" if that is the torch reference."""

    op: str
    count: int
    op_of: str
    kernel_of: str


def traced(passes: Sequence[PassRun]) -> list[Traced]:
    """Return what each pass of a run did to each program, in the order of `PASSES`."""
    found = []
    for ran in passes:
        assert ran.programs is not None
        found.append(Traced(ran, *_changes(*ran.programs, ran.by)))
    return found


def served(plan: Plan, registry: Registry) -> list[Served]:
    """Return what runs the ops of a run's programs, without their variants, by kind of op."""
    ops = [op for program in plan.assembly.programs.values() for op in program.ops]
    counts = Counter((op.kind, plan.kernels[op].provider) for op in ops)
    owners = {kind: registry.source("op", kind).plugin.distribution for kind, _ in counts}
    return [Served(kind, n, owners[kind], provider) for (kind, provider), n in sorted(counts.items())]


def _changes(before: Program | None, after: Program, by: Origin | None) -> tuple[tuple[Change, ...], bool]:
    """Return the changes between two programs, and whether ops in both have another order."""
    old = before.ops if before else ()
    one, other = set(old), set(after.ops)
    gone, new = [op for op in old if op not in other], [op for op in after.ops if op not in one]
    pairs = dict(_pairs(gone, new))
    kept = [op for op in after.ops if op in one]
    copied = {(op.kind, op.where) for op in old}
    found = [_added(op, by, recorded=before is None, copied=copied) for op in new if op not in pairs]
    found += [(_changed(was, op, by), op.block) for op, was in pairs.items()]
    replaced = set(pairs.values())
    found += [(Change("dropped", op.kind, (), by), op.block) for op in gone if op not in replaced]
    return tuple(_grouped(found)), kept != [op for op in old if op in other]


def _pairs(gone: Sequence[Op], new: Sequence[Op]) -> Iterator[tuple[Op, Op]]:
    """Yield each op that a pass has put in the place of another, and that one.

    It is of the same kind and writes or reads the same; or it is of another kind and writes the same.
    """
    left = list(gone)
    unmatched = list(new)
    keys: tuple[Callable[[Op], Sequence[Any]], ...] = (
        lambda op: [(op.kind, v.name) for v in op.outs],
        lambda op: [(op.kind, op.phase, *(v.name for v in op.ins))],
        lambda op: [v.name for v in op.outs],
    )
    for key in keys:
        places: dict[Any, list[Op]] = {}
        for op in left:
            for name in key(op):
                places.setdefault(name, []).append(op)
        taken: set[Op] = set()
        still = []
        for op in unmatched:
            was = next((c for name in key(op) for c in places.get(name, ()) if c not in taken), None)
            if was is None:
                still.append(op)
            else:
                taken.add(was)
                yield op, was
        left, unmatched = [op for op in left if op not in taken], still


def _added(op: Op, by: Origin | None, *, recorded: bool, copied: set[tuple[str, str]]) -> tuple[Change, int]:
    """Return the addition of an op. A copy of an op of before is the pass's; else it is of what has emitted it."""
    again = (op.kind, op.where) in copied
    whose = by if again else op.emitter or (None if recorded else by)
    return Change("added", op.kind, ("again",) if again else (), whose), op.block


def _changed(was: Op, op: Op, by: Origin | None) -> Change:
    how = [text for name, text in FIELDS.items() if getattr(was, name) != getattr(op, name)]
    if was.kind != op.kind:
        emitted = op.emitter if op.emitter != was.emitter else None  # a changed op keeps its emitter
        return Change("changed", f"{was.kind} -> {op.kind}", (), emitted or by)
    names = [n for n in {**was.attrs, **op.attrs} if n not in was.attrs or was.attrs[n] != op.attrs.get(n)]
    return Change("changed", op.kind, (*how, *names), by)


def _grouped(changes: Iterable[tuple[Change, int]]) -> Iterator[Change]:
    """Yield equal changes as one, with the blocks that they are in."""
    found: dict[tuple[Any, ...], tuple[Change, Counter[int]]] = {}
    for change, block in changes:
        key = change.what, change.op, change.how, change.by
        found.setdefault(key, (change, Counter()))[1][block] += 1
    for change, blocks in found.values():
        yield replace(change, blocks=dict(sorted(blocks.items())))
