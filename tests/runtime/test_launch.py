"""The choice of the transport that connects the ranks of a run."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_core.api import World
from surogate_core.api.world import LocalStore
from surogate_core.errors import ConfigError
from surogate_core.runtime import device, launch
from surogate_core.runtime.comms.copies import CopiesComm
from surogate_core.runtime.comms.gloo import GlooComm


@pytest.fixture(autouse=True)
def uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_uuids", lambda indices: [f"GPU-{index}" for index in indices])


def world(*devices: int, of: int = 1, others: str = "") -> World:
    """Process 0 of `of` processes. `others` are the GPUs of process 1."""
    store = LocalStore()
    store.set("gpus/1", others.encode())
    return World(
        size=max(2, of), ranks=range(len(devices)), devices=devices, processes=of, started_by="MPI", store=store
    )


@pytest.mark.parametrize(
    ("given", "on_gpu", "chosen"),
    [
        (world(0, 1), True, "nccl"),
        (world(0, 0), True, "copies"),
        (world(0, 0), False, "copies"),
        (world(0, of=2), False, "gloo"),
        (world(0, of=2, others="GPU-1"), True, "nccl"),
        (world(0, of=2, others="GPU-0"), True, "gloo"),
        (world(0, 0, of=2, others="GPU-1"), True, "gloo"),
    ],
)
def test_auto_chooses_by_processes_and_gpus(given: World, on_gpu: bool, chosen: str) -> None:
    assert launch.choose_transport(given, "auto", on_gpu) == chosen


def test_a_transport_that_cannot_connect_the_ranks_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"copies: .* in one process, and there are 2 \(MPI\)\. Use transport: auto"):
        launch.choose_transport(world(0, of=2), "copies", False)
    with pytest.raises(ConfigError, match=r"nccl: connects GPUs, and the CPU trains"):
        launch.choose_transport(world(0, 0), "nccl", False)
    for shared in (world(0, 0), world(0, of=2, others="GPU-0")):
        with pytest.raises(ConfigError, match=r"several ranks on one GPU \(GPU-0\)\. Use ranks_per_gpu: 1 and"):
            launch.choose_transport(shared, "nccl", True)


@pytest.mark.parametrize(("transport", "kind"), [("auto", CopiesComm), ("copies", CopiesComm), ("gloo", GlooComm)])
def test_the_ranks_of_a_cpu_are_connected(transport: str, kind: type[Any]) -> None:
    with launch.connected(world(0, 0), transport, on_gpu=False) as comms:
        assert [(type(comm), comm.rank, comm.world_size) for comm in comms] == [(kind, 0, 2), (kind, 1, 2)]
