"""The kernels of collectives, which call the communicator of the rank, on a GPU and on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from ..api import Call, Comm, KernelDef, Op, Span, Support, Value
from ..api.world import REDUCIBLE, Position
from ..dtypes import DTYPES
from ..errors import ProgramError
from ..memory.alignment import align

_MOST_NAMES = 3


def _refused(op: Op) -> str:
    combines = "reduce" in op.kind
    wrong = [v for v in op.ins if combines and v.dtype not in REDUCIBLE]
    in_place = op.kind != "all_reduce" or op.ins == op.outs
    if wrong or not in_place or op.accumulate:
        what = f"reduces only {', '.join(sorted(REDUCIBLE))}" if combines else "writes its outputs"
        how = ", in place" if op.kind == "all_reduce" else ", without adding"
        return f"{what}{how}; got {', '.join(map(repr, wrong or op.ins))}"
    return ""


def call(op: Op, comm: Comm, pointer: Callable[[Value], int], stream: int) -> Call:
    """Return the call of `comm` that does what the op means. Raises ProgramError if it cannot."""
    refused, size = _refused(op), op.attrs["world_size"]
    if size != comm.world_size:
        refused = f"recorded for {size} ranks, but the communicator connects {comm.world_size}"
    if refused:
        raise ProgramError(f"{op.kind} (block {op.block}, emitted at {op.where}): {refused}")
    if op.kind == "reduce":
        pairs = tuple((_span(pointer, v), _span(pointer, own)) for v, own in zip(op.ins, op.outs, strict=True))
        roots = tuple(v.owner for v in op.outs)
        return _collective, (comm.position, named(op), comm.reduce, (pairs, roots, op.attrs["how"]), stream)
    if op.kind == "broadcast":
        pairs, roots = tuple(_put_together(op, pointer)), tuple(v.owner for v in op.ins)
        return _collective, (comm.position, named(op), comm.broadcast, (pairs, roots), stream)
    if op.kind == "all_reduce":
        spans = ranges([(pointer(v), v) for v in op.ins])
        return _collective, (comm.position, named(op), comm.all_reduce, (spans, op.attrs["how"]), stream)
    gathers = op.kind == "all_gather"
    parts, wholes = (op.ins, op.outs) if gathers else (op.outs, op.ins)
    pairs = tuple(_pair(pointer, part, whole, size) for part, whole in zip(parts, wholes, strict=True))
    if gathers:
        return _collective, (comm.position, named(op), comm.all_gather, (pairs,), stream)
    if op.kind == "take_part":
        return _take_part, (comm, pairs, [whole.size for whole in wholes], stream)
    sums = tuple((whole, part) for part, whole in pairs)
    return _collective, (comm.position, named(op), comm.reduce_scatter, (sums, op.attrs["how"]), stream)


def _span(pointer: Callable[[Value], int], value: Value) -> Span:
    return pointer(value), value.size, value.dtype


def _put_together(op: Op, pointer: Callable[[Value], int]) -> Iterator[tuple[Span, Span]]:
    """Yield the spans of the inputs of a broadcast, and where in the outputs they go."""
    ins = iter(op.ins)
    for out in op.outs:
        at = 0
        while at < out.size:
            value = next(ins)
            address = pointer(out) + DTYPES[out.dtype].nbytes(at)
            yield _span(pointer, value), (address, value.size, value.dtype)
            at += value.size


def _pair(pointer: Callable[[Value], int], part: Value, whole: Value, parts: int) -> tuple[Span, Span]:
    """Return the spans of a part and of the whole value with its padding."""
    if whole.memory < DTYPES[whole.dtype].nbytes(parts * part.size):
        raise ProgramError(f"{whole!r} has no room for {parts} parts of {part.size} elements")
    return (pointer(part), part.size, part.dtype), (pointer(whole), parts * part.size, whole.dtype)


def named(op: Op) -> str:
    """Return the name of a collective for messages: "the sum of gradients of block 17"."""
    gathers = op.kind in ("all_gather", "broadcast")
    wholes = [v.inside or v for v in (op.outs if gathers else op.ins)]
    roles = {v.role for v in wholes}
    what = _ROLES[roles.pop()] if len(roles) == 1 and roles <= _ROLES.keys() else ""
    what = what or ", ".join(v.name for v in wholes[:_MOST_NAMES])
    where = f" of block {op.block}" if op.block >= 0 else ""
    if gathers:
        return f"the gathering of {what}{where}"
    how = "maximum" if op.attrs["how"] == "max" else op.attrs["how"]
    return f"the {how} of {what}{where}"


_ROLES = {"grad": "gradients", "param": "weights"}


def _collective(
    position: Position, name: str, method: Callable[..., None], arguments: Sequence[object], stream: int
) -> None:
    """Call a method of a communicator, whose rank is in the collective `name` meanwhile."""
    with position.collective(name, stream):
        method(*arguments, stream)


def _take_part(comm: Comm, pairs: Sequence[tuple[Span, Span]], sizes: Sequence[int], stream: int) -> None:
    """Copy the rank's parts of values of these sizes. Zeros take the place of padding, which nothing has written."""
    from .comms.spans import clear, copy, current, part

    with current(stream, comm.device):
        for (own, whole), size in zip(pairs, sizes, strict=True):
            copy(own, part(whole, comm.rank, comm.world_size), stream)
            clear(own, max(0, size - comm.rank * own[1]), stream)


def sent(call: Call) -> Hashable:
    """Return what a call of `call` moves, without addresses; None for other calls. NCCL connects ranks alike for equal
    results."""
    function, arguments = call
    if function is _collective:
        _, _, method, given, _ = arguments
        return method.__name__, _without_addresses(given)
    return _without_addresses(arguments[1:-1]) if function is _take_part else None


def _without_addresses(given: object) -> Hashable:
    match given:
        case (int(), int() as size, str() as dtype):
            return size, dtype
        case tuple() | list():
            return tuple(map(_without_addresses, given))
    return given


def ranges(values: Sequence[tuple[int, Value]]) -> tuple[tuple[int, int, str], ...]:
    """Return the fewest ranges (address, elements, dtype) that cover values at these addresses.

    Adjacent values of the same dtype are one range. The padding between them is not used and contains zeros. Where the
    memory of a rank begins has no effect, so all ranks have the same ranges.
    """
    found: list[tuple[int, int, str]] = []
    end = None  # of the last range
    for address, value in values:
        start = found.pop()[0] if address == end and found[-1][2] == value.dtype else address
        found.append((start, (address - start) * 8 // DTYPES[value.dtype].bits + value.size, value.dtype))
        end = start + align(DTYPES[value.dtype].nbytes(found[-1][1]))
    return tuple(found)


KERNELS = tuple(
    KernelDef(
        op=kind,
        dtypes=("*", "..."),
        attrs=("how",) if "reduce" in kind else (),
        supports=lambda op, target: Support(not _refused(op), _refused(op)),
        bind=lambda op, ctx: call(op, ctx.comm, ctx.pointer, ctx.stream),
    )
    for kind in ("all_reduce", "reduce_scatter", "reduce", "all_gather", "broadcast", "take_part")
)

KINDS = frozenset(kernel.op for kernel in KERNELS)
"""Kinds of ops that call the communicator."""
