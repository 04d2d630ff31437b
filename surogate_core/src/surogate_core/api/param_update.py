"""An optimizer whose op updates many params at once, element by element:

    def update(context):
        ms = [context.builder.state(...) for p in context.params]
        emit_update(context, "acme_lion", context.params, [ms], weight_decay=(0.1,) * len(context.params))

    LION_OP = OpDef(
        kind="acme_lion",
        infer=infer_update,
        attrs={**UPDATE_ATTRS, "weight_decay": tuple},
        may_overwrite=updated_in_place,
        positioned=True,
        ...
    )

Inputs of the op: clip_coef, lr, step and seed; then n gradients, n masters, and the states. Outputs: masters and
states, updated in place, then the work copies and the amaxes of the params that have one. Attrs, besides those of the
optimizer:

n            number of params
copied       indices of the params that have a work copy: masters of another dtype than the param
copy_dtypes  dtypes of these copies
measured     indices of the params whose largest magnitude the recipe reads
streams      of random bits, one per param

A kernel finds them in a table in device memory, whose words are `update_table`'s: <surogate/param_table.cuh>.
That is for ops whose first two columns of states are m and v, and whose attr `weight_decay` has a number per param.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from zlib import crc32

from ..program.op import Op
from ..program.opdef import OutSpec
from ..program.value import Value
from .base import Support
from .optimizers import TrainedParam, UpdateContext

UPDATE_ATTRS: Mapping[str, Any] = {
    "n": int,
    "copied": tuple,
    "copy_dtypes": tuple,
    "measured": tuple,
    "streams": tuple,
}
"""The attributes that `emit_update` gives to an op."""
SCALARS = 4
"""Number of inputs in front of the gradients."""
_ON_HOST = 32
"""Flag of a param with a value in host memory, in the table."""


def emit_update(
    context: UpdateContext, kind: str, params: Sequence[TrainedParam], states: Sequence[Sequence[Value]], **attrs: Any
) -> None:
    """Emit the op `kind` over `params`, with the states column by column and with the attrs of the optimizer."""
    kept = [p.master for p in params] + [state for column in states for state in column]
    copies = {i: p.param for i, p in enumerate(params) if p.param is not p.master}
    measured = {i: p.amax for i, p in enumerate(params) if p.amax is not None}
    scalars = context.scalars
    context.builder.emit(
        kind,
        *(context.clip_coef, scalars.lr, scalars.step, scalars.seed),
        *(p.grad for p in params),
        *kept,
        outs=[*kept, *copies.values(), *measured.values()],
        n=len(params),
        copied=tuple(copies),
        copy_dtypes=tuple(v.dtype for v in copies.values()),
        measured=tuple(measured),
        streams=tuple(crc32(p.name.encode()) for p in params),
        **attrs,
    )


def infer_update(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """Return the specs of masters and states, then of work copies and amaxes."""
    first = SCALARS + attrs["n"]
    kept = [OutSpec("updated", v.shape, v.dtype) for v in ins[first:]]
    copies = zip(attrs["copied"], attrs["copy_dtypes"], strict=True)
    work = [OutSpec("work", ins[first + i].shape, dtype) for i, dtype in copies]
    return [*kept, *work, *(OutSpec("amax", (), "fp32") for _ in attrs["measured"])]


def updated_in_place(op: Op) -> dict[int, int]:
    """Return {index of an output: index of the input that it updates}: masters and states."""
    first = SCALARS + op.attrs["n"]
    return {i: first + i for i in range(len(op.ins) - first)}


def column_of(op: Op, index: int) -> tuple[Value, ...]:
    """Return the gradients (0), the masters (1), or a column of states that has a value for each param."""
    n = op.attrs["n"]
    return op.ins[SCALARS + index * n : SCALARS + (index + 1) * n]


def grads_of(op: Op) -> tuple[Value, ...]:
    return column_of(op, 0)


def copies_of(op: Op) -> dict[int, Value]:
    """Return {index of a param: its work copy}."""
    first = len(op.ins) - SCALARS - op.attrs["n"]
    return dict(zip(op.attrs["copied"], op.outs[first:], strict=False))


def amaxes_of(op: Op) -> dict[int, Value]:
    """Return {index of a param: its amax}."""
    measured = op.attrs["measured"]
    return dict(zip(measured, op.outs[len(op.outs) - len(measured) :], strict=True))


def supports_in_place(op: Op) -> Support:
    """Return whether the op writes to its masters and states, as kernels do."""
    if any(op.outs[out] is not op.ins[i] and op.in_place.get(out) != i for out, i in updated_in_place(op).items()):
        return Support(False, "masters and states must be updated in place, but the op writes other values")
    return Support(True)


def update_table(
    op: Op, pointer: Callable[[Value], int], rank: int, chunk_size: int, *more: Mapping[int, Value]
) -> tuple[list[int], int]:
    """Return the words of a table with an entry per param, and the number of chunks of all params.

    Of a param that ranks divide, an entry says where the part of `rank` begins. The addresses of `more` stand at the
    end of an entry, in this order, 0 for params that have no such value.
    """
    copies, amaxes = copies_of(op), amaxes_of(op)
    columns = [column_of(op, i) for i in range(4)]
    words: list[int] = []
    chunks = 0
    for i, (grad, master, m, v) in enumerate(zip(*columns, strict=True)):
        values = (grad, master, m, v, copies.get(i))
        found = [value for value in (*values, *(column.get(i) for column in more)) if value is not None]
        flags = sum(1 << bit for bit, value in enumerate(values) if value is not None and value.dtype == "bf16")
        flags |= _ON_HOST if any(value.place == "host" for value in found) else 0
        (weight_decay,) = struct.unpack("<q", struct.pack("<d", op.attrs["weight_decay"][i]))
        words += [
            *(0 if value is None else pointer(value) for value in (*values, amaxes.get(i))),
            master.size,
            chunks,
            weight_decay,
            flags << 32 | op.attrs["streams"][i] & 0xFFFFFFFF,
            master.first(rank),
            *(pointer(column[i]) if i in column else 0 for column in more),
        ]
        chunks += -(-master.size // chunk_size)
    return words, chunks
