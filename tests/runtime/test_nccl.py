"""The binding of NCCL with a fake library: the calls that it makes, and its error messages."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surogate_core.api import World
from surogate_core.errors import ConfigError
from surogate_core.runtime import collectives, nccl


class FakeNccl:
    """Functions with the names of NCCL's. Records calls and returns `results.get(name, 0)`."""

    def __init__(self, version: int = 22703, **results: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.results = results
        self.asynchronous = 0
        names = [*nccl._SIGNATURES, *nccl._OF_ENGINES]
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


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())


def comm(fake: FakeNccl) -> nccl.NcclComm:
    return nccl.NcclComm(nccl.Library(fake.functions), 77, 1, 2, 1, one_process=True)


def test_one_range_is_one_call_and_several_ranges_are_one_group() -> None:
    fake = FakeNccl()
    comm(fake).all_reduce(((4096, 10, "fp32"),), "sum", 5)
    assert fake.calls == [("ncclAllReduce", 4096, 4096, 10, 7, 0, 77, 5)]
    comm(fake).all_reduce(((4096, 10, "fp32"), (8192, 3, "bf16")), "max", 5)
    assert fake.names[1:] == ["ncclGroupStart", "ncclAllReduce", "ncclAllReduce", "ncclGroupEnd"]


def test_every_collective_calls_its_function_with_the_elements_or_bytes_of_a_rank() -> None:
    fake = FakeNccl()
    communicator = comm(fake)
    communicator.reduce_scatter([((64, 10, "bf16"), (256, 5, "bf16"))], "sum", 5)
    communicator.all_gather([((64, 5, "e4m3"), (256, 10, "e4m3"))], 5)
    communicator.broadcast([((64, 6, "e2m1"), (96, 6, "e2m1"))], [1], 5)
    communicator.reduce([((64, 6, "bf16"), (64, 6, "bf16"))], [0], "sum", 5)
    assert fake.calls == [
        ("ncclReduceScatter", 64, 256, 5, 9, 0, 77, 5),
        ("ncclAllGather", 64, 256, 5, 1, 77, 5),
        ("ncclBroadcast", 64, 96, 3, 1, 1, 77, 5),
        ("ncclReduce", 64, 64, 6, 9, 0, 0, 77, 5),
    ]
    fake.calls.clear()
    pairs = [((4096, 8, "fp32"), (256, 8, "fp32")), ((8192, 2, "fp32"), (512, 2, "fp32"))]
    communicator.reduce(pairs, [1, 0], "max", 5)
    communicator.broadcast(pairs, [1, 0], 5)
    assert fake.calls == [
        ("ncclGroupStart",),
        ("ncclReduce", 4096, 256, 8, 7, 2, 1, 77, 5),
        ("ncclReduce", 8192, 512, 2, 7, 2, 0, 77, 5),
        ("ncclGroupEnd",),
        ("ncclGroupStart",),
        ("ncclBroadcast", 4096, 256, 32, 1, 1, 77, 5),
        ("ncclBroadcast", 8192, 512, 8, 1, 0, 77, 5),
        ("ncclGroupEnd",),
    ]
    fake.calls.clear()
    communicator.all_to_all([((64, 8, "fp32"), (256, 8, "fp32"))], 5)
    assert fake.calls == [
        ("ncclGroupStart",),
        ("ncclSend", 64, 16, 1, 0, 77, 5),
        ("ncclRecv", 256, 16, 1, 0, 77, 5),
        ("ncclSend", 80, 16, 1, 1, 77, 5),
        ("ncclRecv", 272, 16, 1, 1, 77, 5),
        ("ncclGroupEnd",),
    ]


def test_every_dtype_that_the_kernel_supports_has_an_nccl_dtype() -> None:
    assert nccl.DTYPES.keys() == collectives.REDUCIBLE


def world_of(ranks: range, size: int, **changes: Any) -> World:
    return World(size=size, ranks=ranks, devices=range(len(ranks)), **changes)


def test_each_device_becomes_a_rank_in_one_group() -> None:
    fake = FakeNccl()
    library = nccl.Library(fake.functions)
    communicators = nccl.connect(world_of(range(3), 3), library, nccl.new_identity(library))
    assert [(communicator.rank, communicator.world_size, communicator.device) for communicator in communicators] == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 2),
    ]
    assert fake.names == ["ncclGetUniqueId", "ncclGroupStart", *["ncclCommInitRank"] * 3, "ncclGroupEnd"]
    assert [(call[2], call[4]) for call in fake.calls if call[0] == "ncclCommInitRank"] == [(3, 0), (3, 1), (3, 2)]


def test_processes_connect_by_the_identity_that_one_makes() -> None:
    """It has zeros, which end the strings of C."""
    made = bytes([*range(128)])

    def get_unique_id(pointer: Any) -> int:
        ctypes.memmove(pointer, made, 128)
        return 0

    first, second = FakeNccl(), FakeNccl()
    first.functions.ncclGetUniqueId = get_unique_id
    identity = nccl.new_identity(nccl.Library(first.functions))
    for process, fake in enumerate((first, second)):
        world = world_of(range(2 * process, 2 * process + 2), 4, processes=2, process=process)
        nccl.connect(world, nccl.Library(fake.functions), identity)
        given = [(bytes(call[3]), call[4]) for call in fake.calls if call[0] == "ncclCommInitRank"]
        assert given == [(made, 2 * process), (made, 2 * process + 1)]


def test_errors_contain_the_message_of_nccl_and_say_how_to_get_details() -> None:
    with pytest.raises(
        nccl.NcclError, match=r"ncclAllReduce: NCCL error 3: words for 3\. the last detail\. Set NCCL_DEBUG"
    ):
        comm(FakeNccl(ncclAllReduce=3)).all_reduce(((0, 1, "fp32"),), "sum", 0)
    with pytest.raises(ConfigError, match=r"gpus: the 2 GPUs of the run cannot be connected: .*error 2.*one GPU"):
        nccl.connect(world_of(range(2), 2), nccl.Library(FakeNccl(ncclCommInitRank=2).functions), bytes(128))
    with pytest.raises(ConfigError, match=r"gpus: NCCL does not start: ncclGetUniqueId: NCCL error 2.*one GPU"):
        nccl.new_identity(nccl.Library(FakeNccl(ncclGetUniqueId=2).functions))


def test_a_check_raises_asynchronous_errors_but_not_for_work_in_progress() -> None:
    fake = FakeNccl()
    communicator = comm(fake)
    for fine in (0, 7):
        fake.asynchronous = fine
        communicator.check()
    fake.asynchronous = 6
    with pytest.raises(nccl.NcclError, match="rank 1: NCCL error 6"):
        communicator.check()


def test_abort_does_not_wait_and_happens_once() -> None:
    """ncclCommAbort returns when the graphs are gone, which may never happen."""
    fake = FakeNccl()
    graphs_gone = threading.Event()
    returned: list[bool] = []

    def abort(handle: int) -> None:
        fake.calls.append(("ncclCommAbort", handle))
        returned.append(graphs_gone.wait(60))

    fake.functions.ncclCommAbort = abort
    communicator = comm(fake)
    communicator.abort()
    communicator.abort()
    communicator.check()
    assert not returned, "abort waited for NCCL"
    while not fake.calls:
        time.sleep(0.01)
    assert fake.calls == [("ncclCommAbort", 77)]
    with pytest.raises(nccl.NcclError, match="rank 1: its communicator was aborted"):
        communicator.all_reduce(((4096, 10, "fp32"),), "sum", 5)
    graphs_gone.set()


def test_abort_waits_for_a_running_call_but_not_for_a_blocked_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "_ENQUEUE_SECONDS", 0.5)
    for seconds, order in ((0.1, ["enqueued", "ncclCommAbort"]), (1.5, ["ncclCommAbort", "enqueued"])):
        fake, entered = FakeNccl(), threading.Event()
        communicator = comm(fake)

        def enqueue(*arguments: Any, fake: FakeNccl = fake, seconds: float = seconds, entered: Any = entered) -> int:
            entered.set()
            time.sleep(seconds)
            fake.calls.append(("enqueued",))
            return 0

        fake.functions.ncclAllReduce = enqueue
        thread = threading.Thread(target=communicator.all_reduce, args=(((0, 1, "fp32"),), "sum", 0))
        thread.start()
        assert entered.wait(5)
        nccl.disconnect([communicator])
        thread.join()
        assert fake.names == order


class Engines(FakeNccl):
    """A library whose gathers copy engines make. Its memory is that of the host."""

    def __init__(self, version: int = 22809, **results: int) -> None:
        super().__init__(version, **results)
        self.memory = ctypes.create_string_buffer(b"\xff" * 64, 64)
        self.freed = threading.Event()

        def split(parent: int, color: int, key: int, handle: Any, config: Any) -> int:
            given = config._obj
            self.calls.append(("ncclCommSplit", parent, color, key, given.size, given.version, given.CTAPolicy))
            handle._obj.value = 78
            return 0

        def allocate(pointer: Any, nbytes: int) -> int:
            self.calls.append(("ncclMemAlloc", nbytes))
            pointer._obj.value = ctypes.addressof(self.memory)
            return self.results.get("ncclMemAlloc", 0)

        def register(handle: int, address: int, nbytes: int, window: Any, flags: int) -> int:
            self.calls.append(("ncclCommWindowRegister", handle, nbytes, flags))
            window._obj.value = 9
            return 0

        def free(address: int) -> int:
            self.freed.set()
            return 0

        self.functions.ncclCommSplit, self.functions.ncclMemAlloc = split, allocate
        self.functions.ncclCommWindowRegister, self.functions.ncclMemFree = register, free


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes memory of the host from what `__cuda_array_interface__` says."""

    def as_tensor(memory: Any, device: str) -> torch.Tensor:
        (nbytes,) = memory.__cuda_array_interface__["shape"]
        (address, _) = memory.__cuda_array_interface__["data"]
        held = (ctypes.c_char * nbytes).from_address(address)
        held.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(held, dtype=torch.uint8)

    monkeypatch.setattr(torch, "as_tensor", as_tensor)


@pytest.mark.usefixtures("host_memory")
def test_gathers_have_a_communicator_of_their_own_that_takes_no_multiprocessor() -> None:
    """`ncclConfig_t` of version 2.28 has 80 bytes."""
    fake = Engines()
    communicator = comm(fake)
    assert communicator.allocate is not None
    memory = communicator.allocate(64)
    assert memory.tolist() == [0] * 64
    communicator.allocate(32)
    assert fake.calls == [
        ("ncclCommSplit", 77, 0, 1, 80, 22809, 2),
        *[("ncclMemAlloc", 64), ("ncclCommWindowRegister", 78, 64, 1)],
        *[("ncclMemAlloc", 32), ("ncclCommWindowRegister", 78, 32, 1)],
    ]
    fake.calls.clear()
    communicator.all_gather([((64, 5, "e4m3"), (256, 10, "e4m3"))], 5)
    communicator.all_reduce(((4096, 10, "fp32"),), "sum", 5)
    communicator.check()
    assert [(name, *called[-2:]) for name, *called in fake.calls] == [
        ("ncclAllGather", 78, 5),
        ("ncclAllReduce", 77, 5),
    ]
    fake.calls.clear()
    nccl.disconnect([communicator])
    assert fake.names == ["ncclCommAbort", *["ncclCommWindowDeregister"] * 2, "ncclCommAbort"]
    del memory
    assert fake.freed.wait(5), "no view of it is left"


def test_no_memory_is_asked_for_where_the_library_has_no_engines_or_ranks_are_processes() -> None:
    assert comm(Engines(22703)).allocate is None
    for processes, has_engines in ((1, True), (2, False)):
        library = nccl.Library(Engines().functions)
        (communicator,) = nccl.connect(world_of(range(1), processes, processes=processes), library, bytes(128))
        assert (communicator.allocate is not None) == has_engines


@pytest.mark.usefixtures("host_memory")
def test_kernels_gather_where_nccl_registers_no_memory() -> None:
    """GPUs that cannot reach each other's memory."""
    fake = Engines()
    fake.functions.ncclCommWindowRegister = lambda *given: 0
    communicator = comm(fake)
    assert communicator.allocate is not None
    communicator.allocate(64)
    communicator.all_gather([((64, 5, "e4m3"), (256, 10, "e4m3"))], 5)
    assert fake.calls[-1][-2:] == (77, 5)


@pytest.mark.usefixtures("host_memory")
def test_memory_that_is_not_there_is_out_of_memory() -> None:
    communicator = comm(Engines(ncclMemAlloc=1))
    assert communicator.allocate is not None
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory: 3\.00 GiB.*ncclMemAlloc: NCCL error 1"):
        communicator.allocate(3 << 30)


def test_disconnect_aborts_all_communicators() -> None:
    fake = FakeNccl()
    communicators = [comm(fake), comm(fake)]
    nccl.disconnect(communicators)
    assert fake.names == ["ncclCommAbort"] * 2


def test_the_error_for_a_missing_library_names_the_files_tried_and_the_remedy() -> None:
    def nowhere() -> Iterator[tuple[str, int]]:
        yield "libnccl-that-is-not-here.so.2", ctypes.DEFAULT_MODE

    with pytest.raises(
        ConfigError, match=r"needs NCCL.*libnccl-that-is-not-here\.so\.2.*Install a CUDA build of torch.*gpus: 1"
    ):
        nccl.load(nowhere())


def test_a_library_without_the_functions_of_nccl_is_not_used() -> None:
    def another() -> Iterator[tuple[str, int]]:
        yield "libc.so.6", ctypes.DEFAULT_MODE

    with pytest.raises(ConfigError, match=r"libc\.so\.6.*ncclGetVersion"):
        nccl.load(another())


def test_the_error_for_an_old_library_has_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: FakeNccl(version=21005).functions)
    with pytest.raises(ConfigError, match=r"NCCL 2\.10\.5 .* is older than 2\.18\.0"):
        nccl.load()


def test_the_loaded_library_is_preferred_to_those_of_the_wheel_and_the_system() -> None:
    paths = [path for path, _ in nccl._candidates()]
    assert paths[0] == paths[-1] == nccl.SONAME
