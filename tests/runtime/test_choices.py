"""What kernels chose is kept, the first choice wins, and a file or folder that cannot be used is told of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import pytest

from surogate_core.runtime.autotune_cache import AutotuneCache, choices_path, load_choices, save_choices


def silent(line: str) -> None:
    raise AssertionError(line)


def test_a_file_for_each_kind_of_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = tmp_path / "surogate/choices/lib/nvidia-h100-80gb-hbm3.json"
    assert choices_path("lib", "NVIDIA H100 80GB HBM3") == path


def test_a_run_recalls_once_what_the_one_before_chose(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recalled: list[Mapping[str, str]] = []
    for chosen in ({"a": "1"}, {"a": "other", "b": "2"}, {}):
        run = AutotuneCache("GPU", silent)
        run.keep("lib", recalled.append, lambda chosen=chosen: chosen)  # type: ignore[misc]
        run.keep("lib", recalled.append, lambda: {"never": "asked"})
        run.save()
    assert recalled == [{}, {"a": "1"}, {"a": "1", "b": "2"}]


def test_the_first_choice_wins_over_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "new" / "gpu.json"
    assert load_choices(path, silent) == {}
    save_choices(path, {"a": "1", "b": "2"}, silent)
    save_choices(path, {"b": "other", "c": "3"}, silent)
    assert load_choices(path, silent) == {"a": "1", "b": "2", "c": "3"}
    assert [p.name for p in path.parent.iterdir()] == ["gpu.json"]


def test_no_thread_goes_on_before_the_choices_are_recalled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run, recalling, proceed, recalled = AutotuneCache("GPU", silent), Event(), Event(), Event()

    def slow_recall(known: Mapping[str, str]) -> None:
        recalling.set()
        assert proceed.wait(10)
        recalled.set()

    with ThreadPoolExecutor(2) as ranks:
        first = ranks.submit(run.keep, "lib", slow_recall, dict)
        assert recalling.wait(10)
        second = ranks.submit(lambda: (run.keep("lib", slow_recall, dict), recalled.is_set())[1])
        assert not wait([second], timeout=0.2).done
        proceed.set()
        assert second.result(10) and first.result(10) is None


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"a": 1})])
def test_a_damaged_file_is_named_and_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(content)
    told: list[str] = []
    assert load_choices(path, told.append) == {}
    assert len(told) == 1 and str(path) in told[0]
    save_choices(path, {"a": "1"}, silent)
    assert load_choices(path, silent) == {"a": "1"}


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told: list[str] = []
    save_choices(tmp_path / "file" / "gpu.json", {"a": "1"}, told.append)
    assert len(told) == 1 and "XDG_CACHE_HOME" in told[0]
