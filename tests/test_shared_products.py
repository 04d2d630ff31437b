"""`selecting`: compiled modules that use the shared matrix products exchange the algorithms that they select."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any, cast

import pytest

from surogate_core.api import Op, Target, Value
from surogate_core.api import cublaslt as shared
from surogate_core.api.cublaslt import explaining, selecting
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import DEVICES


class Module(ModuleType):
    """A compiled module whose products select `<name>'s choice` for a key that it does not know."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.known: dict[str, str] = {}
        self.imports = 0

    def select(self, key: str) -> str:
        return self.known.setdefault(key, f"{self.__name__}'s choice")

    def gemm_count(self) -> int:
        return len(self.known)

    def gemm_export(self) -> list[tuple[str, str]]:
        return list(self.known.items())

    def gemm_import(self, choices: list[tuple[str, str]]) -> None:
        self.imports += 1
        self.known.update(choices)


class Run:
    """The part of a `BindContext` that `selecting` uses: a run with a cache of `entries`."""

    def __init__(self, entries: Mapping[str, str] | None = None, deterministic: str = "auto") -> None:
        self.entries = dict(entries or {})
        self.target = Target(DEVICES["h200"], cast(Any, deterministic))
        self.attached: dict[str, Callable[[], Mapping[str, str]]] = {}

    def autotune_cache(self, name: str, load: Callable[..., None], dump: Callable[[], Mapping[str, str]]) -> None:
        if name not in self.attached:
            load(self.entries)
            self.attached[name] = dump

    def saved(self) -> Mapping[str, str]:
        return self.attached["products"]()


@pytest.fixture(autouse=True)
def nothing_selected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared, "_selected", {})
    monkeypatch.setattr(shared, "_exported", {})
    yield


def select(run: Run, module: Module, key: str) -> str:
    with selecting(cast(Any, run), module):
        return module.select(key)


def test_equal_products_of_two_modules_use_one_algorithm() -> None:
    """They are cached under one key: otherwise the second run would use for both what the first used for one."""
    run, a, b = Run(), Module("a"), Module("b")
    assert select(run, a, "x") == select(run, b, "x") == "a's choice"
    assert select(run, b, "y") == select(run, a, "y") == "b's choice"
    assert run.saved() == {"x": "a's choice", "y": "b's choice"}
    assert set(run.attached) == {"products"}


def test_algorithms_of_earlier_runs_are_used_by_every_module() -> None:
    run, a, b = Run({"x": "saved"}), Module("a"), Module("b")
    assert {select(run, a, "x"), select(run, b, "x")} == {"saved"}
    assert select(run, a, "y") == "a's choice"
    assert run.saved() == {"x": "saved", "y": "a's choice"}


def test_the_cache_of_a_second_run_replaces_what_the_first_selected() -> None:
    a = Module("a")
    assert select(Run(), a, "x") == "a's choice"
    assert select(Run({"x": "saved"}), a, "x") == "saved"


def test_an_algorithm_that_a_module_lost_is_given_to_it_again() -> None:
    """A run with `deterministic: true` in the same process replaces timed algorithms."""
    run, a = Run({"x": "saved"}), Module("a")
    select(run, a, "x")
    a.known.clear()
    assert select(run, a, "x") == "saved"


def test_a_module_is_told_only_what_it_does_not_know() -> None:
    run, a, b = Run({"x": "saved"}), Module("a"), Module("b")
    for key in ("x", "y", "y", "x"):
        select(run, a, key)
    assert a.imports == 1
    select(run, b, "y")
    assert (a.imports, b.imports) == (1, 1)


def test_products_that_are_not_timed_share_nothing() -> None:
    run, a = Run({"x": "saved"}, deterministic="true"), Module("a")
    assert select(run, a, "x") == "a's choice"
    assert not run.attached and not a.imports


def test_only_one_module_times_at_a_time() -> None:
    """Their measurements would disturb each other."""
    run, order = Run(), []
    inside, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with selecting(cast(Any, run), Module("a")):
            inside.set()
            may_leave.wait(10)
            order.append("a")

    def second() -> None:
        inside.wait(10)
        threading.Timer(0.05, may_leave.set).start()
        with selecting(cast(Any, run), Module("b")):
            order.append("b")

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["a", "b"]


def test_a_product_that_no_algorithm_serves_is_refused_with_the_remedy() -> None:
    a, b, out = (Value(name, (16, 32), "e2m1", "act") for name in ("a", "b", "out"))
    op, run = Op("acme_linear", (a, b), (out,)), cast(Any, Run())
    message = r"refuses acme_linear of e2m1 \[16, 32\] and .* on NVIDIA H200 \(no algorithm for x\)\. .* recipe: bf16"
    with pytest.raises(ConfigError, match=message), explaining(run, op, a, b):
        raise RuntimeError("no algorithm for x")
    with pytest.raises(RuntimeError, match="out of memory"), explaining(run, op, a, b):
        raise RuntimeError("out of memory")
