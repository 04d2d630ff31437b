"""Selected algorithms are cached per GPU model, the first selection stays, and unusable files are reported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest

from surogate.machine.autotune_cache import AutotuneCache, add_entries, read_entries
from surogate.machine.cache_home import device_file


def silent(line: str) -> None:
    raise AssertionError(line)


def test_each_gpu_model_has_its_own_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "surogate/autotune/lib/nvidia-h100-80gb-hbm3.json"
    assert device_file("autotune/lib", "NVIDIA H100 80GB HBM3") == path


def test_a_run_loads_once_what_earlier_runs_dumped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded: list[Mapping[str, str]] = []
    for selected in ({"a": "1"}, {"a": "other", "b": "2"}, {}):
        cache = AutotuneCache("GPU", silent)
        cache.attach("lib", loaded.append, lambda selected=selected: selected)  # type: ignore[misc]
        cache.attach("lib", loaded.append, lambda: {"never": "called"})
        cache.save()
    assert loaded == [{}, {"a": "1"}, {"a": "1", "b": "2"}]


def test_existing_entries_are_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    assert read_entries(path, silent) == {}
    add_entries(path, {"a": "1", "b": "2"}, silent)
    add_entries(path, {"b": "other", "c": "3"}, silent)
    assert read_entries(path, silent) == {"a": "1", "b": "2", "c": "3"}
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


def test_every_rank_waits_until_the_entries_are_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache, loading, proceed, loaded = AutotuneCache("GPU", silent), Event(), Event(), Event()

    def slow_load(entries: Mapping[str, str]) -> None:
        loading.set()
        assert proceed.wait(10)
        loaded.set()

    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(cache.attach, "lib", slow_load, dict)
        assert loading.wait(10)
        second = ranks.submit(lambda: (cache.attach("lib", slow_load, dict), loaded.is_set())[1])
        assert not wait([second], timeout=0.2).done
        proceed.set()
        assert second.result(10) and first.result(10) is None


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"a": 1})])
def test_a_damaged_file_is_named_and_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(content)
    notices: list[str] = []
    assert read_entries(path, notices.append) == {}
    assert len(notices) == 1 and str(path) in notices[0]
    add_entries(path, {"a": "1"}, silent)
    assert read_entries(path, silent) == {"a": "1"}


def test_a_flipped_bit_selects_no_algorithm_and_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path, notices = tmp_path / "gpu.json", list[str]()
    add_entries(path, {"a": "1"}, silent)
    path.write_text(path.read_text().replace('"a": "1"', '"a": "3"'))
    assert read_entries(path, notices.append) == {} and "hash mismatch" in notices[0]
    path.write_text('{"a": "1"}')
    assert read_entries(path, notices.append) == {"a": "1"} and len(notices) == 1
    add_entries(path, {"b": "2"}, silent)
    assert read_entries(path, silent) == {"a": "1", "b": "2"}


def test_an_unwritable_folder_gives_a_notice_instead_of_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    notices: list[str] = []
    add_entries(tmp_path / "file" / "gpu.json", {"a": "1"}, notices.append)
    assert len(notices) == 1 and "XDG_CACHE_HOME" in notices[0]
