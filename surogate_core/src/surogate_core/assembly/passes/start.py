"""Masters are made of params, once, in a fresh run."""

from __future__ import annotations

from ...dtypes import DTYPES
from ...origin import blaming
from ...program.verify import check_states
from ..draft import Draft
from ..parts import gather_updated


def record_start(draft: Draft) -> Draft:
    """Record the program `start`: the masters, and the copies of a frozen reference, from the params.

    A param that is wider than its master becomes what the master holds, as after every update. Raises ProgramError if
    the update reads a state that nothing has set.
    """
    b = draft.builder
    with b.record("start"):
        for p in draft.params.values():
            if p.master is not None and p.master.role == "state":
                param = p.part or p.param
                b.emit("cast", param, outs=[p.master], dtype=p.master.dtype)
                if DTYPES[p.master.dtype].bits < DTYPES[p.param.dtype].bits:
                    b.emit("cast", p.master, outs=[param], dtype=p.param.dtype)
                    gather_updated([p], draft.inputs.sharding, b)
        if not draft.inputs.other_reference:
            for param, copy in draft.copies.items():
                b.emit("cast", param, outs=[copy], dtype=copy.dtype)
        start = draft.verified(None, b.program("start", stage="start"))
    with blaming(draft.inputs.optimizer.origin, "update"):
        check_states([start, draft.programs["update"]])
    return draft.having(start)
