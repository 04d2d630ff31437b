"""A device writes its position itself, also from a CUDA graph, and the host reads it while the device works."""

from __future__ import annotations

import time

import pytest
import torch

from surogate_core.runtime.position import DevicePosition

pytestmark = pytest.mark.gpu

NAME = "the sum of gradients of block 17"


def test_a_graph_writes_where_the_device_is() -> None:
    position, stream = DevicePosition(0), torch.cuda.Stream()
    x = torch.zeros(1, device="cuda")

    def body() -> None:
        with position.collective(NAME, stream.cuda_stream):
            torch.cuda._sleep(1_000_000_000)  # about 0.5 s
            x.add_(1)

    with torch.cuda.stream(stream):
        body()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        body()
        graph.capture_end()
        with position.collective("the sum of loss", stream.cuda_stream):
            pass
        stream.synchronize()
        assert position.read()[2:] == ("the sum of loss", False)
        graph.replay()
    seen, deadline = set(), time.monotonic() + 10
    while not stream.query() and time.monotonic() < deadline:
        seen.add(position.read()[2:])
    stream.synchronize()
    assert (NAME, True) in seen and position.read()[2:] == (NAME, False) and x.item() == 2


def test_a_micro_step_is_counted_where_the_device_is_not_where_the_host_is() -> None:
    position, stream = DevicePosition(0), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        position.micro_step(1, stream.cuda_stream)
        stream.synchronize()
        torch.cuda._sleep(1_000_000_000)
        position.micro_step(2, stream.cuda_stream)
        assert position.read()[1] == 1
        stream.synchronize()
    assert position.read()[1] == 2


def test_a_device_writes_where_the_host_has_written_first() -> None:
    """As a run does: the weights are sent before any stream has work."""
    position, stream = DevicePosition(0), torch.cuda.Stream()
    with position.collective("the weights of rank 0", 0):
        pass
    with position.collective(NAME, stream.cuda_stream):
        assert position.read()[2] in (NAME, "the weights of rank 0")
    stream.synchronize()
    assert position.read()[2:] == (NAME, False)
