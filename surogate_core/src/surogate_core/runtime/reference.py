"""The reference executor: runs a planned op list on the CPU with torch functions, in the planned buffers.

It promises the same bits for the same library versions and thread count, and shows planning errors: every result is
written to the offset that the plan gives it, and with `poison` a value is destroyed the moment its planned life ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..api import OpDef
from ..errors import ProgramError
from ..program.op import Op, Program
from ..program.value import Value
from ..reference.ops import load
from .arena import Buffers


@dataclass(frozen=True)
class _Call:
    """A bound op: `function(*ins, **attrs)`, then each result stored or added."""

    op: Op
    function: Callable[..., object]
    ins: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    dies: tuple[Value, ...]


class ReferenceExecutor:
    """Binds programs to buffers once and runs them by name."""

    def __init__(
        self,
        programs: Mapping[str, Program],
        ops: Mapping[str, OpDef],
        buffers: Buffers,
        *,
        poison: bool = False,
        instead: Mapping[str, Callable[..., object]] | None = None,
    ) -> None:
        """`instead`: functions in place of the references of these kinds, such as sums over several workers."""
        self.buffers = buffers
        self._calls = {name: _bind(program, ops, buffers, poison, instead or {}) for name, program in programs.items()}

    def run(self, program: str, labels: int | None = None) -> None:
        """Run every op of `program` in order. `labels` changes nothing: references look at the targets.

        Raises ProgramError naming op, block and source line when a result does not have the shape or dtype that the
        program says.
        """
        self.walk(program, lambda index: None, labels)

    @torch.no_grad()
    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        """`run`, and call `after` with the op's index behind every op, before any value dies."""
        for index, call in enumerate(self._calls[program]):
            run_reference(call.op, call.function, call.ins, call.outs)
            after(index)
            for value in call.dies:
                self.buffers.kill(value, program)


def run_reference(op: Op, function: Callable[..., object], ins: tuple[Tensor, ...], outs: tuple[Tensor, ...]) -> None:
    """Call an op's reference and store or add each result. Raises ProgramError naming op, block and line."""
    try:
        results = function(*ins, **op.attrs)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        raise ProgramError(f"{place(op)} failed: {type(error).__name__}: {error}") from error
    results = results if isinstance(results, tuple) else (results,)
    if len(results) != len(outs):
        raise ProgramError(f"{place(op)} returned {len(results)} results for {len(outs)} outputs")
    for i, (out, result) in enumerate(zip(outs, results, strict=True)):
        _check(op, i, result, out)
        if i in op.accumulate:
            out.add_(result)
        else:
            out.copy_(result)


def _check(op: Op, index: int, result: Tensor, out: Tensor) -> None:
    """A gradient may be stored in another dtype; everything else must be what the program says."""
    if result.shape != out.shape:
        got, want = list(result.shape), list(out.shape)
        raise ProgramError(f"{place(op)} returned shape {got} for output {index}, the program says {want}")
    if result.dtype != out.dtype and op.outs[index].role != "grad":
        raise ProgramError(f"{place(op)} returned {result.dtype} for output {index}, the program says {out.dtype}")


def place(op: Op) -> str:
    """How messages name an op."""
    return f"{op.kind} (block {op.block}, {op.phase}, emitted at {op.where})"


def _bind(
    program: Program,
    ops: Mapping[str, OpDef],
    buffers: Buffers,
    poison: bool,
    instead: Mapping[str, Callable[..., object]],
) -> list[_Call]:
    last: dict[Value, int] = {}
    for index, op in enumerate(program.ops):
        for value in (*op.ins, *op.outs):
            if value.role == "act" and value not in program.outputs:
                last[value] = index
    ends: dict[int, list[Value]] = {}
    for value, index in last.items() if poison else ():
        ends.setdefault(index, []).append(value)
    return [
        _Call(
            op,
            instead.get(op.kind) or load(ops[op.kind].reference),
            tuple(buffers.view(v, program.name) for v in op.ins),
            tuple(buffers.view(v, program.name) for v in op.outs),
            tuple(ends.get(index, ())),
        )
        for index, op in enumerate(program.ops)
    ]
