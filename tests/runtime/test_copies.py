"""Ranks that are threads of one process and read each other's memory, on a CPU."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from runtime.collective_cases import check_collectives, error_after_abort, on_all, span, values

from surogate_core.api.world import CollectiveError
from surogate_core.errors import ProgramError
from surogate_core.runtime.comms import copies, exchange, spans
from surogate_core.runtime.comms.exchange import combined
from surogate_core.runtime.comms.single import SingleComm


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_collective_has_the_bits_of_its_reference(ranks: int) -> None:
    check_collectives(copies.connect([0] * ranks))


def test_the_collectives_of_one_rank_copy() -> None:
    check_collectives([SingleComm()])


def test_large_spans_are_combined_in_pieces_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "PIECE", 10)
    check_collectives(copies.connect([0] * 3))


def test_sums_add_in_fp32_in_order_of_rank_and_round_once() -> None:
    """In another order 1 is lost; if each addition rounded to bf16, the small ones would be lost."""
    lost = combined([torch.tensor([x]) for x in (2.0**25, -(2.0**25), 1.0)], "sum")
    assert float(lost) == 1.0
    once = combined([torch.tensor([x], dtype=torch.bfloat16) for x in (256.0, 1.0, 1.0)], "sum")
    assert once.dtype == torch.bfloat16 and float(once) == 258.0
    exact = combined([torch.tensor([2**40 + 1]), torch.tensor([1])], "sum")
    assert int(exact) == 2**40 + 2
    for how in ("sum", "max"):
        nan = combined([torch.tensor([1.0]), torch.tensor([float("nan")])], how)
        assert bool(nan.isnan())


def test_a_rank_that_does_not_come_is_named_with_the_collective() -> None:
    first, second, third = copies.connect([0, 0, 0], seconds=0.2)
    tensor = torch.zeros(10)
    with pytest.raises(CollectiveError, match=r"all_reduce\(sum\) of 10 fp32: rank 1 did not come to .* within 0\.2 s"):
        on_all([first, third], lambda comm: comm.all_reduce([span(tensor, "fp32")], "sum", 0))
    with pytest.raises(CollectiveError, match=r"rank 1, barrier: rank 1 did not come"):
        second.barrier(0)


def test_ranks_that_call_different_collectives_all_fail_with_both_calls() -> None:
    ranks = copies.connect([0, 0])
    tensors = torch.zeros(10), torch.zeros(9)

    def work(comm: Any) -> str:
        with pytest.raises(CollectiveError) as raised:
            comm.all_reduce([span(tensors[comm.rank], "fp32")], "sum", 0)
        return str(raised.value)

    for text in on_all(ranks, work):
        assert "the ranks call different collectives (rank 0: all_reduce(sum) of 10 fp32; rank 1: " in text


def test_an_abort_frees_a_rank_that_waits() -> None:
    first, second = copies.connect([0, 0])
    assert error_after_abort(first, second) == "rank 0, barrier: the communicator was aborted"
    first.check()


def test_on_a_gpu_a_stream_waits_for_the_events_of_the_other_ranks_at_every_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With host memory in place of a GPU's: before the collective, between its stages, and after it."""
    waits: list[tuple[int, int]] = []

    class Stream:
        def record_event(self) -> int:
            return threading.get_ident()

        def wait_event(self, event: int) -> None:
            waits.append((threading.get_ident(), event))

    in_memory = spans.tensor
    for module in (spans, exchange, copies):
        monkeypatch.setattr(module, "tensor", lambda of, stream: in_memory(of, 0))
    monkeypatch.setattr(copies, "current", lambda stream, device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    given = [values("bf16", 1001, rank, "cpu") for rank in range(3)]
    want = combined([tensor.clone() for tensor in given], "sum")
    comms = copies.connect([0, 0, 0])
    on_all(comms, lambda comm: comm.all_reduce([span(given[comm.rank], "bf16")], "sum", 4096))
    assert all(torch.equal(tensor, want) for tensor in given)
    assert len(waits) == 3 * 3 * 2 and all(own != other for own, other in waits)


def test_spans_that_cannot_be_divided_are_refused() -> None:
    (comm,) = copies.connect([0])
    with pytest.raises(ProgramError, match="all_gather: from 8 elements of fp32 to 9 of fp32"):
        comm.all_gather([((0, 8, "fp32"), (0, 9, "fp32"))], 0)
    with pytest.raises(ProgramError, match=r"all_reduce combines only .*, not e4m3"):
        comm.all_reduce([(0, 8, "e4m3")], "sum", 0)
