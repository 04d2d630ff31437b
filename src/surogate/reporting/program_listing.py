"""Text listing of a program, one op per line, for reading and diffing."""

from __future__ import annotations

from surogate_core.program.op import Op, Program


def listing(program: Program) -> str:
    """Return the listing of `program`.

    Each line has the op's index, block, phase (or lane, if it is not "compute"), outputs ("+=" where the op
    accumulates), kind, inputs ("~" where an output overwrites it in place) and scalar attributes.
    """
    width = len(str(max(len(program.ops) - 1, 0)))
    lines = [f"{program.name}: {len(program.ops)} ops"]
    lines += [f"{i:>{width}}  {op_line(op)}" for i, op in enumerate(program.ops)]
    return "\n".join(lines)


def op_line(op: Op) -> str:
    block = f"b{op.block}" if op.block >= 0 else "-"
    outs = ", ".join(_shorten([f"{'+= ' if i in op.accumulate else ''}{v!r}" for i, v in enumerate(op.outs)]))
    overwritten = {op.ins[i] for i in op.in_place.values()}
    ins = ", ".join(_shorten([f"{'~' if v in overwritten else ''}{v!r}" for v in op.ins]))
    attrs = "".join(f" {k}={v}" for k, v in op.attrs.items() if isinstance(v, (int, float, str, bool)))
    phase = op.phase if op.lane == "compute" else op.lane
    return f"{block:<4} {phase:<9} {outs or '-'} = {op.kind}({ins}){attrs}"


def _shorten(values: list[str], keep: int = 6) -> list[str]:
    """Elide the end of a long list. Ops over all parameters have such lists."""
    return values if len(values) <= keep + 1 else [*values[:keep], f"... {len(values) - keep} more ..."]
