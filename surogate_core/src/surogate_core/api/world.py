"""The processes of a run: `World`, what they share, and how launchers join and start them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, runtime_checkable

from ..origin import Definition, Name
from .base import NoOptions, Options

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["How", "LocalStore", "Position"]

Span = tuple[int, int, str]
"""Elements in memory: (address, elements, dtype). On a GPU an address of the device, on a CPU of the host."""

How = Literal["sum", "max"]

REDUCIBLE = frozenset({"fp32", "bf16", "fp64", "int32", "int64"})
"""Dtypes of which communicators can combine values."""


class CollectiveError(RuntimeError):
    """A collective did not take place. The message names it, and the ranks that are the cause."""


class Position:
    """The position of a rank: its micro-step, and the collective that it entered last. Any thread may read it."""

    def __init__(self) -> None:
        self._micro_step = self._moves = 0
        self._name, self._inside = "", False

    def micro_step(self, number: int, stream: int) -> None:
        """The rank begins a micro-step of an optimizer step."""
        self._micro_step = number
        self._moves += 1

    @contextmanager
    def collective(self, name: str, stream: int) -> Iterator[None]:
        """The rank is in a collective during the block."""
        self._moves += 1
        self._name, self._inside = name, True
        yield
        self._moves += 1
        self._inside = False

    def read(self) -> tuple[int, int, str, bool]:
        """Return a number that changes whenever the rank comes further, the micro-step, the name of the collective,
        and whether the rank is inside of it."""
        return self._moves, self._micro_step, self._name, self._inside


class Comm(Protocol):
    """The communicator of a rank. A rank is one device, driven by one thread.

    Every rank calls the same methods in the same order, with as many spans of the same sizes and dtypes. A call
    enqueues on `stream`, an address of a CUDA stream; on a CPU it is 0, and a call returns when its result is there.
    Where a span has `world_size` parts, they are equal, and in order of rank.
    """

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> int:
        """Index of the rank's device among the devices visible to its process."""

    @property
    def capturable(self) -> bool:
        """Whether calls may be captured in a CUDA graph. If not, the host meets other ranks in each call."""

    @property
    def position(self) -> Position:
        """The position of the rank. Callers of collectives write it."""

    @property
    def allocate(self) -> Callable[[int], Tensor] | None:
        """(nbytes) -> zeros on the rank's device, uint8 [nbytes]: memory between which gathers are fast. None: any is.

        All ranks call it in the same order with equal sizes. If any memory of gathers comes from it, all must.
        """

    @property
    def allocated(self) -> int:
        """Bytes that `allocate` has returned so far."""

    def all_reduce(self, spans: Sequence[Span], how: How, stream: int) -> None:
        """Replace each span by its sum or maximum over all ranks."""

    def reduce_scatter(self, spans: Sequence[tuple[Span, Span]], how: How, stream: int) -> None:
        """Write the rank's part of the sum or maximum of each first span over all ranks to the second span."""

    def all_gather(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        """Write the first spans of all ranks to the parts of the second span."""

    def reduce(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], how: How, stream: int) -> None:
        """Write the sum or maximum of each first span over all ranks to the second span of its root, which may be the
        first one. `roots` are ranks, one for each pair."""

    def broadcast(self, spans: Sequence[tuple[Span, Span]], roots: Sequence[int], stream: int) -> None:
        """Write each first span of its root to the second spans of all ranks, which may be the first ones."""

    def all_to_all(self, spans: Sequence[tuple[Span, Span]], stream: int) -> None:
        """Write part r of the first span to the part of the second span of rank r that has this rank's number."""

    def barrier(self, stream: int) -> None:
        """Wait until all ranks have reached this call."""

    def check(self) -> None:
        """Raise if an asynchronous error has occurred. Does not wait. May be called on any thread."""

    def abort(self) -> None:
        """End collectives that wait for other ranks. Does not wait. May be called on any thread."""


class StoreLost(ConnectionError):
    """The process that holds the store cannot be reached. The message names it and its address."""


@runtime_checkable
class Store(Protocol):
    """Small values that the processes of a run share. May be used on any thread.

    Every method raises StoreLost if the process that holds the store is gone.
    """

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str, seconds: float) -> bytes:
        """Wait for a key to be set. Raises TimeoutError if that takes longer than `seconds`."""

    def has(self, key: str) -> bool:
        """Return whether a key is set. Does not wait for it."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, at first 0, and return the sum. Numbers are read by `add(key, 0)`."""

    def delete(self, key: str) -> None:
        """Remove a key. No error if it is not set."""

    def close(self) -> None:
        """Release what the process holds of the store."""


class LocalStore:
    """The `Store` of a run with one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, seconds: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, seconds):
                raise TimeoutError(f"{key} was not set within {seconds:g} s")
            return self._values[key]

    def has(self, key: str) -> bool:
        with self._changed:
            return key in self._values

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def delete(self, key: str) -> None:
        with self._changed:
            self._values.pop(key, None)

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run, and those of this process. Those of this process are `ranks` and below.

    size, nodes, processes  numbers of ranks, machines and processes
    started_by              how the processes were started, for the user: "torchrun (RANK, WORLD_SIZE)"
    store                   reaches all processes
    ranks                   those of this process, without a gap
    devices                 the device of each of `ranks`, as an index among those visible to this process
    process                 index of this process. Process 0 has rank 0.
    join_seconds            how long a process waits for the others until their ranks are connected
    """

    size: int = 1
    nodes: int = 1
    processes: int = 1
    started_by: str = "one process"
    store: Store = field(default_factory=LocalStore)
    ranks: range = range(1)
    devices: Sequence[int] = (0,)
    process: int = 0
    join_seconds: float = 600.0

    @property
    def writer(self) -> bool:
        """Whether this process writes metrics and outputs, and completes checkpoints: that of rank 0."""
        return self.process == 0


@dataclass(frozen=True, kw_only=True)
class JoinContext:
    """The facts of a process that a launcher joins to a run.

    environment       variables of the process
    device_count      devices that the process may use: visible GPUs, or 1 if the CPU trains
    on_gpu            whether they are GPUs
    wanted            the key `gpus`: devices of this machine to train on, 0: all
    ranks_per_device  the key `ranks_per_gpu`
    uuids             of the devices, if they are GPUs: two processes that share a GPU notice it by them
    """

    environment: Mapping[str, str]
    device_count: int
    on_gpu: bool
    wanted: int = 1
    ranks_per_device: int = 1
    uuids: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run for other processes, which can be pickled.

    config       every key of the run, as JSON types
    source       the config file, which errors name
    train        what `work` calls
    mode         "train", "pt" or "sft"
    environment  variables to set in the processes
    """

    config: Mapping[str, Any]
    source: str
    train: Callable[[Task, World, Callable[[str], None]], Any]
    mode: Literal["train", "pt", "sft"] = "train"
    environment: Mapping[str, str] = field(default_factory=dict)

    def work(self, world: World, notice: Callable[[str], None] = print) -> Any:
        """Train in one of the processes of `world`, and return the result, which can be pickled."""
        return self.train(self, world, notice)


@dataclass(frozen=True, kw_only=True)
class LauncherDef(Definition, Generic[Options]):
    """Joins the processes of a run, and starts them if they are not running yet.

    join        (context, options) -> World. Called in every process before the run is planned; returns when all
                processes have joined. Raises ConfigError if the environment is incomplete, contradicts itself, or a
                process does not come in time. None: only with `start`.
    matches     environment -> the variables by which `launcher: auto` selects this launcher, such as
                "RANK, WORLD_SIZE"; "" if it does not apply
    key         of its options, by which `launcher: auto` selects this launcher if the config has it
    start       (task, notice, options) -> what `task.work(world, notice)` returns in process 0. Starts
                processes that call it, each with its World, waits for them, and ends them if it is interrupted.
                Raises what it raises. None: the user starts the processes, and `join` is called in them instead.
    """

    name: Name
    summary: str
    options: type[Options] = NoOptions  # type: ignore[assignment]
    join: Callable[[JoinContext, Options], World] | None = None
    matches: Callable[[Mapping[str, str]], str] = lambda environment: ""
    key: str = ""
    start: Callable[[Task, Callable[[str], None], Options], Any] | None = None
