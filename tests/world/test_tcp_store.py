"""The store of several processes: two of this process, and servers that are none. `kill` is tested with a launcher."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
import torch

from surogate_core.api import Store, StoreLost, tcp_store
from surogate_core.api.tcp_store import Address, TcpStore, listen
from surogate_core.errors import ConfigError


def holder(**fields: str) -> TcpStore:
    listening = listen(Address("127.0.0.1", 0))
    return TcpStore(Address("127.0.0.1", listening.getsockname()[1], **fields), 5, listening=listening)


@pytest.fixture
def stores() -> Iterator[tuple[TcpStore, TcpStore]]:
    """The store in the process that holds it, and in another."""
    held = holder()
    other = TcpStore(held.address, 5)
    yield held, other
    other.close()
    held.close()


def test_both_ends_see_the_same_values(stores: tuple[TcpStore, TcpStore]) -> None:
    for one, two in (stores, stores[::-1]):
        assert isinstance(one, Store)
        one.set("a", b"\0\xff")
        assert (two.has("a"), two.get("a", 1), two.has("b")) == (True, b"\0\xff", False)
        two.delete("a")
        two.delete("a")
        assert (one.has("a"), one.add("n", 2), two.add("n", 3), one.add("n", 0)) == (False, 2, 5, 5)
        one.delete("n")
        with pytest.raises(TimeoutError, match=r"a was not set within 0\.01 s"):
            one.get("a", 0.01)


def test_a_thread_that_waits_does_not_stop_another(stores: tuple[TcpStore, TcpStore]) -> None:
    held, other = stores
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: found.append(other.get("later", 60)))
    waiting.start()
    other.set("beat", b"1")
    assert held.get("beat", 5) == b"1" and waiting.is_alive()
    other.set("later", b"2")
    waiting.join(10)
    assert found == [b"2"]


def test_torch_gets_a_store_with_the_same_keys_and_its_own_connection(stores: tuple[TcpStore, TcpStore]) -> None:
    held, other = stores
    held.set("a", b"1")
    of_torch = other.torch_store
    assert isinstance(of_torch, torch.distributed.Store) and of_torch.get("a") == b"1"
    waiting = threading.Thread(target=of_torch.wait, args=(["b"],))
    waiting.start()
    other.set("b", b"")
    waiting.join(10)
    assert not waiting.is_alive()


def test_prefixes_keep_runs_apart_that_share_a_server() -> None:
    held = holder()
    one, two = (TcpStore(held.address, 5, prefix=prefix) for prefix in ("one", "two"))
    one.set("a", b"1")
    assert [store.has("a") for store in (one, two, held)] == [True, False, False]
    for store in (one, two, held):
        store.close()


def test_the_process_with_the_store_leaves_last() -> None:
    held = holder()
    other = TcpStore(held.address, 5)
    leaving = threading.Thread(target=held.close)
    leaving.start()
    other.set("last words", b"")
    assert leaving.is_alive()
    other.close()
    leaving.join(10)
    assert not leaving.is_alive()
    for method, *args in (("set", "a", b""), ("get", "a", 1), ("has", "a"), ("add", "a", 1), ("delete", "a")):
        with pytest.raises(StoreLost, match="the store is closed"):
            getattr(held, method)(*args)
    listen(held.address).close()  # the port is free again


def test_threads_that_still_ask_when_the_store_closes_are_told_so() -> None:
    held, told = holder(), list[str]()

    def ask() -> None:
        try:
            while True:
                held.has("a")
        except StoreLost as lost:
            told.append(str(lost))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    held.close()
    for thread in threads:
        thread.join(10)
    assert told == ["the store is closed"] * 4


def test_a_server_that_does_not_answer_is_lost_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("127.0.0.1", silent.getsockname()[1], "the process of rank 0", "Set MASTER_PORT.")
        with pytest.raises(ConfigError) as caught:
            TcpStore(address, 0.2)
    assert str(caught.value) == (
        f"{address} has not answered for 0.2 s. Does another program listen there? Set MASTER_PORT."
    )


def test_the_port_of_a_run_on_one_machine_is_not_open_to_others() -> None:
    for host, interfaces in (("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("a.example", "::")):
        with listen(Address(host, 0)) as listening:
            assert listening.getsockname()[0] in (interfaces, interfaces.replace("::", "0.0.0.0"))
