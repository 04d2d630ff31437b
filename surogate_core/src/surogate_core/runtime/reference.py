"""The reference executor: runs programs on the CPU with torch functions, in the planned buffers.

Results are bit-identical for the same library versions and thread count. Every result is written at its planned offset,
so errors of the plan show as wrong results. With `poison`, a value is overwritten as soon as its planned life ends.

A reference must not write to its inputs. torch counts in-place operations on every tensor. Comparing these counters
takes less than a microsecond per op, so every run does it. Writes that bypass torch (numpy, `.data`) are not counted;
`testing.check_op` compares the inputs' bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..api import Comm, OpDef
from ..errors import ProgramError, SurogateError
from ..origin import Origin, blaming
from ..program.op import Op, Program
from ..program.value import Value
from ..reference.ops import load
from . import collectives
from .arena import Buffers
from .comms.single import ALONE
from .readings import ReadyReading, to_number


class ReferenceExecutor:
    """Binds programs to buffers once and runs them by name, as a `CudaExecutor` does on a GPU."""

    stream = None
    captured: tuple[str, ...] = ()

    def __init__(
        self,
        programs: Mapping[str, Program],
        ops: Mapping[str, OpDef],
        buffers: Buffers,
        comm: Comm = ALONE,
        *,
        poison: bool = False,
    ) -> None:
        self._buffers = buffers
        self._calls = {name: _bind(program, ops, buffers, comm, poison) for name, program in programs.items()}

    def run(self, program: str, labels: int | None = None) -> None:
        """Run every op of `program` in order. `labels` is not used: references find the labelled rows by the targets.

        Raises what `ReferenceCall.run` raises.
        """
        self.walk(program, lambda index: None, labels)

    @torch.no_grad()
    def walk(self, program: str, after: Callable[[int], None], labels: int | None = None) -> None:
        """See `CudaExecutor.walk`. `after` is called before the values whose life ends with the op are poisoned."""
        for index, (run, dies) in enumerate(self._calls[program]):
            if run is not None:
                run()
                after(index)
            for value in dies:
                self._buffers.kill(value, program)

    def readings(self, values: Sequence[Tensor]) -> Callable[[], ReadyReading]:
        return lambda: ReadyReading(tuple(map(to_number, values)))

    def _nothing(self) -> None:
        """Programs are done when `run` returns. There is nothing to connect, capture, wait for or release."""

    connect = capture = wait = synchronize = release = _nothing


@dataclass(frozen=True)
class ReferenceCall:
    """An op bound to buffers: `function(*ins, **attrs)`, each result of which is stored or added.

    ins     aliases of the buffers with separate version counters
    outs    buffers of the outputs, then of the inputs that the op changes
    origin  the plugin that provides the reference; None for core
    """

    op: Op
    function: Callable[..., object]
    ins: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    origin: Origin | None = None

    def run(self) -> None:
        """Call the reference and store its results.

        Raises PluginError for a plugin's reference and ProgramError for core's if the reference fails, writes to an
        input, or returns a shape or dtype that the program does not have. The message names op, block and line.
        """
        before = [x._version for x in self.ins]
        try:
            results = self.function(*self.ins, **self.op.attrs)
        except SurogateError:
            raise
        except Exception as error:
            if self.origin is not None:
                raise self.origin.failed(f"its reference, {place(self.op)}", error) from error
            by = f" by {self.op.emitter}" if self.op.emitter else ""
            raise ProgramError(f"{place(self.op, by)} failed: {type(error).__name__}: {error}") from error
        with blaming(self.origin, "its reference"):
            for i, (x, version) in enumerate(zip(self.ins, before, strict=True)):
                if x._version != version:
                    what = f"wrote to its input {i}, {self.op.ins[i]!r}; a reference returns new tensors"
                    raise ProgramError(f"{place(self.op)} {what}")
            self._store(results if isinstance(results, tuple) else (results,))

    def _store(self, results: tuple[object, ...]) -> None:
        if len(results) != len(self.outs):
            changed = f" and {len(self.op.changes)} changed inputs" if self.op.changes else ""
            raise ProgramError(
                f"{place(self.op)} returned {len(results)} results for {len(self.op.outs)} outputs{changed}"
            )
        for i, (out, result) in enumerate(zip(self.outs, results, strict=True)):
            if not isinstance(result, Tensor):
                found = "None" if result is None else f"a {type(result).__name__}"
                raise ProgramError(f"{place(self.op)} returned {found} for output {i}, expected a tensor")
            _check_result(self.op, i, result, out)
            if i in self.op.accumulate:
                out.add_(result)
            else:
                out.copy_(result)


def _check_result(op: Op, index: int, result: Tensor, out: Tensor) -> None:
    """Check that shape and dtype are those of the program. A gradient may be stored in a different dtype."""
    if result.shape != out.shape:
        got, want = list(result.shape), list(out.shape)
        raise ProgramError(f"{place(op)} returned shape {got} for output {index}, the program says {want}")
    if result.dtype != out.dtype and op.written[index].role != "grad":
        raise ProgramError(f"{place(op)} returned {result.dtype} for output {index}, the program says {out.dtype}")


def reference_call(op: Op, ops: Mapping[str, OpDef], buffers: Buffers, program: str) -> ReferenceCall:
    """Bind an op of `program` to its reference.

    Raises PluginError if a plugin's reference cannot be loaded.
    """
    definition = ops[op.attrs["of"]] if op.kind == "reference_vjp" else ops[op.kind]
    origin = definition.origin
    try:
        load(definition.reference)
        function = load(ops[op.kind].reference)
    except Exception as error:
        if origin is None:
            raise
        raise origin.failed(f"its reference {definition.reference}", error) from error
    if ops[op.kind].positioned and any(v.shard for v in op.outs):
        function = partial(function, firsts=tuple(v.first(buffers.rank) for v in op.outs))
    ins = tuple(buffers.view(v, program).data for v in op.ins)
    outs = tuple(buffers.view(v, program) for v in op.written)
    return ReferenceCall(op, function, ins, outs, origin)


def place(op: Op, by: str = "") -> str:
    """Return how messages name an op. `by` follows where it was emitted."""
    return f"{op.kind} (block {op.block}, {op.phase}, emitted at {op.where}{by})"


def _bind(
    program: Program, ops: Mapping[str, OpDef], buffers: Buffers, comm: Comm, poison: bool
) -> list[tuple[Callable[[], object] | None, Sequence[Value]]]:
    """Return what runs each op, None if another rank owns it, and the values to poison, whose life ends with it."""
    last: dict[Value, int] = {}
    for index, op in enumerate(program.ops):
        for value in (v.root for v in (*op.ins, *op.outs)):
            if value.role == "act" and value not in program.outputs:
                last[value] = index
    for op in program.ops:
        for i in op.in_place.values():  # whose place lives on in an output
            del last[op.ins[i]]
    ends: dict[int, list[Value]] = {}
    for value, index in last.items() if poison else ():
        ends.setdefault(index, []).append(value)

    def run_of(op: Op) -> Callable[[], object] | None:
        if op.kind in collectives.KINDS:
            function, arguments = collectives.call(op, comm, lambda v: buffers.view(v, program.name).data_ptr(), 0)
            return partial(function, *arguments)
        return reference_call(op, ops, buffers, program.name).run if op.owner in (None, comm.rank) else None

    return [(run_of(op), ends.get(index, ())) for index, op in enumerate(program.ops)]
