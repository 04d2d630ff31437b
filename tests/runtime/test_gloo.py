"""Ranks that send each other bytes through torch's gloo, on a CPU: threads of one process, and several processes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from runtime.collective_cases import check_collectives, error_after_abort, on_all, span, values

from surogate_core.api import World
from surogate_core.api.world import CollectiveError, LocalStore
from surogate_core.runtime.comms import copies, gloo
from surogate_core.runtime.comms.exchange import combined


def world_of(ranks: int) -> World:
    return World(size=ranks, ranks=range(ranks), devices=[0] * ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_collective_has_the_bits_of_its_reference(ranks: int) -> None:
    comms = gloo.connect(world_of(ranks))
    check_collectives(comms)
    for comm in comms:
        comm.abort()


class SharedStore(LocalStore):
    """What a `Store` of several processes has for gloo."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    @property
    def torch_store(self) -> Any:
        return torch.distributed.FileStore(self._path, -1)


def process(index: int, path: str) -> None:
    """Process `index` of two, with two ranks each: sum what all four have."""
    ranks = range(2 * index, 2 * index + 2)
    world = World(size=4, processes=2, process=index, ranks=ranks, devices=[0, 0], store=SharedStore(f"{path}/store"))
    given = [values("bf16", 1000, rank, "cpu") for rank in range(4)]

    def work(comm: Any) -> None:
        own = given[comm.rank].clone()
        comm.all_reduce([span(own, "bf16")], "sum", 0)
        comm.barrier(0)
        assert torch.equal(own, combined(given, "sum"))
        Path(path, f"done-{comm.rank}").touch()

    on_all(gloo.connect(world), work)


def test_two_processes_of_two_ranks_get_the_sum_of_all_four(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(process, args=(str(tmp_path),), nprocs=2)
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [f"done-{rank}" for rank in range(4)]


def test_a_rank_that_does_not_come_ends_the_wait_with_the_name_of_the_collective() -> None:
    first, _ = gloo.connect(world_of(2), seconds=0.3)
    with pytest.raises(CollectiveError, match=r"rank 0, all_reduce\(sum\) of 4 fp32, at most 0\.3 s: "):
        first.all_reduce([span(torch.zeros(4), "fp32")], "sum", 0)


def test_an_abort_frees_a_rank_that_waits() -> None:
    first, _ = gloo.connect(world_of(2))
    failed = error_after_abort(first, first)
    assert "barrier" in failed and "aborted" in failed, failed


class Late:
    """A transfer that is done at the moment in which the first wait gives up."""

    def __init__(self, error: str = "") -> None:
        self.error, self.done = error, False

    def is_completed(self) -> bool:
        return self.done

    def wait(self, limit: timedelta | None = None) -> None:
        was, self.done = self.done, True
        if self.error or not was:
            raise RuntimeError(self.error or "Operation timed out!")


def test_a_transfer_that_is_done_when_a_wait_gives_up_is_no_error() -> None:
    first, _ = gloo.connect(world_of(2))
    assert first._is_done(Late())
    with pytest.raises(RuntimeError, match="connection closed"):
        first._is_done(Late("connection closed"))


def test_gloo_and_copies_have_equal_bits() -> None:
    results = []
    for comms in (gloo.connect(world_of(3)), copies.connect([0] * 3)):
        given = [values("fp32", 12345, rank, "cpu") for rank in range(3)]
        on_all(comms, lambda comm, given=given: comm.all_reduce([span(given[comm.rank], "fp32")], "sum", 0))
        results.append(given)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
