"""Ops that can run in tiles of the rows of a program: each computes its rows by itself, and no op reads for all rows
what one takes or writes for some alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..op import Op, Program
from ..opdef import OpDef, RowWise
from ..value import Value


class RowWiseOps:
    """`OpDef.row_wise` of ops whose values with rows have as many for each token, found once for alike ops."""

    def __init__(self, ops: Mapping[str, OpDef], tokens: int, together: bool) -> None:
        self._ops = ops
        self.tokens = tokens
        self.together = together
        self._known: dict[object, RowWise | None] = {}
        self._whole: set[Value] = set()

    def __call__(self, op: Op) -> RowWise | None:
        if op.signature not in self._known:
            self._known[op.signature] = self._of(op)
        found = self._known[op.signature]
        if found and self._whole and not self._whole.isdisjoint(self.locals(op, found)):
            return None
        return found

    def _of(self, op: Op) -> RowWise | None:
        found = self._ops[op.kind].row_wise(op)
        if found is not None and found.together and not self.together:
            return None
        if found is None or op.lane != "compute" or op.accumulate or not {*op.changes} <= {*found.largest}:
            return None
        ins, outs = ([values[i] for i in at] for values, at in ((op.ins, found.ins), (op.outs, found.outs)))
        sums = [op.outs[i] for i in found.sums]
        is_right = (
            all(map(self._has_rows, (*ins, *outs)))
            and all(v.role in ("act", "input") for v in ins)
            and all(v.role == "act" for v in outs)
            and all(v.role == "grad" and v.dtype != "bf16" for v in sums)
        )
        return found if is_right else None

    def _has_rows(self, value: Value) -> bool:
        count = value.shape[0] if value.shape else 0
        return count > 0 and count % self.tokens == 0 and not value.room and value.place == "device"

    @staticmethod
    def locals(op: Op, found: RowWise) -> list[Value]:
        """Return the values of an op that may be of some rows alone."""
        return [*(op.outs[i] for i in found.local), *(op.ins[i] for i in found.takes)]

    def refuse_whole(self, program: Program) -> None:
        """Find the values that make sense for their rows alone but have a reader that needs all rows. No op that writes
        or takes one of them computes rows by itself. Neither does an op that has rows only by the matrices that it
        takes, if one of these is of all rows.

        An op whose rows depend on which others are in their tile is divided if all are that compute its value again, or
        what it computes would depend on what is recomputed.
        """
        found_of = {op: found for op in program.ops if (found := self(op))}
        local = {op.outs[i] for op, found in found_of.items() for i in found.local}
        taken = (op.ins[i] for op, found in found_of.items() if not found.ins for i in found.takes)
        whole = local.intersection(program.outputs)
        whole |= {v for v in taken if len(v.shape) > 1} - local
        alike = self._alike(program) if self.together else []
        if not (local or whole):
            return
        for op in program.ops:
            takes = {op.ins[i] for i in found_of[op].takes} if op in found_of else set()
            whole |= local.intersection(op.ins) - takes
        before = -1
        while before != len(whole):
            before = len(whole)
            for op, found in found_of.items():
                if not whole.isdisjoint(values := self.locals(op, found)):
                    whole.update(local.intersection(values))
            for group in alike:
                if any(op not in found_of or not whole.isdisjoint(op.outs) for op in group):
                    whole.update(v for op in group for v in local.intersection(op.outs))
        self._whole = whole

    def _alike(self, program: Program) -> Iterable[Sequence[Op]]:
        """Return the ops whose rows depend on which others are in their tile, by the block and the label of what they
        write and the params that they read, which those of a recomputation have in common."""
        groups: dict[object, list[Op]] = {}
        for op in program.ops:
            found = self._ops[op.kind].row_wise(op)
            if found and found.together:
                key = op.block, op.outs[0].label, *(v for v in op.ins if v.role == "param")
                groups.setdefault(key, []).append(op)
        return groups.values()
