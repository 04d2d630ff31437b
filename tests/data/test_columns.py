"""The content of a table's row becomes tokens, or is reported as left out with its count, before training."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from chat_formats import QWEN25, chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surogate.config.dataset_entry import DatasetEntry
from surogate.config.schema import TrainConfig
from surogate.data import corpora
from surogate.data.columns import Columns, unused_columns
from surogate.data.corpora import load_corpora
from surogate.data.loader import Loader
from surogate.data.row import Row
from surogate.data.sources import FileSource, count_columns
from surogate.data.tokenizer import Tokenizer
from surogate_core.api.proven_file import DamagedFile
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry

FORMATS = load_registry().dataset_formats()
KINDS = ("jsonl", "json", "parquet", "csv")
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

Table = list[dict[str, Any]]


@pytest.fixture
def chat(tmp_path: Path) -> Tokenizer:
    return chat_tokenizer(tmp_path / "model", QWEN25)


def write(table: Table, path: Path) -> Path:
    """Write the rows as a file of the suffix's kind. CSV has null as an empty cell and nested values as JSON."""
    columns = list(dict.fromkeys(name for row in table for name in row))
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    elif path.suffix == ".json":
        path.write_text(json.dumps(table))
    elif path.suffix == ".parquet":
        cells = {name: pa.array([row.get(name) for row in table]) for name in columns}
        pa.parquet.write_table(pa.table(cells), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows([[_csv_cell(row.get(name)) for name in columns] for row in table])
    return path


def _csv_cell(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def train_on(path: Path, tokenizer: Tokenizer, type: str = "auto", **options: Any) -> tuple[list[str], list[str]]:
    """Return (the text of every document, the notices) of a run on one file."""
    config = TrainConfig(
        model=str(tokenizer.directory),
        datasets=[DatasetEntry(path=str(path), type=type, options=options)],
        validation_split_ratio=0,
        sequence_len=4096,
    )
    notices: list[str] = []
    data = load_corpora(config, FORMATS, tokenizer.directory, tokenizer.vocab_size, notices.append)
    (dataset,) = data.train.corpus.datasets
    pairs = zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True)
    return [tokenizer.decode(dataset.tokens[start:stop].tolist()) for start, stop in pairs], notices


def said(text: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


# ----------------------------------------------------------------------------------------------------- type: auto


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_auto_uses_a_column_that_only_a_later_row_has(kind: str, tmp_path: Path, chat: Tokenizer) -> None:
    rows: Table = [{"messages": said("1 + 1?", "Two.")}, {"messages": said("1 + 2?", "Three."), "tools": [TOOL]}]
    texts, _ = train_on(write(rows, tmp_path / f"a.{kind}"), chat)
    turned, _ = train_on(write(rows[::-1], tmp_path / f"b.{kind}"), chat)
    assert texts == turned[::-1]
    assert '"name": "add"' not in texts[0] and '"name": "add"' in texts[1]


def test_auto_says_that_there_are_no_rows(tmp_path: Path, chat: Tokenizer) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(ConfigError, match=r"a\.parquet: contains no rows"):
        train_on(path, chat)


def test_auto_refuses_rows_of_two_types_in_either_order(tmp_path: Path, chat: Tokenizer) -> None:
    rows: Table = [{"text": "a"}, {"messages": said("b", "c")}]
    for name, table in {"a": rows, "b": rows[::-1]}.items():
        with pytest.raises(ConfigError, match="columns messages, text fit these types: text, conversation"):
            train_on(write(table, tmp_path / f"{name}.jsonl"), chat)


def test_auto_ignores_columns_that_are_empty_in_every_row(tmp_path: Path, chat: Tokenizer) -> None:
    rows: Table = [{"instruction": None, "question": "Who?", "answer": "Me."}]
    texts, notices = train_on(write(rows, tmp_path / "a.parquet"), chat)
    assert "Who?" in texts[0] and notices == []


# -------------------------------------------------------------------------------------------------------- notices


def test_columns_that_are_not_used_are_counted_in_one_line(tmp_path: Path, chat: Tokenizer) -> None:
    rows: Table = [
        {"text": "a", "url": "x", "meta": {"id": 1}},
        {"text": "b", "url": "y", "input": ""},
        {"text": "c", "meta": None},
    ]
    for kind in KINDS:
        _, notices = train_on(write(rows, tmp_path / f"a.{kind}"), chat)
        assert notices == ["datasets.0: columns not used: url (in 2 rows), meta (in 1 row)"], kind
        assert train_on(tmp_path / f"a.{kind}", chat)[1] == notices, "from the cache"


def test_the_notice_names_the_key_that_would_read_a_column(tmp_path: Path, chat: Tokenizer) -> None:
    path = write([{"instruction": "Add.", "input": "1 2", "output": "3"}], tmp_path / "a.jsonl")
    _, notices = train_on(path, chat, type="instruction")
    assert notices == ["datasets.0: columns not used: input (in 1 row; input_field: input reads it)"]
    path = write([{"messages": said("a", "b"), "tools": [TOOL]}], tmp_path / "b.jsonl")
    _, notices = train_on(path, chat, type="conversation", tools_field=None)
    assert notices == ["datasets.0: columns not used: tools (in 1 row; tools_field: tools reads it)"]


def test_the_notice_names_another_type_that_would_read_a_column(tmp_path: Path, chat: Tokenizer) -> None:
    rows: Table = [
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": "c", "completion": "d", "label": False},
    ]
    _, notices = train_on(write(rows, tmp_path / "a.jsonl"), chat)
    (line,) = notices
    assert "columns not used: label (in 2 rows; type: labelled reads it, " in line and "for loss: kto" in line
    rows = [{key: value for key, value in row.items() if key != "completion"} | {"output": "x"} for row in rows]
    _, notices = train_on(write(rows, tmp_path / "b.jsonl"), chat, type="instruction", instruction_field="prompt")
    assert notices == ["datasets.0: columns not used: label (in 2 rows)"], "labelled rows have a completion too"


def test_empty_rows_are_counted(tmp_path: Path, chat: Tokenizer) -> None:
    path = write([{"text": "a"}, {"text": ""}, {"text": ""}], tmp_path / "a.jsonl")
    assert train_on(path, chat)[1] == train_on(path, chat)[1] == ["datasets.0: 2 of 3 rows are empty and left out"]


def test_many_unused_columns_are_reported_in_one_short_line() -> None:
    columns = Columns()
    columns.add_row(Row("a", {"text": "x", **{f"c{i}": i for i in range(1000)}}, 1))
    printed = unused_columns(columns, ["text"], {})
    assert printed is not None and printed.endswith("and 990 more") and len(printed) < 300
    columns = Columns()
    columns.add_row(Row("a", {"": 1, "\x1b[2J\n": 1, "\ud800": 1, "x" * 1000: 1}, 2))
    printed = unused_columns(columns, [], {})
    assert printed is not None and printed.isprintable() and len(printed) < 300
    assert "'' (in 1 row)" in printed and "'\\x1b[2J\\n' (in 1 row)" in printed and "'\\ud800' (in 1 row)" in printed


def test_an_optional_column_that_no_row_has_is_refused(tmp_path: Path, chat: Tokenizer) -> None:
    for kind in KINDS:
        path = write([{"instruction": "a", "input": "b", "output": "c"}], tmp_path / f"a.{kind}")
        with pytest.raises(ConfigError, match=r"datasets\.0: path: .*: no column 'inputs'\. Available: instruction"):
            train_on(path, chat, type="instruction", input_field="inputs")


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_missing_required_column_names_its_row(kind: str, tmp_path: Path, chat: Tokenizer) -> None:
    rows: Table = [{"instruction": "a", "output": "b"}, {"instruction": "c"}, {"instruction": "a", "output": "b"}]
    where = {"jsonl": r"a\.jsonl:2", "json": r"a\.json\[1\]"}[kind]
    with pytest.raises(ConfigError, match=rf"{where}: no column 'output'\. Available: instruction"):
        train_on(write(rows, tmp_path / f"a.{kind}"), chat)


def test_null_in_a_required_column_names_its_row(tmp_path: Path, chat: Tokenizer) -> None:
    for kind in ("jsonl", "parquet"):
        path = write(
            [{"instruction": "a", "output": "b"}, {"instruction": None, "output": "b"}], tmp_path / f"a.{kind}"
        )
        with pytest.raises(ConfigError, match=r"(:2|row 1): column 'instruction' holds null"):
            train_on(path, chat)


def test_a_tokenizer_that_is_larger_than_the_model_in_transformers_is_reported(tmp_path: Path, chat: Tokenizer) -> None:
    (chat.directory / "added_tokens.json").write_text('{"<late>": 5000}')
    config = TrainConfig(
        model="m",
        datasets=[DatasetEntry(path=str(write([{"text": "a"}], tmp_path / "a.jsonl")), type="text")],
        validation_split_ratio=0,
        sequence_len=8,
    )
    notices: list[str] = []
    load_corpora(config, FORMATS, chat.directory, chat.vocab_size, notices.append)
    (printed,) = notices
    assert f"{chat.vocab_size + 1:,} tokens in transformers, the model only {chat.vocab_size:,}" in printed
    assert "<late>" in printed and "tokenizer.json lacks" in printed
    load_corpora(config, FORMATS, chat.directory, chat.vocab_size + 1, notices.append)
    assert len(notices) == 1


# ------------------------------------------------------------------------------------------------------- counting


def test_columns_are_counted_once_and_then_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FileSource((write([{"text": "a"}, {"text": "b", "x": 1}], tmp_path / "a.jsonl"),), "document", None)
    first = count_columns(source, tmp_path / "cache")
    assert first == Columns(2, {"text": 2, "x": 1})
    (known,) = (tmp_path / "cache/columns").iterdir()
    whole, notices = known.read_text(), list[str]()
    flipped = whole.replace('"x": 1', '"p": 1')  # would say that the user's rows lack a column
    unproven = whole.replace("xxh3_128", "hash")
    for damaged in ("", "[]", '{"version": 0}', '{"version": 1, "rows": 2, "filled": 3}', flipped, unproven):
        known.write_text(damaged)
        assert count_columns(source, tmp_path / "cache", notices.append) == first
        assert f"columns of the data are damaged and will be counted again: {known}: " in notices.pop()
    monkeypatch.setattr(FileSource, "count_columns", None)
    assert count_columns(source, tmp_path / "cache", notices.append) == first and not notices


def test_only_the_rows_of_samples_are_counted(tmp_path: Path) -> None:
    rows: Table = [{"text": "a", "x": 1}, {"text": "b", "x": None}, {"text": "c", "x": 1}, {"text": "d", "x": 1}]
    for kind in KINDS:
        path = write(rows, tmp_path / f"a.{kind}")
        assert FileSource((path, path), "document", 3).count_columns() == Columns(3, {"text": 3, "x": 2})
        assert FileSource((path, path), "document", 5).count_columns() == Columns(5, {"text": 5, "x": 4})


def test_hub_datasets_are_counted_by_their_arrow_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    from surogate.data.sources import HubSource

    rows: Table = [{"text": "a", "meta": {"x": None}}, {"text": "", "meta": {"x": 1}}, {"text": None, "meta": None}]
    table = datasets.Dataset.from_list(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *given, **keys: table)
    assert HubSource("owner/name", None, "train", None, "").count_columns() == Columns(3, {"text": 1, "meta": 1})
    assert HubSource("owner/name", None, "train", 1, "").count_columns() == Columns(1, {"text": 1, "meta": 0})


def test_an_unwritable_cache_is_named(tmp_path: Path, chat: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(corpora, "default_cache_root", lambda: tmp_path / "file")
    with pytest.raises(ConfigError, match="Set XDG_CACHE_HOME"):
        train_on(write([{"text": "a"}], tmp_path / "a.jsonl"), chat)


# ----------------------------------------------------------------------------------------------------- any table

WORDS = st.text("abcdefghij", min_size=1, max_size=6)
CELLS = st.none() | st.just("") | WORDS
EXTRA = st.one_of(
    st.none(),
    WORDS,
    st.integers(0, 99),
    st.lists(WORDS, max_size=2),
    st.fixed_dictionaries({}, optional={"a": st.none() | WORDS, "b": st.none() | WORDS}),
)
EXTRA_NAMES = ("url", "meta", "n", "tags", "data")
USED: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "instruction": ("instruction", "output", "input", "sys"),
    "conversation": ("messages", "sys", "tools"),
}
OPTIONS: Mapping[str, dict[str, Any]] = {
    "text": {},
    "instruction": {"input_field": "input", "system_prompt_field": "sys"},
    "conversation": {"system_field": "sys", "tools_field": "tools"},
}


@st.composite
def rows_of(draw: st.DrawFn, kind: str) -> Table:
    """Rows of one dataset type. Each extra column has one type, as parquet requires; each value has its own marker."""
    extra = {name: draw(st.sampled_from(("text", "list", "object"))) for name in EXTRA_NAMES if draw(st.booleans())}
    table: Table = []
    for number in range(draw(st.integers(1, 5))):
        mark = _marker(number)
        row: dict[str, Any] = _required(kind, draw, mark)
        for name in USED[kind]:
            if name in ("sys", "input") and draw(st.booleans()):
                row[name] = draw(st.none() | st.just("") | st.just(mark(name)))
            if name == "tools" and draw(st.booleans()):
                row[name] = draw(st.none() | st.just([]) | st.just([_tool(mark(name))]))
        for name, shape in extra.items():
            if draw(st.booleans()):
                made = {"text": mark(name), "list": [mark(name)], "object": {"a": mark(name), "b": None}}[shape]
                row[name] = draw(st.none() | st.just(made))
        names = draw(st.permutations(list(row)))
        table.append({name: row[name] for name in names})
    return table


def _marker(number: int) -> Callable[[str], str]:
    return lambda name: f"<{name}{number}>"


def _tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def _required(kind: str, draw: st.DrawFn, mark: Callable[[str], str]) -> dict[str, Any]:
    if kind == "text":
        return {"text": draw(st.sampled_from(["", mark("text")]))}
    if kind == "instruction":
        return {"instruction": mark("instruction"), "output": mark("output")}
    return {"messages": said(mark("question"), mark("answer"))}


def markers(value: Any) -> set[str]:
    """Return every marker in a cell, at any depth."""
    return set(re.findall(r"<[a-z]+\d+>", json.dumps(value)))


def told_counts(notices: Sequence[str]) -> dict[str, int]:
    (line,) = [line for line in notices if "columns not used" in line] or [""]
    return {name: int(count) for name, count in re.findall(r"(\w+) \(in (\d+) rows?", line)}


@pytest.fixture(scope="module")
def shared_chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("chat") / "model", QWEN25)


@pytest.mark.parametrize("type_", list(USED))
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_content_of_a_row_is_trained_or_reported_as_left_out(
    type_: str, shared_chat: Tokenizer, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    table = data.draw(rows_of(type_))
    kind = data.draw(st.sampled_from(KINDS))
    present = {name for row in table for name in row}
    options = {key: name for key, name in OPTIONS[type_].items() if name in present}
    if type_ == "text" and not any(row["text"] for row in table):
        table[0]["text"] = "<text0>"
    shuffled = random.Random(0).sample(table, len(table))
    with TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        texts, notices = train_on(write(table, Path(folder) / f"a.{kind}"), shared_chat, type=type_, **options)
        turned, again = train_on(write(shuffled, Path(folder) / f"b.{kind}"), shared_chat, type=type_, **options)
    assert sorted(texts) == sorted(turned) and notices == again, "the order of the rows decides nothing else"

    rendered = markers(texts)
    counts = told_counts(notices)
    for name in present:
        held = [found for row in table if (found := markers(row.get(name)))]
        if name in counts:
            assert counts[name] == len(held) and name not in USED[type_], (name, notices)
        else:
            assert set().union(*held) <= rendered, (name, notices, texts)
    assert all(
        counts.get(name, 0) or name in USED[type_] for name in present if any(markers(r.get(name)) for r in table)
    )
    empty = sum(row.get("text") == "" for row in table)
    assert any(f"{empty} of {len(table)} rows are empty" in line for line in notices) == bool(empty)


# ----------------------------------------------------------------------------------------------------- damage


def test_damage_that_a_start_finds_is_made_anew_and_later_damage_ends_the_run_at_the_row(
    tmp_path: Path, chat: Tokenizer
) -> None:
    path = write([{"text": f"{n} and {n}"} for n in range(200)], tmp_path / "a.jsonl")
    config = TrainConfig(
        model=str(chat.directory),
        datasets=[DatasetEntry(path=str(path), type="text")],
        validation_split_ratio=0.1,
        sequence_len=64,
    )
    notices: list[str] = []

    def load() -> corpora.Corpora:
        return load_corpora(config, FORMATS, chat.directory, chat.vocab_size, notices.append)

    (dataset,) = load().train.corpus.datasets
    assert dataset.path is not None
    file = dataset.path / "tokens.bin"
    whole = file.read_bytes()
    flipped = bytes([*whole[:-9], whole[-9] ^ 1, *whole[-8:]])
    file.write_bytes(flipped)
    assert load().train.n_tokens and file.read_bytes() == whole
    assert [f"will be rebuilt: {file}: bytes 0" in line for line in notices if "damaged" in line] == [True]

    config = config.model_copy(update={"validation_split_ratio": 0})  # no start reads all of its tokens
    notices.clear()
    data = load()
    (dataset,) = data.train.corpus.datasets
    tokens = dataset.proofs["tokens.bin"]
    tokens._left[:] = tokens._any_left = True  # as if no piece had been read
    file.write_bytes(flipped)
    loader = Loader(data.train, 2, 1, 1)
    with pytest.raises(
        DamagedFile, match=r"tokens.bin: bytes 0 to .*hash mismatch.*Start again: the cache is made anew"
    ):
        loader.step(0)
    assert load().train.n_tokens and file.read_bytes() == whole and "will be rebuilt" in notices[0]
