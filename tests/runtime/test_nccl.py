"""The binding of NCCL, against a stand-in library: what it asks for, and what it says when something is wrong."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from surogate_core.errors import ConfigError
from surogate_core.runtime import collectives, nccl


class Stand:
    """Functions by NCCL's names: remembers calls, answers `results.get(name, 0)`."""

    def __init__(self, version: int = 22703, **results: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results = results
        self.asynchronous = 0
        names = [*nccl._SIGNATURES]
        self.functions = SimpleNamespace(**{name: self._function(name) for name in names})
        self.functions.ncclGetErrorString = lambda result: f"words for {result}".encode()
        self.functions.ncclGetLastError = lambda comm: b"the last detail.\n"

        def get_version(pointer: Any) -> int:
            pointer._obj.value = version
            return 0

        def get_async_error(comm: int, pointer: Any) -> int:
            pointer._obj.value = self.asynchronous
            return 0

        self.functions.ncclGetVersion = get_version
        self.functions.ncclCommGetAsyncError = get_async_error

    def _function(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append((name, *arguments))
            return self.results.get(name, 0)

        return call

    @property
    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


def comm(stand: Stand) -> nccl.NcclComm:
    return nccl.NcclComm(nccl.Library(stand.functions), 77, 1, 2, 1)


def test_one_range_is_one_call_and_several_are_one_group() -> None:
    stand = Stand()
    comm(stand).all_reduce(((4096, 10, "fp32"),), 5)
    assert stand.calls == [("ncclAllReduce", 4096, 4096, 10, 7, 0, 77, 5)]
    comm(stand).all_reduce(((4096, 10, "fp32"), (8192, 3, "bf16")), 5)
    assert stand.names[1:] == ["ncclGroupStart", "ncclAllReduce", "ncclAllReduce", "ncclGroupEnd"]


def test_every_dtype_that_a_kernel_promises_to_sum_has_a_number() -> None:
    assert nccl.DTYPES.keys() == collectives.SUMMABLE


def test_connecting_makes_a_rank_of_each_device() -> None:
    stand = Stand()
    ways = nccl.connect([0, 1, 2], nccl.Library(stand.functions))
    assert [(way.rank, way.world_size, way.device) for way in ways] == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    (call,) = stand.calls
    assert call[0] == "ncclCommInitAll" and call[2] == 3 and list(call[3]) == [0, 1, 2]


def test_errors_have_nccls_words_and_say_where_to_find_more() -> None:
    with pytest.raises(
        nccl.NcclError, match=r"ncclAllReduce: NCCL error 3: words for 3\. the last detail\. NCCL_DEBUG"
    ):
        comm(Stand(ncclAllReduce=3)).all_reduce(((0, 1, "fp32"),), 0)
    with pytest.raises(ConfigError, match=r"gpus: 2: the GPUs cannot be connected: .*error 2.*gpus: 1"):
        nccl.connect([0, 1], nccl.Library(Stand(ncclCommInitAll=2).functions))


def test_an_error_that_comes_later_is_seen_by_a_check_and_what_goes_on_is_none() -> None:
    stand = Stand()
    way = comm(stand)
    for fine in (0, 7):
        stand.asynchronous = fine
        way.check()
    stand.asynchronous = 6
    with pytest.raises(nccl.NcclError, match="rank 1: NCCL error 6"):
        way.check()


def test_giving_up_does_not_wait_and_happens_once() -> None:
    """NCCL's own call returns when the graphs are gone, which may be never."""
    stand = Stand()
    graphs_gone = threading.Event()
    returned: list[bool] = []

    def abort(handle: int) -> None:
        stand.calls.append(("ncclCommAbort", handle))
        returned.append(graphs_gone.wait(60))

    stand.functions.ncclCommAbort = abort
    way = comm(stand)
    way.abort()
    way.abort()
    way.check()
    assert not returned, "it waited for NCCL"
    while not stand.calls:
        time.sleep(0.01)
    assert stand.calls == [("ncclCommAbort", 77)]
    with pytest.raises(nccl.NcclError, match="rank 1: its communicator was given up"):
        way.all_reduce(((4096, 10, "fp32"),), 5)
    graphs_gone.set()


def test_giving_up_waits_for_a_call_under_way_but_not_for_one_that_waits_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "_ENQUEUE_SECONDS", 0.5)
    for seconds, order in ((0.1, ["enqueued", "ncclCommAbort"]), (1.5, ["ncclCommAbort", "enqueued"])):
        stand, entered = Stand(), threading.Event()
        way = comm(stand)

        def enqueue(*arguments: Any, stand: Stand = stand, seconds: float = seconds, entered: Any = entered) -> int:
            entered.set()
            time.sleep(seconds)
            stand.calls.append(("enqueued",))
            return 0

        stand.functions.ncclAllReduce = enqueue
        thread = threading.Thread(target=way.all_reduce, args=(((0, 1, "fp32"),), 0))
        thread.start()
        assert entered.wait(5)
        nccl.disconnect([way])
        thread.join()
        assert stand.names == order


def test_disconnecting_ends_all_communicators() -> None:
    stand = Stand()
    ways = [comm(stand), comm(stand)]
    nccl.disconnect(ways)
    assert stand.names == ["ncclCommAbort"] * 2


def test_a_missing_library_says_what_was_tried_and_what_to_do() -> None:
    def nowhere() -> Iterator[tuple[str, int]]:
        yield "libnccl-that-is-not-here.so.2", ctypes.DEFAULT_MODE

    with pytest.raises(ConfigError, match=r"needs NCCL.*libnccl-that-is-not-here\.so\.2.*Install torch.*gpus: 1"):
        nccl.load(nowhere())


def test_a_library_without_nccls_functions_is_not_nccl() -> None:
    def another() -> Iterator[tuple[str, int]]:
        yield "libc.so.6", ctypes.DEFAULT_MODE

    with pytest.raises(ConfigError, match=r"libc\.so\.6.*ncclGetVersion"):
        nccl.load(another())


def test_an_old_library_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: Stand(version=21005).functions)
    with pytest.raises(ConfigError, match=r"NCCL 2\.10\.5 .* is older than 2\.18\.0"):
        nccl.load()


def test_the_library_in_the_process_is_taken_before_the_wheels_and_the_systems() -> None:
    paths = [path for path, _ in nccl._candidates()]
    assert paths[0] == paths[-1] == nccl.SONAME
