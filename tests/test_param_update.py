"""An op that updates many params: its specs, what is in place, and the table of its kernel."""

from __future__ import annotations

import struct
from dataclasses import replace

from surogate_core.api import Op, Value
from surogate_core.api.param_update import (
    amaxes_of,
    column_of,
    copies_of,
    grads_of,
    infer_update,
    supports_in_place,
    update_table,
    updated_in_place,
)
from surogate_core.program.value import Shard

SIZES = (300, 8)


def vector(name: str, size: int, dtype: str = "fp32") -> Value:
    return Value(name, (size,), dtype, "state")


GRADS, MASTERS, MS, VS = ([vector(f"{name}{i}", size) for i, size in enumerate(SIZES)] for name in ("g", "p", "m", "v"))
SCALE = vector("scale", 2)
COPY = vector("copy", SIZES[1], "bf16")
AMAX = Value("amax", (), "fp32", "act")
SCALARS = [Value(name, (), "fp32", "input") for name in ("clip_coef", "lr", "step", "seed")]
KEPT = [*MASTERS, *MS, *VS, SCALE]
OP = Op(
    "acme_update",
    (*SCALARS, *GRADS, *KEPT),
    (*KEPT, COPY, AMAX),
    {
        "n": 2,
        "copied": (1,),
        "copy_dtypes": ("bf16",),
        "measured": (0,),
        "weight_decay": (0.5, 0.0),
        "streams": (7, 0xFFFFFFFF),
    },
)


def test_the_values_of_an_op_are_found_by_their_meaning() -> None:
    assert grads_of(OP) == tuple(GRADS)
    assert [column_of(OP, i) for i in range(4)] == [tuple(GRADS), tuple(MASTERS), tuple(MS), tuple(VS)]
    assert copies_of(OP) == {1: COPY} and amaxes_of(OP) == {0: AMAX}


def test_outputs_have_the_specs_of_what_they_update() -> None:
    specs = infer_update(OP.ins, OP.attrs)
    assert [(s.shape, s.dtype) for s in specs] == [(v.shape, v.dtype) for v in OP.outs]


def test_masters_and_states_are_updated_in_place() -> None:
    assert updated_in_place(OP) == {i: 6 + i for i in range(len(KEPT))}
    assert supports_in_place(OP).ok
    other = replace(OP, outs=(vector("other", SIZES[0]), *OP.outs[1:]))
    assert not supports_in_place(other).ok


def test_the_table_has_an_entry_for_each_param() -> None:
    address = {value: 100 + i for i, value in enumerate((*OP.ins, *OP.outs))}
    words, chunks = update_table(OP, address.__getitem__, 3, 256, {0: SCALE})
    assert chunks == 3
    (half,) = struct.unpack("<q", struct.pack("<d", 0.5))
    first = [*(address[v] for v in (GRADS[0], MASTERS[0], MS[0], VS[0])), 0, address[AMAX], 300, 0, half, 7, 0]
    second = [*(address[v] for v in (GRADS[1], MASTERS[1], MS[1], VS[1], COPY)), 0, 8, 2, 0, 16 << 32 | 0xFFFFFFFF, 0]
    assert words == [*first, address[SCALE], *second, 0]


def test_the_table_says_where_the_part_of_a_rank_begins() -> None:
    """A kernel draws the random bits of these elements. The second param is whole."""
    part = {v: replace(v, shard=Shard((2, 500), 4)) for v in (GRADS[0], MASTERS[0], MS[0], VS[0])}
    op = OP.on(part)
    for rank in range(4):
        words, chunks = update_table(op, lambda value: 0, rank, 256, {0: SCALE})
        assert (words[6], words[10]) == (300, 300 * rank) and (words[18], words[22]) == (8, 0) and chunks == 3


def test_the_table_says_which_params_have_values_on_the_host() -> None:
    """A kernel accesses these by whole sectors."""
    hosted = {VS[1]: replace(VS[1], place="host"), SCALE: replace(SCALE, place="host")}
    for one in hosted:
        ins = tuple(hosted[v] if v is one else v for v in OP.ins)
        op = replace(OP, ins=ins)
        words, _ = update_table(op, lambda value: 0, 0, 256, {0: ins[-1]})
        flags = [words[9] >> 32, words[21] >> 32]
        assert flags == ([0, 16 | 32] if one is VS[1] else [32, 16])
