"""The worker: one device's buffers and executor, and the operations that the training loop performs on them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..api import Comm, OpDef
from ..assembly.assembly import ADAPTER_START, Assembly
from ..assembly.staging import Staged
from ..batch import MicroBatch
from ..errors import ConfigError
from ..machine.timing import mark
from ..program.op import Program, Purpose
from ..program.value import Value
from .arena import Buffers, copy_part, wholes_in
from .bind import ExecutionContext
from .comms.single import ALONE
from .cuda import CudaExecutor
from .host_copy import HostCopy
from .initialize import initialize
from .inputs import Inputs, one_document_per_row, write_documents
from .out_of_memory import explaining_out_of_memory
from .pieces import Pieces, pieces_of
from .readings import Reading, TableReading, table_readings, to_number
from .reference import ReferenceExecutor

Executor = CudaExecutor | ReferenceExecutor

Watcher = Callable[[Program, int], None]
"""Called as `watcher(program, index)` after the op at `index` of `program`."""

Execute = Callable[[str, int | None], None]
"""Called as `execute(program's name, labels of the micro-batch)`."""


class Worker:
    """Runs the programs of an assembly in planned buffers on one device: references on a CPU, kernels on a GPU.

    Life: construct, fill `params()`, staged params and the states, `start()`, then steps and evaluations, then
    `close()`. The workers of a `Team` have the same assembly and call `share()` and `connect()` before `start()`. All
    calls must be made on one thread.
    """

    width = 1
    """Number of micro-batches that `micro_step` takes."""

    world_size = 1
    """Number of ranks, for which the loop counts micro-batches. A `Team` has more."""

    def __init__(
        self, assembly: Assembly, buffers: Buffers, executor: Executor, inputs: Inputs, seed: int, comm: Comm
    ) -> None:
        """Use `on_cpu` or `on_gpu` instead."""
        self._comm = comm
        self.assembly = assembly
        self.buffers = buffers
        self.executor = executor
        self._inputs = inputs
        self._inputs.write("seed", seed)
        read = (assembly.loss, assembly.grad_norm, *(figure.step for figure in assembly.reported[1:]))
        self._read = executor.readings(list(map(buffers.persistent, read)))
        table = None if assembly.numerics is None else buffers.persistent(assembly.numerics.values)
        self._read_table = None if table is None else table_readings(table, executor.stream)
        self._copy: HostCopy | None = None
        self._execute: Execute = executor.run
        self._watcher: Watcher | None = None
        self._explaining: Callable[[], AbstractContextManager[None]] = nullcontext
        self._restored = False
        self._calibrating = assembly.calibrates
        self._reports = False
        self._micro_steps = 0
        self._gathers_late = False

    @classmethod
    def on_cpu(
        cls,
        assembly: Assembly,
        ops: Mapping[str, OpDef],
        seed: int,
        comm: Comm = ALONE,
        *,
        poison: bool = False,
    ) -> Worker:
        """Return a worker that runs the torch references. `poison` overwrites values when their planned life ends."""
        buffers = Buffers(assembly.memory, poison=poison, rank=comm.rank)
        executor = ReferenceExecutor(assembly.all_programs, ops, buffers, comm, poison=poison)
        return cls(assembly, buffers, executor, Inputs(assembly.declared, assembly.memory, buffers), seed, comm)

    @classmethod
    def on_gpu(cls, assembly: Assembly, context: ExecutionContext, seed: int, *, poison: bool = False) -> Worker:
        """Return a worker that runs compiled kernels on the GPU of `context.comm`.

        Raises ConfigError if an op has no kernel, or none that is as deterministic as the target requires. Raises
        RunStopped if the GPU is out of memory.
        """
        comm, device = context.comm, context.comm.device
        torch.cuda.set_device(device)
        stream = torch.cuda.Stream(device)
        runtime_bytes = context.target.device.runtime_bytes
        explaining = partial(explaining_out_of_memory, assembly.memory, comm, runtime_bytes)
        with explaining():
            allocate = comm.allocate if assembly.gathers else None
            buffers = Buffers(assembly.memory, f"cuda:{device}", poison=poison, rank=comm.rank, allocate=allocate)
            stream.wait_stream(torch.cuda.current_stream())
            mark("CUDA context, buffers")
            inputs = Inputs(assembly.declared, assembly.memory, buffers, stream)
            write_documents(inputs, assembly, one_document_per_row(assembly))
            inputs.commit()
            executor = CudaExecutor(assembly.all_programs, buffers, context, stream)
            mark("kernels bound")
            executor.warm_up()
            mark("kernels run once")
            worker = cls(assembly, buffers, executor, inputs, seed, comm)
        worker._explaining = explaining
        return worker

    def params(self) -> dict[str, Tensor]:
        """Return views of the weights that this rank holds as a whole, by name."""
        return {name: self.buffers.persistent(v) for name, v in self.assembly.params.items() if not v.shard}

    def pieces(self, value: Value) -> Pieces:
        """Return the elements of a param or state that this process has."""
        rank = self._comm.rank
        return pieces_of(value, lambda _: self.buffers.persistent(value), range(rank, rank + 1))

    # --------------------------------------------------------------------------------------------------------- start

    def stored(self) -> dict[str, tuple[Tensor, ...]]:
        """Return views of the states that hold frozen params in a weight format, by the params' names.

        Those of params whose states ranks divide are in `staged_states`.
        """
        view, every = self.buffers.persistent, self.assembly.stored.items()
        return {name: tuple(map(view, states)) for name, states in every if not any(state.shard for state in states)}

    def staged(self, part: Staged) -> dict[str, Tensor]:
        """Return views of the staged params of one block, by name. Fill them, then call `derive`."""
        return {param.name: self.buffers.view(place, part.program.name) for param, place in part.places.items()}

    def derive(self, part: Staged) -> None:
        """Make the derived states of the params in `staged(part)`, whose memory the next call of `staged` reuses.

        If ranks divide them (`Staged.divides`), all ranks call this at the same time, and use what rank 0 has there.
        """
        self.executor.synchronize()
        if part.divides:
            self._receive(self.staged(part).values())
        self.executor.run(part.program.name)
        self.executor.wait()

    def staged_states(self, part: Staged) -> dict[str, tuple[Tensor, ...]]:
        """Return views of the states that hold staged params of one block, by name, if ranks divide them.

        Whole states that are divided are in the place of the staged param. Fill them, then call `divide`.
        """
        found = {}
        for param, place in part.places.items():
            states = self.assembly.stored.get(param.name, ())
            if any(state.shard for state in states):
                memory = self.buffers.view(place, part.program.name).view(-1).view(torch.uint8)
                found[param.name] = tuple(wholes_in(memory, states, self.buffers.persistent))
        return found

    def divide(self, part: Staged, stored: Collection[str]) -> None:
        """Keep this rank's parts of the whole states of the params `stored` that rank 0 has in `staged_states(part)`.

        All ranks call this at the same time.
        """
        self.executor.synchronize()
        self._receive(view for name, view in self.staged(part).items() if name in stored)
        with torch.cuda.stream(self.executor.stream):
            for name, wholes in self.staged_states(part).items():
                for state, whole in zip(self.assembly.stored[name], wholes, strict=True):
                    if name in stored and state.shard is not None:
                        copy_part(self.buffers.persistent(state), whole, self._comm.rank)
        self.executor.wait()

    def _receive(self, views: Iterable[Tensor]) -> None:
        """Replace the contents of `views` by those of rank 0. All ranks call this at the same time."""
        stream = self.executor.stream
        with torch.cuda.stream(stream), self._comm.position.collective("the weights of rank 0", 0):
            for view in views:
                span = view.data_ptr(), view.nbytes, "uint8"
                self._comm.broadcast([(span, span)], [0], stream.cuda_stream if stream else 0)

    def share(self) -> None:
        """Replace weights and states by those of rank 0. Call once on every worker, at the same time."""
        stream = self.executor.stream
        with torch.cuda.stream(stream):
            for role in ("param", "state"):
                with self._comm.position.collective("the weights of rank 0", 0):
                    self.buffers.share(self._comm, role, stream.cuda_stream if stream else 0)
        self.executor.synchronize()

    def restored(self, *, lr: float, step: int, skipped: int = 0) -> None:
        """Tell the worker that the states come from a checkpoint: `start` makes no masters.

        Micro-steps read `lr` and `step`, those of its last update. They calibrate if all of its steps were `skipped`.
        """
        self._restored = True
        self._calibrating = self.assembly.calibrates and skipped >= step
        self._inputs.write("lr", lr)
        self._inputs.write("step", step)
        self._inputs.commit()

    def connect(self) -> None:
        """Set up the connections to the other workers. Call once on every worker, at the same time."""
        self.executor.connect()

    def start(self, *, graphs: bool = True) -> None:
        """Make masters, unless `restored` was called, and derived states. Call once, when the weights are in place.

        With `graphs`, captures the programs on a GPU.
        """
        if self.starts_adapter:
            self.start_adapter()
        self.prepare()
        self.begin(graphs=graphs)

    @property
    def starts_adapter(self) -> bool:
        return ADAPTER_START in self.assembly.programs and not self._restored

    def start_adapter(self) -> None:
        """Compute the adapter's params from the loaded weights, as training reads them."""
        self.executor.synchronize()
        self._run(self.assembly.only("derive"))
        self._run(self.assembly.programs[ADAPTER_START])

    def prepare(self) -> None:
        """Do the first part of `start`, which waits for the whole device. No stream of it may be captured meanwhile.

        Raises ConfigError for weights that the run cannot be right with (`Programs.refusals`).
        """
        self.executor.synchronize()
        if not self._restored:
            parts = (v for v in self.assembly.declared if v.shard and v.init)  # `share` gives those of no other rank
            own = (None, self._comm.rank)
            initialize((v for v in parts if v.owner in own), self.buffers.persistent, seed=0)
            self._run(self.assembly.only("start"))
        self._run(self.assembly.only("derive"))
        if self.assembly.refusals:
            self.executor.synchronize()
        for found in self.assembly.refusals:
            if count := int(self.buffers.persistent(found.count)):
                raise ConfigError(f"{count} {found.message}")

    def begin(self, *, graphs: bool = True) -> None:
        """Do the second part of `start`."""
        if graphs and self._watcher is None:
            with self._explaining():
                self.executor.capture()
        # The times of steps are counted from this reading. Without it, the first step would be reported too long if it
        # is done before it is read, and the first step that is waited for too short.
        self._read().values()

    # --------------------------------------------------------------------------------------------------------- a step

    def micro_step(
        self,
        *batches: MicroBatch,
        first: bool,
        last: bool = False,
        loss_scale: float,
        index: int,
        reporting: bool = False,
        group_scale: float = 1.0,
    ) -> None:
        """Run forward and backward of one micro-batch.

        The `first` micro-step of an optimizer step writes the gradients and the loss, the others add to them. The
        `last` one then sums them over all workers. `index` counts micro-steps over the whole run. A `first` one that
        is `reporting` also writes the numerics report, unless the step calibrates.
        """
        (batch,) = batches
        self._micro_steps = 1 if first else self._micro_steps + 1
        stream = self.executor.stream
        self._comm.position.micro_step(self._micro_steps, stream.cuda_stream if stream else 0)
        purpose: Purpose = "calibrate" if self._calibrating else "report" if reporting else "train"
        self._reports |= purpose == "report"
        self._write_batch(batch, loss_scale, group_scale)
        self._inputs.write("micro_step", index)
        if self.assembly.scalars.first_micro_step is not None:
            self._inputs.write("first_micro_step", index - self._comm.rank)
        self._inputs.commit()
        program = self.assembly.micro_step(first=first, last=last, purpose=purpose)
        self._run(self.assembly.for_documents(program, batch.n_documents), batch.n_valid)

    def update(self, *, lr: float, step: int) -> Reading:
        """Clip and apply the accumulated gradient. `step` counts from 1. A non-finite norm changes nothing.

        The loss of the reading is the sum over all labels of loss_scale x loss, which is their mean. Figures follow.
        """
        self._inputs.write("lr", lr)
        for factor, rate in self.assembly.scalars.rates.items():
            self._inputs.write(rate.name, lr * factor)
        self._inputs.write("step", step)
        self._inputs.commit()
        self._run(self.assembly.only("update"))
        self._gathers_late = "gather" in self.assembly.programs  # or the next first micro-step gathers
        reading = self._read()
        if self._calibrating:  # the only steps that the host waits for
            self._calibrating = not all(isfinite(value) for value in reading.values()[:2])
        if self._watcher is not None:  # the watcher may end the run; then every step must have been reported
            self.settle()
        return reading

    def read_numerics(self) -> TableReading | None:
        """Return a reading of the numerics report of this step; None if no micro-step has written one."""
        reports, self._reports = self._reports, False
        return self._read_table() if reports and self._read_table is not None else None

    def evaluate(self, *batches: MicroBatch) -> tuple[Any, ...]:
        """Return the sums of the loss and other figures over one batch. Changes neither weights nor gradients."""
        (batch,) = batches
        self.gather()
        self._write_batch(batch, 1.0, 1.0)
        self._inputs.commit()
        self._run(self.assembly.for_documents(self.assembly.only("evaluate"), batch.n_documents), batch.n_valid)
        self.executor.wait()
        figures = (self.buffers.persistent(figure.evaluation) for figure in self.assembly.reported)
        return tuple(to_number(figure) if batch.n_valid else 0.0 for figure in figures)

    def cached(self) -> list[Tensor]:
        """Return what the last evaluation wrote to `Assembly.cached`; of a team, that of each rank."""
        return [self.buffers.persistent(value).cpu() for value in self.assembly.cached]

    def gather(self) -> None:
        """Bring all weights up to date, of which updates leave the parts of other ranks to the next micro-step.

        Call it on every worker at the same time, before weights are read or saved.
        """
        if self._gathers_late:
            self._run(self.assembly.programs["gather"])
            self._gathers_late = False

    def settle(self) -> None:
        """Wait until everything that was enqueued is done. Call it before reading the weights."""
        self.executor.wait()

    def _write_batch(self, batch: MicroBatch, loss_scale: float, group_scale: float) -> None:
        written = {name: getattr(batch, name) for name in ("tokens", "targets", "positions")}
        written |= {**batch.asked, "loss_scale": loss_scale}
        written |= {} if self.assembly.batch.group_scale is None else {"group_scale": group_scale}
        for name, value in written.items():
            self._inputs.write(name, value)
        write_documents(self._inputs, self.assembly, batch.cu_seqlens)

    def _run(self, program: Program, labels: int | None = None) -> None:
        """Enqueue `program` for a batch with `labels` labels; None: with as many as possible."""
        if self._copy is not None:
            self._copy.before(program.name)
        watcher = self._watcher
        if watcher is None:
            self._execute(program.name, labels)
        else:
            self.executor.walk(program.name, lambda index: watcher(program, index), labels)

    # ------------------------------------------------------------------------------------------------ between steps

    def watch(self, make: Callable[[Buffers], Watcher]) -> None:
        """From now on run programs op by op, never as graphs. Call the watcher that `make` returns after every op."""
        self._watcher = make(self.buffers)

    def execute_by(self, execute: Execute) -> None:
        """From now on run programs by `execute` in place of the executor's `run`."""
        self._execute = execute

    def allocate_snapshot(self, values: Iterable[Value]) -> HostCopy:
        """Allocate the host memory into which `snapshot` copies these params and states. Call once, before `start`.

        Raises NoHostMemory if the system refuses it.
        """
        self._copy = HostCopy(self.buffers, values, self.assembly.all_programs, self.executor.stream)
        return self._copy

    def free_snapshot(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    def snapshot(self) -> None:
        """Start to copy the values given to `allocate_snapshot`, as they are after everything enqueued so far."""
        if self._copy is not None:
            self._copy.take()

    def close(self) -> None:
        """Free what communicators wait for, and unpin host memory. Nothing can run afterwards."""
        self.free_snapshot()
        self.executor.release()
        self.buffers.close()
