"""Text listing of a program, one op per line, for reading and diffing."""

from __future__ import annotations

from collections.abc import Iterator

from .op import Op, Program


def listing(program: Program) -> str:
    """Return the listing of `program`.

    Each line has the op's index, block, phase (or lane, if it is not "compute"), outputs ("+=" where the op
    accumulates), kind, inputs ("~" where an output overwrites it in place) and scalar attributes.
    """
    width = len(str(max(len(program.ops) - 1, 0)))
    lines = [f"{program.name}: {len(program.ops)} ops"]
    lines += [f"{i:>{width}}  {_line(op)}" for i, op in enumerate(program.ops)]
    return "\n".join(lines)


def _line(op: Op) -> str:
    block = f"b{op.block}" if op.block >= 0 else "-"
    outs = ", ".join(f"{'+= ' if i in op.accumulate else ''}{v!r}" for i, v in enumerate(_shorten(op.outs)))
    overwritten = {op.ins[i] for i in op.in_place.values()}
    ins = ", ".join(f"{'~' if v in overwritten else ''}{v!r}" for v in _shorten(op.ins))
    attrs = "".join(f" {k}={v}" for k, v in op.attrs.items() if isinstance(v, (int, float, str, bool)))
    phase = op.phase if op.lane == "compute" else op.lane
    return f"{block:<4} {phase:<9} {outs or '-'} = {op.kind}({ins}){attrs}"


class _Elided:
    """Placeholder for the omitted values of a long list. Ops over all parameters have such lists."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __repr__(self) -> str:
        return f"... {self.count} more ..."


def _shorten(values: tuple[object, ...], keep: int = 6) -> Iterator[object]:
    if len(values) <= keep + 1:
        yield from values
    else:
        yield from values[:keep]
        yield _Elided(len(values) - keep)
