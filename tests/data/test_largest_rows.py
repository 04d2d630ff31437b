"""A row or document that is too large is refused by file, place, size and key, before it is in memory."""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from surogate.config.dataset_entry import DatasetEntry
from surogate.data import parquet
from surogate.data.row import Row
from surogate.data.sources import open_source
from surogate_core.errors import ConfigError

LONG = "x" * 5000
MIB = 1 << 20


def rows_of(path: Path, sample_by: str = "document", **keys: object) -> list[Row]:
    entry = DatasetEntry.model_validate(
        {"path": str(path), "max_row_bytes": "4096B", "max_document_bytes": "4096B"} | keys
    )
    return list(open_source(entry, sample_by).rows(["text"]))


def zipped(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode()))


FILES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "a.jsonl": (
        lambda path: path.write_text('{"text": "a"}\n' + json.dumps({"text": LONG})),
        "document",
        "a.jsonl:2: the row",
    ),
    "a.jsonl.gz": (lambda path: zipped(path, json.dumps({"text": LONG})), "document", "a.jsonl.gz:1: the row"),
    "a.json": (
        lambda path: path.write_text(json.dumps([{"text": "a"}, {"text": LONG}])),
        "document",
        r"a.json\[1\]: the row",
    ),
    "a.csv": (lambda path: path.write_text(f'text\na\n"{LONG}"\n'), "document", "a.csv:3: the row"),
    "b.csv": (lambda path: path.write_text('text\na\n"' + "b\n" * 4000 + '"\n'), "document", "b.csv:2050: the row"),
    "a.txt": (lambda path: path.write_text("a\n" + LONG), "line", "a.txt:2: the row"),
    "b.txt": (lambda path: path.write_text("a\n\n" + "b\n" * 4000), "paragraph", "b.txt:3: the row"),
    "c.txt": (lambda path: path.write_text("a\n" * 4000), "document", "c.txt: the document"),
    "c.txt.gz": (lambda path: zipped(path, "a\n" * 4000), "document", "c.txt.gz: the document"),
    "a.parquet": (
        lambda path: pyarrow.parquet.write_table(pyarrow.table({"text": ["a", LONG]}), path),
        "document",
        "a.parquet row 1: the row",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_what_is_too_large_is_refused_by_its_place_and_key(name: str, tmp_path: Path) -> None:
    write, sample_by, place = FILES[name]
    write(tmp_path / name)
    key = "max_document_bytes" if "document" in place else "max_row_bytes"
    with pytest.raises(ConfigError, match=rf"{place} has more than 4,096 bytes \({key}\).*raise {key}"):
        rows_of(tmp_path / name, sample_by)
    more = {"max_row_bytes": "1MiB", "max_document_bytes": "1MiB"}
    assert rows_of(tmp_path / name, sample_by, **more)


@pytest.mark.parametrize(
    ("name", "text", "sample_by"),
    [
        ("a.jsonl", json.dumps({"text": "é" * 2030}) + "\n", "document"),
        ("a.json", json.dumps([{"text": "x" * 4000}] * 3), "document"),
        ("a.txt", "x" * 4096, "document"),
        ("b.txt", ("x" * 2000 + "\n") * 2 + "\n" + "x" * 4000, "paragraph"),
        ("c.txt", ("x" * 4095 + "\n") * 3, "line"),
    ],
)
def test_rows_up_to_the_bound_are_read(name: str, text: str, sample_by: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text.replace("\\u00e9", "é"))
    assert rows_of(tmp_path / name, sample_by)


def test_many_rows_that_are_large_together_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [str(n) * 1000 for n in range(300)]
    for size in (20, 300):
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=size)
        monkeypatch.setattr(parquet, "PARQUET_BYTES", 10_000)
        found = rows_of(tmp_path / "a.parquet")
        assert [row.values["text"] for row in found] == texts
        assert [row.number for row in found] == list(range(300))
        assert (
            max(batch.num_rows for batch in parquet.read_parquet_tables(tmp_path / "a.parquet", parquet.Largest())) < 30
        )


@pytest.mark.parametrize("name", ["bomb.jsonl.zst", "bomb.txt.zst", "bomb.json.zst", "bomb.csv.zst"])
def test_a_small_file_that_is_large_inside_takes_little_memory(name: str, tmp_path: Path) -> None:
    start = {"jsonl": b'{"text": "', "json": b'[{"text": "', "csv": b'text\n"', "txt": b""}[name.split(".")[1]]
    with pyarrow.CompressedOutputStream(str(tmp_path / name), "zstd") as file:
        file.write(start)
        for _ in range(600):
            file.write(b"x" * MIB)
    assert (tmp_path / name).stat().st_size < MIB
    program = (
        "import resource, sys\n"
        "from surogate.config.schema import DatasetEntry\n"
        "from surogate.data.sources import open_source\n"
        "from surogate_core.errors import ConfigError\n"
        "source = open_source(DatasetEntry(path=sys.argv[1], max_row_bytes='8MiB', max_document_bytes='8MiB'))\n"
        "import pyarrow\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n    list(source.rows(['text']))\n"
        "except ConfigError as error:\n    print(error)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    assert resource.getrlimit  # Linux: the kilobytes of the child are its own
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / name)], capture_output=True, text=True, check=True
    )
    *said, more = done.stdout.splitlines()
    assert "has more than 8,388,608 bytes" in said[0]
    assert int(more) < 150 * 1024
