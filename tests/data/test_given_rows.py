"""Rows that a script gives: what is taken, the file that it becomes, and what is refused, with its row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate.config.dataset_entry import DatasetEntry
from surogate.data.given_rows import RowsCache, unread, with_paths
from surogate.data.sources import Source, open_source
from surogate_core.errors import ConfigError

ROWS: list[dict[str, Any]] = [{"text": f"row {number}", "n": number} for number in range(5)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/surogate/rows"


def quiet(line: str) -> None:
    """Drop a line."""


def stored(given: Any, samples: int | None = None, **how: Any) -> str:
    return RowsCache(quiet, **how).store("datasets.0", given, samples)


def source(path: str | Path, where: str = "datasets.0", **keys: Any) -> Source:
    return open_source(DatasetEntry.model_validate({"path": str(path), **keys}), where=where)


def read(path: str, **keys: Any) -> list[dict[str, Any]]:
    return [dict(row.values) for row in source(path, **keys).rows(None)]


def hub(kind: str) -> Any:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list(ROWS)
    return table if kind == "table" else table.to_iterable_dataset()


@pytest.mark.parametrize(
    "given",
    [
        lambda: ROWS,
        lambda: tuple(ROWS),
        lambda: (row for row in ROWS),
        lambda: lambda: iter(ROWS),
        lambda: [row | {"n": np.int64(number)} for number, row in enumerate(ROWS)],
        partial(hub, "table"),
        partial(hub, "stream"),
    ],
    ids=["list", "tuple", "generator", "function", "numpy", "Dataset", "IterableDataset"],
)
def test_rows_of_every_form_are_one_file_with_one_name(given: Callable[[], Any], cache: Path) -> None:
    path = stored(given())
    assert read(path) == ROWS and path == stored(ROWS)
    assert [file.name for file in cache.iterdir()] == [Path(path).name]


def test_a_dataset_has_the_columns_and_the_transform_that_it_was_given() -> None:
    table = hub("table")
    assert read(stored(table.with_format("numpy", columns=["n"]))) == [{"n": row["n"]} for row in ROWS]
    upper = table.with_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    assert read(stored(upper)) == [{"text": row["text"].upper()} for row in ROWS]


def test_samples_bound_what_is_read_and_what_has_no_end_is_read_so_far() -> None:
    numbers = itertools.count()
    path = stored(({"text": str(n)} for n in numbers), 3)
    assert read(path) == [{"text": str(n)} for n in range(3)] and next(numbers) == 3
    assert read(stored(ROWS), samples=2) == ROWS[:2] == read(stored(ROWS, 2)) and read(stored(ROWS, 9)) == ROWS


def test_dates_arrays_and_nulls_are_kept_as_json_has_them() -> None:
    row = {"text": None, "when": date(2026, 1, 2), "ids": np.arange(3), "messages": [{"role": "user", "name": None}]}
    expected = row | {"when": "2026-01-02", "ids": [0, 1, 2]}
    assert read(stored([row])) == [expected]


def fails(after: int) -> Iterator[dict[str, Any]]:
    yield from ROWS[:after]
    raise ZeroDivisionError("no more")


def image() -> Any:
    return pytest.importorskip("PIL.Image").new("RGB", (2, 2))


def images() -> Any:
    datasets = pytest.importorskip("datasets")
    image()
    features = datasets.Features({"text": datasets.Value("string"), "picture": datasets.Image()})
    picture = {"bytes": b"\x89PNG", "path": None}
    return datasets.Dataset.from_dict({"text": ["a", "b"], "picture": [None, picture]}, features=features)


@pytest.mark.parametrize(
    ("given", "samples", "message"),
    [
        (lambda: iter(()), None, "tuple_iterator has no rows. An iterator can be read once: give a list"),
        (lambda: fails(2), None, r"datasets\.0 row 2: reading generator fails failed: .*no more.*Nothing is trained"),
        (lambda: iter(ROWS), 9, "row 4: list_iterator ended after 5 rows, and samples is 9. Lower samples"),
        (lambda: [*ROWS, "text"], None, r"row 5: is str, not a mapping of columns\. Give rows such as"),
        (lambda: [*ROWS, {"body": 1}], None, r"row 5: has the columns body, and the first row n, text\. Give rows of"),
        (lambda: [ROWS[0], {"text": image()}], None, "row 1: column 'text' holds an image, a sound or other bytes"),
        (images, None, r"row 1: column 'picture' holds an image, .*remove_columns\('picture'\)"),
        (lambda: [{"text": object()}], None, "row 0: column 'text' cannot be written as JSON: object is neither text"),
        (lambda: [{"text": "\ud800"}], None, "row 0: column 'text' cannot be written as JSON: .*surrogates"),
        (lambda: [{3: "a"}], None, "row 0: has a column 3, whose name is no text. Rename it"),
        (lambda: {"train": ROWS}, None, r"datasets\.0: is a mapping of train, not rows\. Give one of its values"),
        (lambda: 3.5j, None, r"is complex, which has no rows"),
    ],
    ids=["none", "raises", "ends", "text", "columns", "image", "images", "object", "utf8", "name", "splits", "number"],
)
def test_what_is_no_row_is_refused_with_its_row(
    given: Callable[[], Any], samples: int | None, message: str, cache: Path
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        stored(given(), samples)
    assert "\n" not in str(refused.value) and not list(cache.iterdir())


def test_rows_without_end_are_refused_before_the_disk_is_full() -> None:
    endless = ({"text": "again"} for _ in itertools.count())
    with pytest.raises(ConfigError, match=r"row \d+: generator has not ended after [\d,]+ bytes, .*Set samples"):
        stored(endless, room=1e-9)


def test_a_table_of_pandas_is_answered_with_what_to_write() -> None:
    table = pytest.importorskip("pandas").DataFrame(ROWS)
    with pytest.raises(ConfigError, match=r"is a table of pandas\. Give its rows: table\.to_dict\('records'\)"):
        stored(table)
    assert read(stored(table.to_dict("records"))) == ROWS


def test_messages_name_the_row_and_a_changed_or_missing_file_is_refused() -> None:
    path = Path(stored([{"text": "a"}, {"text": "b", "more": 1}]))
    given = source(path, "datasets.3")
    assert [row.where for row in given.rows(["text"])] == ["datasets.3 row 0", "datasets.3 row 1"]
    with pytest.raises(ConfigError, match=r"datasets\.3 row 0: no column 'more'\. Available: text"):
        list(given.rows(["more"]))
    assert given.count_columns().filled == {"text": 2, "more": 1}
    assert given.content_hash() != source(path, samples=1).content_hash()
    path.write_text(json.dumps({"text": "other"}))
    with pytest.raises(ConfigError, match=r"datasets\.0: path: .*\.rows: is damaged: .*run the script again"):
        source(path).content_hash()
    path.unlink()
    with pytest.raises(ConfigError, match=r"no longer in the cache\. Run the script again"):
        source(path)


def test_data_stands_for_a_path_in_each_form_in_which_entries_are_given() -> None:
    def store(where: str, given: Any, samples: int | None) -> str:
        return f"{where} {len(list(given))} {samples}"

    def entries(value: Any) -> Any:
        return with_paths({"validation_datasets": value, "model": {"a": ROWS}}, store)["validation_datasets"]

    first = "validation_datasets.0 5 None"
    assert entries(ROWS) == entries(iter(ROWS)) == entries([iter(ROWS)]) == [{"path": first}]
    mixed = [{"path": "a.jsonl"}, {"path": ROWS, "type": "text", "weight": 2, "samples": 4}, iter(ROWS)]
    assert entries(mixed) == [
        {"path": "a.jsonl"},
        {"path": "validation_datasets.1 5 4", "type": "text", "weight": 2, "samples": 4},
        {"path": "validation_datasets.2 5 None"},
    ]
    assert entries(Path("a.jsonl")) == entries([Path("a.jsonl")]) == ["a.jsonl"]
    assert entries([iter(ROWS), "a.jsonl"]) == [{"path": first}, "a.jsonl"]
    for other in ([], None, "a.jsonl", {"path": "a"}, [{"path": Path("a")}]):
        assert entries(other) == other
    given = iter(ROWS)
    assert with_paths({"datasets": given}, unread)["datasets"] == [{"path": "data in memory"}]
    assert next(given) == ROWS[0]
