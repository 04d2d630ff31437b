"""Ops between the ranks of a run, and the norm of gradients that ranks may hold parts of.

The collectives are served by the communicator of each rank (`runtime/collectives.py`) on every device.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from math import prod

from ..errors import need
from ..program.op import Op
from ..program.opdef import OpDef, OutSpec
from ..program.shards import part_size
from .definition import Attrs, Ins, define


def _all_reduce(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    need(len(ins) > 0 and attrs["world_size"] > 0, "all_reduce needs at least one value and one worker")
    return [OutSpec(v.label, v.shape, v.dtype) for v in ins]


def _reduce_scatter(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    need(len(ins) > 0, "reduce_scatter needs at least one value")
    return [OutSpec(v.label, (part_size(v.size, attrs["world_size"]),), v.dtype) for v in ins]


def _reduce(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    need(len(ins) > 0, "reduce needs at least one value")
    return [OutSpec(v.label, v.shape, v.dtype) for v in ins]


def _broadcast(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    shapes, sizes = attrs["shapes"], [v.size for v in ins]
    ends, whole = set(accumulate(sizes)), [*accumulate(map(prod, shapes))]
    need(len(shapes) > 0 and whole[-1] == sum(sizes) and ends.issuperset(whole), f"broadcast of {ins} to {shapes}")
    first = dict(zip(accumulate(sizes, initial=0), ins, strict=False))
    begins = (first[at] for at in (0, *whole[:-1]))
    return [OutSpec(v.label, tuple(shape), v.dtype) for v, shape in zip(begins, shapes, strict=True)]


def _all_gather(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    shapes = attrs["shapes"]
    need(len(ins) == len(shapes) > 0, f"all_gather of {len(ins)} parts needs as many shapes, got {shapes}")
    specs = [OutSpec(v.label, tuple(shape), v.dtype) for v, shape in zip(ins, shapes, strict=True)]
    for part, whole in zip(ins, shapes, strict=True):
        fills = part.size * attrs["world_size"] >= prod(whole)
        need(fills, f"{attrs['world_size']} parts like {part!r} do not fill {list(whole)}")
    return specs


def _ring_bytes(op: Op) -> int:
    """Bytes that a worker sends in a ring all-reduce.

    Each value is split into n parts: n - 1 transfers of a part for the reduce-scatter and n - 1 for the all-gather.
    """
    n = int(op.attrs["world_size"])
    return 2 * (n - 1) * sum(v.nbytes for v in op.ins) // n


def _sent_along(op: Op) -> int:
    """Bytes that a rank sends where each value passes along a chain to its owner, or from it, with as many owners."""
    n = int(op.attrs["world_size"])
    return (n - 1) * sum(v.nbytes for v in op.ins) // n


def _sent_parts(op: Op) -> int:
    """Bytes that a rank sends where each part passes n - 1 times along a ring."""
    parts = op.outs if op.kind == "reduce_scatter" else op.ins
    return (int(op.attrs["world_size"]) - 1) * sum(v.nbytes for v in parts)


def _global_norm(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    return [OutSpec("grad_norm", (), "fp32"), OutSpec("clip_coef", (), "fp32")]


def _square_sums(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    need(len(ins) > 0 and len(ins) == len(attrs["chunks"]), f"{len(ins)} values and {len(attrs['chunks'])} chunk sizes")
    chunks = sum(-(-v.size // chunk) for v, chunk in zip(ins, attrs["chunks"], strict=True))
    return [OutSpec("square_sums", (chunks,), "fp64")]


def _norm_of_sums(ins: Ins, attrs: Attrs) -> list[OutSpec]:
    (sums,) = ins
    for first, count in attrs["ranges"]:
        need(0 <= first < first + count <= sums.size, f"{sums!r} has no {count} sums from {first} on")
    return _global_norm(ins, attrs)


_define = partial(define, module="surogate_core.reference.collectives")

COLLECTIVES: tuple[OpDef, ...] = (
    _define("all_reduce", _all_reduce, attrs={"world_size": int, "how": (str, "sum")}, link=_ring_bytes),
    _define("reduce_scatter", _reduce_scatter, attrs={"world_size": int, "how": (str, "sum")}, link=_sent_parts),
    _define("take_part", _reduce_scatter, attrs={"world_size": int}),
    _define("reduce", _reduce, attrs={"world_size": int, "how": (str, "sum")}, link=_sent_along),
    _define("broadcast", _broadcast, attrs={"world_size": int, "shapes": tuple}, link=_sent_along),
    _define("all_gather", _all_gather, attrs={"world_size": int, "shapes": tuple}, link=_sent_parts),
    _define(
        "global_norm",
        _global_norm,
        attrs={"max_norm": float},
        flops=lambda op: 2 * sum(v.size for v in op.ins),
        uses_host=True,
    ),
    _define(
        "square_sums",
        _square_sums,
        attrs={"chunks": tuple},
        flops=lambda op: 2 * sum(v.size for v in op.ins),
        uses_host=True,
    ),
    _define("norm_of_sums", _norm_of_sums, attrs={"ranges": tuple, "max_norm": float}),
)
