"""The choice of the transport that connects the ranks of a run."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from threads_as_processes import quicken, together

from surogate.world import connect as launch
from surogate.world.processes import Processes
from surogate_core.errors import RunLost, RunStopped
from surogate_core.runtime import device, nccl
from surogate_core.runtime.comms.copies import CopiesComm
from surogate_core.runtime.comms.gloo import GlooComm


@pytest.fixture(autouse=True)
def uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_uuids", lambda indices: [f"GPU-{index}" for index in indices])
    quicken(monkeypatch)


def chosen(transport: str, on_gpu: bool, devices: Sequence[Sequence[int]]) -> list[str]:
    """Return the transport that each process chooses, or its error. `devices`: those of each."""

    def choose(processes: Processes) -> str:
        processes.world = replace(processes.world, devices=devices[processes.world.process])
        return launch.choose_transport(processes, transport, on_gpu)

    size = sum(map(len, devices))
    return [str(one) for one in together(len(devices), choose, size=size, started_by="MPI")]


@pytest.mark.parametrize(
    ("devices", "on_gpu", "transport"),
    [
        ([[0, 1]], True, "nccl"),
        ([[0, 0]], True, "copies"),
        ([[0, 0]], False, "copies"),
        ([[0], [0]], False, "gloo"),
        ([[0], [1]], True, "nccl"),
        ([[0], [0]], True, "gloo"),
        ([[0, 0], [1, 1]], True, "gloo"),
    ],
)
def test_auto_chooses_by_processes_and_gpus(devices: list[list[int]], on_gpu: bool, transport: str) -> None:
    assert chosen("auto", on_gpu, devices) == [transport] * len(devices)


@pytest.mark.parametrize(
    ("transport", "on_gpu", "devices", "words"),
    [
        ("copies", False, [[0], [0]], "memory in one process, and there are 2 (MPI). Use transport: auto"),
        ("nccl", False, [[0, 0]], "nccl: connects GPUs, and the CPU trains"),
        ("nccl", True, [[0, 0]], "several ranks on one GPU (GPU-0). Use ranks_per_gpu: 1 and"),
        ("nccl", True, [[0], [0]], "several ranks on one GPU (GPU-0). Use ranks_per_gpu: 1 and"),
    ],
)
def test_a_transport_that_cannot_connect_the_ranks_is_refused_with_the_remedy(
    transport: str, on_gpu: bool, devices: list[list[int]], words: str
) -> None:
    assert all(words in error for error in chosen(transport, on_gpu, devices))


def test_a_process_that_waits_for_the_gpus_of_another_learns_that_it_has_failed() -> None:
    def choose(processes: Processes) -> str:
        if processes.world.process:
            raise RunStopped("the device fell off the bus")
        return launch.choose_transport(processes, "auto", on_gpu=True)

    first, _ = together(2, choose)
    assert str(first) == "process 1 of 2: the device fell off the bus"


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """NCCL's communicators are made once the event is set."""
    ready = threading.Event()

    def library(name: str, *arguments: Any) -> None:
        if name == "ncclGroupEnd":
            assert ready.wait(60)

    monkeypatch.setattr(nccl, "load", lambda: library)
    monkeypatch.setattr(launch, "choose_transport", lambda *given: "nccl")
    monkeypatch.setattr("torch.cuda.device", lambda index: nullcontext())
    yield ready
    ready.set()


@pytest.mark.parametrize("comes", [False, True])
def test_ranks_that_wait_in_the_start_of_nccl_say_for_whom(comes: bool, hanging: threading.Event) -> None:
    def connect(processes: Processes) -> None:
        if comes or processes.world.writer:
            with launch.connected(processes, "nccl", on_gpu=True):
                raise AssertionError("connected")
        processes.at("planning", 0)
        processes.share(None, "the start of nccl")
        while True:
            time.sleep(0.01)
            processes.check()

    first, second = together(2, connect, stall_seconds=0.2, join_seconds=1.0)
    missing = f"rank 1 ({socket.gethostname()}, device 0) has not entered the start of nccl; rank 0 waits for it"
    none = "all ranks are in the start of nccl, which does not end: look at what connects them,"
    words = f"connecting the ranks: {none}" if comes else f"planning: {missing}"
    assert str(first).startswith(f"{words} since ")
    assert (type(first), first.exit_code, first.told) == (RunLost, 3, False)
    assert (str(second), second.told) == (str(first), True)


def test_an_error_of_a_process_frees_those_that_wait_for_it_in_the_start_of_nccl(hanging: threading.Event) -> None:
    def connect(processes: Processes) -> None:
        if not processes.world.writer:
            processes.share(None, "the start of nccl")
            raise RunStopped("the device fell off the bus")
        with launch.connected(processes, "nccl", on_gpu=True):
            raise AssertionError("connected")

    first, _ = together(2, connect)
    assert str(first) == "process 1 of 2: the device fell off the bus"


def test_processes_that_have_all_come_are_connected(hanging: threading.Event) -> None:
    def connect(processes: Processes) -> list[tuple[int, int]]:
        hanging.set()
        with launch.connected(processes, "nccl", on_gpu=True) as comms:
            assert not any(position.read()[3] for position in processes.positions)
            return [(comm.rank, comm.world_size) for comm in comms]

    assert together(2, connect) == [[(0, 2)], [(1, 2)]]


@pytest.mark.parametrize(("transport", "kind"), [("auto", CopiesComm), ("copies", CopiesComm), ("gloo", GlooComm)])
def test_the_ranks_of_a_cpu_are_connected(transport: str, kind: type[Any]) -> None:
    def connect(processes: Processes) -> list[tuple[type[Any], int, int]]:
        with launch.connected(processes, transport, on_gpu=False) as comms:
            return [(type(comm), comm.rank, comm.world_size) for comm in comms]

    assert together(1, connect, size=2, ranks=range(2), devices=[0, 0]) == [[(kind, 0, 2), (kind, 1, 2)]]
