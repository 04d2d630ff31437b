"""One device's share of a run: its buffers and its executor, and the few things that the loop does with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import cycle
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..api import Comm, OpDef, Target
from ..data.loader import MicroBatch
from ..machine.timing import mark
from ..planning.assemble import Assembly
from ..program.op import Program
from ..program.value import Value
from .arena import Buffers
from .bind import KernelFor, UseAutotuneCache, keep_nothing
from .cuda import CudaExecutor
from .host_copy import HostCopy
from .inputs import Inputs
from .launch import SingleComm
from .reference import ReferenceExecutor

READINGS = 4
"""Steps whose loss and norm have a place on the host: made before the first step, since later nothing is allocated."""


class Reading(Protocol):
    """Loss and gradient norm of a step that may still be running. Good until three more steps have begun."""

    @property
    def ready(self) -> bool:
        """Whether `values` would return at once."""
        ...

    def values(self) -> tuple[float, float]:
        """(mean loss in nats, 2-norm of the gradient before clipping). Waits until the step is done."""
        ...

    @property
    def finished_at(self) -> float:
        """When the device finished the step, in seconds of `time.perf_counter`. Call `values` before.

        It is not when `values` returned: the loop reads a step while the next one is queued, often much later.
        """
        ...


class Worker:
    """Runs the programs of an assembly in the planned buffers: on the CPU by references, on a GPU by kernels.

    Life: construct, fill `params()` and the states, `start()`, then steps and evaluations, then `close()`. With other
    workers (`Team`), whose assembly is the same: `connect()` before `start()`. All of it on one thread.
    """

    width = 1
    """Micro-batches that it takes at once."""

    def __init__(
        self,
        assembly: Assembly,
        buffers: Buffers,
        executor: ReferenceExecutor | CudaExecutor,
        inputs: Inputs,
        seed: int,
    ) -> None:
        self.assembly = assembly
        self.buffers = buffers
        self.executor = executor
        self._execute: Callable[[str, int | None], None] = executor.run
        self._watched = False
        self._copy: HostCopy | None = None
        self._restored = False
        self._inputs = inputs
        self._inputs.write("seed", seed)
        self._outcome = [buffers.persistent(v) for v in (assembly.loss, assembly.grad_norm)]
        if isinstance(executor, CudaExecutor):
            readings = [PendingReading(self._outcome, executor.stream) for _ in range(READINGS)]
            for before, after in zip([readings[-1], *readings], readings, strict=False):
                after.previous = before
            self._readings = cycle(readings)

    @classmethod
    def on_cpu(
        cls,
        assembly: Assembly,
        ops: Mapping[str, OpDef],
        seed: int,
        *,
        poison: bool = False,
        instead: Mapping[str, Callable[..., object]] | None = None,
    ) -> Worker:
        """A worker that runs the torch references, but for these kinds the functions `instead`.

        `poison`: values are destroyed when their planned life ends.
        """
        buffers = Buffers(assembly.memory, poison=poison)
        executor = ReferenceExecutor(assembly.all_programs, ops, buffers, poison=poison, instead=instead)
        return cls(assembly, buffers, executor, _inputs(assembly, buffers, None), seed)

    @classmethod
    def on_gpu(
        cls,
        assembly: Assembly,
        ops: Mapping[str, OpDef],
        seed: int,
        *,
        kernel_for: KernelFor,
        target: Target,
        notice: Callable[[str], None],
        autotune_cache: UseAutotuneCache = keep_nothing,
        comm: Comm | None = None,
        allow_reference: bool = False,
        poison: bool = False,
    ) -> Worker:
        """A worker that runs compiled kernels on the GPU of `comm`.

        `notice` is told what they have to say, each line once; `autotune_cache` is what a `BindContext` offers.

        Raises ConfigError when an op has none, or none that does what `target` asks for.
        """
        comm = comm or SingleComm()
        index = comm.device
        torch.cuda.set_device(index)
        stream = torch.cuda.Stream(index)
        buffers = Buffers(assembly.memory, f"cuda:{index}", poison=poison)
        stream.wait_stream(torch.cuda.current_stream())
        mark("CUDA context, buffers")
        inputs = _inputs(assembly, buffers, stream)
        _write_documents(inputs, assembly, _a_document_a_row(assembly))
        inputs.commit()
        executor = CudaExecutor(
            *(assembly.all_programs, ops, kernel_for, buffers, target, stream, notice, autotune_cache),
            comm=comm,
            allow_reference=allow_reference,
        )
        mark("kernels bound")
        executor.warm_up()
        mark("kernels run once")
        return cls(assembly, buffers, executor, inputs, seed)

    def params(self) -> dict[str, Tensor]:
        """Views of the model's weights, by name."""
        return {name: self.buffers.persistent(v) for name, v in self.assembly.params.items()}

    def watch(self, make: Callable[[Buffers], Callable[[Program, int], None]]) -> None:
        """From now on run op by op, never as graphs, and call the watcher that `make` returns behind every op.

        It is called as `watcher(program, op's index)`.
        """
        watcher = make(self.buffers)

        programs = self.assembly.all_programs

        def walk(name: str, labels: int | None) -> None:
            self.executor.walk(name, lambda index: watcher(programs[name], index), labels)

        self._execute, self._watched = walk, True

    def execute_by(self, execute: Callable[[str, int | None], None]) -> None:
        """Run programs by `execute(program's name, labels of the micro-batch)`, in place of the executor's `run`."""
        self._execute = execute

    def copy_from(self, other: Worker) -> None:
        """Take over the weights and states of another worker of the same assembly, on whatever device."""
        for role in ("param", "state"):
            self.buffers.segment(role).copy_(other.buffers.segment(role))
        if isinstance(self.executor, CudaExecutor):
            torch.cuda.synchronize()

    def restored(self, *, lr: float, step: int) -> None:
        """The states hold what a checkpoint had: `start` makes none of them from the params.

        `lr` and `step` are those of the last update before it, which micro-steps read until the next one.
        """
        self._restored = True
        self._inputs.write("lr", lr)
        self._inputs.write("step", step)
        self._inputs.commit()

    def connect(self) -> None:
        """Call once, while the other workers do: makes the ways between the devices."""
        if isinstance(self.executor, CudaExecutor):
            self.executor.connect()

    def start(self, *, graphs: bool = True) -> None:
        """Call once, when the weights are in place: makes the masters, unless `restored`; on a GPU captures the
        programs, if `graphs`."""
        if isinstance(self.executor, CudaExecutor):
            torch.cuda.synchronize()
        if not self._restored:
            self._run(self.assembly.only("load"))
        if graphs and not self._watched and isinstance(self.executor, CudaExecutor):
            self.executor.capture()
        if isinstance(self.executor, CudaExecutor):
            # The moment that the times of steps are counted from. Without it the first step, which may be done before
            # it is read, would be reported too long, and the first step that is waited for too short.
            start = next(self._readings)
            start.enqueue()
            start.values()

    def micro_step(self, *batches: MicroBatch, first: bool, last: bool = False, loss_scale: float, index: int) -> None:
        """Forward and backward of one micro-batch; gradients and loss are written if `first`, else added to.

        In the `last` micro-step of an optimizer step they are then summed over all workers.
        """
        (batch,) = batches
        self._write_batch(batch, loss_scale)
        self._inputs.write("micro_step", index)
        self._inputs.commit()
        program = self.assembly.micro_step(first=first, last=last)
        self._run(self.assembly.for_documents(program, batch.n_documents), batch.n_valid)

    def update(self, *, lr: float, step: int) -> Reading:
        """Clip and apply the accumulated gradient. `step` is 1 at the first; a non-finite norm changes nothing.

        The reading's loss is the sum of loss_scale x (losses of the labels) over the micro-steps: the mean.
        """
        self._inputs.write("lr", lr)
        self._inputs.write("step", step)
        self._inputs.commit()
        self._run(self.assembly.only("update"))
        if isinstance(self.executor, CudaExecutor):
            reading = next(self._readings)
            reading.enqueue()
            if self._watched:  # the watcher may end the run: no step is then left to be reported
                self.settle()
            return reading
        return ReadyReading(float(self._outcome[0]), float(self._outcome[1]))

    def evaluate(self, *batches: MicroBatch) -> float:
        """Sum of the losses of the one batch's labels, in nats. Changes neither weights nor gradients."""
        (batch,) = batches
        self._write_batch(batch, 1.0)
        self._inputs.commit()
        self._run(self.assembly.for_documents(self.assembly.only("evaluate"), batch.n_documents), batch.n_valid)
        if isinstance(self.executor, CudaExecutor):
            self.executor.stream.synchronize()
        return float(self.buffers.persistent(self.assembly.eval_loss))

    def settle(self) -> None:
        """Wait until everything that was enqueued is done, before somebody reads the weights."""
        if isinstance(self.executor, CudaExecutor):
            self.executor.stream.synchronize()

    def allocate_snapshot(self, values: Iterable[Value]) -> HostCopy:
        """Host memory into which `snapshot` copies params and states. Call once, before `start`.

        Raises NoHostMemory when it cannot be had.
        """
        stream = self.executor.stream if isinstance(self.executor, CudaExecutor) else None
        self._copy = HostCopy(self.buffers, values, self.assembly.all_programs, stream)
        return self._copy

    def snapshot(self) -> None:
        """Begin to copy what `allocate_snapshot` was given, as it is after everything that was asked for before."""
        assert self._copy is not None
        self._copy.take()

    def _run(self, program: Program, labels: int | None = None) -> None:
        if self._copy is not None:
            self._copy.before(program.name)
        self._execute(program.name, labels)

    def close(self) -> None:
        """Free what collectives hold on to, and unpin. Nothing can run afterwards."""
        if self._copy is not None:
            self._copy.close()
        if isinstance(self.executor, CudaExecutor):
            self.executor.release()

    def _write_batch(self, batch: MicroBatch, loss_scale: float) -> None:
        for name in ("tokens", "targets", "positions"):
            self._inputs.write(name, getattr(batch, name))
        _write_documents(self._inputs, self.assembly, batch.cu_seqlens)
        self._inputs.write("loss_scale", loss_scale)


class ReadyReading:
    """A reading of a step that is done."""

    ready = True

    def __init__(self, loss: float, norm: float) -> None:
        self._values = loss, norm
        self.finished_at = time.perf_counter()

    def values(self) -> tuple[float, float]:
        return self._values


class PendingReading:
    """A place on the host to which the reading of a step is copied behind it."""

    def __init__(self, values: list[Tensor], stream: torch.cuda.Stream) -> None:
        self._values = values
        self._stream = stream
        self._host = [torch.empty(v.shape, dtype=v.dtype, pin_memory=True) for v in values]
        self._event = torch.cuda.Event(enable_timing=True)
        self._finished_at: float | None = None
        self.previous: PendingReading | None = None
        """The reading of the step before."""
        self.enqueue()  # makes the event

    def enqueue(self) -> None:
        """Take the values as they are once everything that is enqueued so far is done."""
        self._finished_at = None
        with torch.cuda.stream(self._stream):
            for host, value in zip(self._host, self._values, strict=True):
                host.copy_(value, non_blocking=True)
            self._event.record(self._stream)

    @property
    def ready(self) -> bool:
        return bool(self._event.query())

    def values(self) -> tuple[float, float]:
        if self._finished_at is None:
            finished_earlier = self._event.query()
            self._event.synchronize()
            now = time.perf_counter()
            self._finished_at = min(now, self._after_previous() or now) if finished_earlier else now
        return float(self._host[0]), float(self._host[1])

    @property
    def finished_at(self) -> float:
        assert self._finished_at is not None, "read `values` before"
        return self._finished_at

    def _after_previous(self) -> float | None:
        """By the GPU's clock, counted from the step before. A step that was waited for sets the host's clock anew."""
        previous = self.previous
        if previous is None or previous._finished_at is None:
            return None
        return previous._finished_at + previous._event.elapsed_time(self._event) / 1000


def _inputs(assembly: Assembly, buffers: Buffers, stream: Any | None) -> Inputs:
    values = [v for v in assembly.declared if v.role == "input"]
    return Inputs(values, assembly.memory.segments["input"], buffers, stream)


def _write_documents(inputs: Inputs, assembly: Assembly, cu_seqlens: np.ndarray[Any, Any]) -> None:
    """Write the offsets for every variant. Those that they do not fit into are not run."""
    inputs.write(assembly.batch.cu_seqlens.name, cu_seqlens)
    for documents, offsets in assembly.cu_seqlens.items():
        inputs.write(offsets.name, cu_seqlens[: documents + 1])


def _a_document_a_row(assembly: Assembly) -> np.ndarray[Any, Any]:
    """cu_seqlens for a run on nothing."""
    batch = assembly.batch
    tokens = batch.tokens.shape[0]
    offsets = np.full(batch.cu_seqlens.shape, tokens, np.int32)
    rows = np.arange(0, tokens, batch.seq_len, dtype=np.int32)
    offsets[: len(rows)] = rows
    return offsets
