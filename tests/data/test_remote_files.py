"""Data behind URLs: fetched once for each state, read as local files, refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from surogate.config.dataset_entry import DatasetEntry
from surogate.data.readers import KINDS
from surogate.data.remote_files import fetched
from surogate.data.sources import Source, open_source
from surogate_core.errors import ConfigError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A store of files in memory, which fsspec knows as memory://."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = fsspec.filesystem("memory")
    for name in ("a/one.jsonl", "a/b/two.jsonl", "a/README.md"):
        files.pipe(f"/bucket/{name}", f'{{"text": "{name}"}}\n'.encode())
    yield files
    files.rm("/bucket", recursive=True)


def opened(url: str, **keys: Any) -> Source:
    return open_source(DatasetEntry.model_validate({"path": url, **keys}))


def texts(url: str) -> list[str]:
    return [row.values["text"] for row in opened(url).rows(["text"])]


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("memory://bucket/a/one.jsonl", ["a/one.jsonl"]),
        ("memory://bucket/a", ["a/b/two.jsonl", "a/one.jsonl"]),
        ("memory://bucket/**/*.jsonl", ["a/b/two.jsonl", "a/one.jsonl"]),
    ],
)
def test_a_url_names_a_file_a_folder_or_a_pattern(store: Any, url: str, names: list[str]) -> None:
    assert sorted(texts(url)) == names


def test_what_is_there_is_copied_once_and_again_when_it_changes(store: Any) -> None:
    lines: list[str] = []
    url = "memory://bucket/a/one.jsonl"
    first, second = (fetched(url, KINDS, "datasets.0", lines.append) for _ in range(2))
    assert first == second and Path(first).name == "one.jsonl" and lines == [f"datasets.0: copying 1 file of {url}"]
    store.pipe("/bucket/a/one.jsonl", b'{"text": "changed"}\n')
    assert texts(url) == ["changed"] and Path(first).read_text() != '{"text": "changed"}\n'


def test_a_url_of_this_machine_is_a_file(store: Any, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "here"}\n')
    assert texts(f"file://{tmp_path}/rows.jsonl") == ["here"]


@pytest.mark.parametrize(
    ("url", "keys", "message"),
    [
        (
            "memory://bucket/none.jsonl",
            {},
            r"datasets: path: memory://bucket/none.jsonl: does not exist\. Check the URL",
        ),
        ("memory://bucket/*.parquet", {}, "names no file that is one of .txt"),
        ("memory://bucket/a/README.md", {}, "README.md is none of .txt"),
        ("memory://bucket/a/one.jsonl", {"split": "test"}, "split: test is for Hub datasets, but .* is a URL"),
        ("gopher://host/a.jsonl", {}, "Protocol not known: gopher.*Check the URL"),
    ],
)
def test_a_url_that_cannot_be_read_is_refused(store: Any, url: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        opened(url, **keys)


def test_a_package_that_is_missing_is_named(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def url_to_fs(url: str) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", url_to_fs)
    with pytest.raises(ConfigError, match=r"path: s3://b/a.jsonl: Install s3fs to access S3\. Install it, or download"):
        opened("s3://b/a.jsonl")
