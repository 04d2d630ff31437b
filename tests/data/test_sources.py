from __future__ import annotations

import bz2
import gzip
import json
import lzma
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from surogate.config.dataset_entry import DatasetEntry
from surogate.data import readers
from surogate.data.sources import open_source
from surogate_core.errors import ConfigError

TEXTS = ["one, two", "three\nfour", 'five "six" é']


def entry(path: str, **keys: Any) -> DatasetEntry:
    return DatasetEntry.model_construct(path=path, **keys)  # not validated


def read(path: Path | str, sample_by: str = "document", column: str = "text", **keys: Any) -> list[str]:
    source = open_source(entry(str(path), **keys), sample_by)
    return [row.values[column] for row in source.rows([column])]


def write_rows(path: Path, texts: list[str]) -> Path:
    rows = [{"id": i, "text": text} for i, text in enumerate(texts)]
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    elif path.suffix == ".csv":
        quoted = (text.replace('"', '""') for text in texts)
        path.write_text("id,text\n" + "".join(f'{i},"{text}"\n' for i, text in enumerate(quoted)), encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".JSONL"])
def test_every_kind_of_file_yields_the_same_rows(tmp_path: Path, suffix: str) -> None:
    assert read(write_rows(tmp_path / f"data{suffix}", TEXTS)) == TEXTS


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pyarrow.compress(content, "zstd", asbytes=True),
}


def compressed(path: Path, suffix: str) -> Path:
    """Replace a file by a compressed one of two members, as parallel tools and `cat` make them."""
    content, to = path.read_bytes(), path.with_name(path.name + suffix)
    half = len(content) // 2
    to.write_bytes(COMPRESS[suffix.lower()](content[:half]) + COMPRESS[suffix.lower()](content[half:]))
    path.unlink()
    return to


@pytest.mark.parametrize("suffix", [*COMPRESS, ".GZ"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv"])
def test_compressed_files_have_the_rows_of_their_content_at_its_lines(tmp_path: Path, kind: str, suffix: str) -> None:
    def rows() -> list[tuple[str, Any]]:
        source = open_source(entry(str(tmp_path)))
        found = list(source.rows(["text"]))
        assert [source.place(row.file, row.number) for row in found] == [row.where for row in found]
        return [(row.where, row.values) for row in found]

    paths = [write_rows(tmp_path / f"{name}{kind}", TEXTS * 100) for name in "ab"]
    plain, digest = rows(), open_source(entry(str(tmp_path))).content_hash()
    for path in paths:
        compressed(path, suffix)
    assert rows() == [(where.replace(kind, kind + suffix), values) for where, values in plain]
    assert open_source(entry(str(tmp_path))).content_hash() != digest


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_compressed_text_and_tables_are_read_by_their_keys(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a.txt").write_text("a\n\nb\n")
    assert read(compressed(tmp_path / "a.txt", suffix), "paragraph") == ["a", "b"]
    assert read(tmp_path / f"a.txt{suffix}") == ["a\n\nb\n"]
    (tmp_path / "a.tsv").write_text("id\ttext\n1\ta, b\n")
    assert read(compressed(tmp_path / "a.tsv", suffix)) == ["a, b"]


@pytest.mark.parametrize("suffix", list(COMPRESS))
def test_a_compressed_file_that_is_damaged_or_cut_off_is_named(tmp_path: Path, suffix: str) -> None:
    path = compressed(write_rows(tmp_path / "a.jsonl", TEXTS * 9), suffix)
    content = path.read_bytes()
    for damaged in (content[:-3], content[:-30], content[:5], b"hello" * 9, content[:30] + b"\0" * 9 + content[39:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"a\.jsonl\{suffix}: damaged or cut off: .*Create or download it again"):
            read(path)
    path.write_bytes(COMPRESS[suffix](b""))
    with pytest.raises(ConfigError, match=rf"a\.jsonl\{suffix}: contains no rows"):
        read(path)
    path.write_bytes(COMPRESS[suffix](b'{"text": "a"}\n{broken\n'))
    with pytest.raises(ConfigError, match=rf"a\.jsonl\{suffix}:2: not one JSON"):
        read(path)


def test_compressed_files_are_read_as_a_stream(tmp_path: Path) -> None:
    for suffix, compress in COMPRESS.items():
        path = tmp_path / f"a.jsonl{suffix}"
        path.write_bytes(compress(b'{"text": "a"}\n' * 100_000)[:-40])  # 1.4 MB
        assert read(path, samples=3) == ["a"] * 3, "the end is cut off, and was not read"


def test_json_may_have_one_object_per_line(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "data.jsonl", TEXTS).rename(tmp_path / "data.json")
    assert read(path) == TEXTS


@pytest.mark.parametrize(
    ("name", "sample_by", "last"),
    [
        ("a.jsonl", "document", "a.jsonl:3"),
        ("a.json", "document", "a.json[2]"),
        ("lines.json", "document", "lines.json:3"),
        ("a.csv", "document", "a.csv:5"),  # one has two lines
        ("a.parquet", "document", "a.parquet row 2"),
        ("a.txt", "document", "a.txt"),
        ("a.txt", "paragraph", "a.txt:3"),
        ("a.txt", "line", "a.txt:3"),
    ],
)
def test_the_place_of_a_row_follows_from_its_numbers(tmp_path: Path, name: str, sample_by: str, last: str) -> None:
    for folder in "xy":
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / name
        if name == "a.txt":
            path.write_text("one\n\nthree\n")
        else:
            write_rows(path if name != "lines.json" else path.with_suffix(".jsonl"), TEXTS).rename(path)
    source = open_source(entry(str(tmp_path)), sample_by)
    rows = list(source.rows(["text"]))
    assert [source.place(row.file, row.number) for row in rows] == [row.where for row in rows]
    assert rows[-1].where == str(tmp_path / "y" / last)


def test_json_array_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"{i} " * (i % 50) for i in range(200)]
    path = write_rows(tmp_path / "data.json", texts)
    monkeypatch.setattr(readers, "CHUNK_BYTES", 37)
    assert read(path) == texts


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    for name, content in {"a.txt": "hello", "b.jsonl": '{"text": "hello"}', "c.csv": "text\nhello\n"}.items():
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + content.encode())
        assert read(tmp_path / name) == ["hello"]


@pytest.mark.parametrize(("name", "separator"), [("a.tsv", "\t"), ("a.csv", ";"), ("a.csv", ",")])
def test_columns_are_separated_by_tabs_semicolons_or_commas(tmp_path: Path, name: str, separator: str) -> None:
    (tmp_path / name).write_text(f"id{separator}text\n1{separator}a, b\n".replace("a, b", '"a, b; c"'))
    assert read(tmp_path / name) == ["a, b; c"]


def test_csv_cells_may_exceed_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    assert read(write_rows(tmp_path / "data.csv", ["x" * 200_000])) == ["x" * 200_000]


def test_txt_is_cut_into_documents_paragraphs_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a\nb\n\n \nc\n")
    assert read(path) == ["a\nb\n\n \nc\n"]
    assert read(path, "paragraph") == ["a\nb", "c"]
    assert read(path, "line") == ["a", "b", " ", "c"]


def test_directory_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.txt", "sub/c.txt", ".hidden.txt", "README.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["a.txt", "b.txt", "sub/c.txt"]
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert read(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "sub/c.txt"]


def test_samples_uses_the_first_rows(tmp_path: Path) -> None:
    assert read(write_rows(tmp_path / "a.jsonl", TEXTS), samples=2) == TEXTS[:2]


def test_content_hash_depends_on_content_not_names(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", TEXTS)
    two = write_rows(tmp_path / "two.jsonl", TEXTS)
    first = open_source(entry(str(one))).content_hash()
    assert open_source(entry(str(two))).content_hash() == first
    assert open_source(entry(str(one), samples=1)).content_hash() != first
    write_rows(two, [*TEXTS[:-1], "other"])
    assert open_source(entry(str(two))).content_hash() != first


def test_a_row_that_lacks_an_optional_column_has_none(tmp_path: Path) -> None:
    table = [{"text": "a"}, {"text": "b", "input": "c"}, {"text": "d", "input": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    (tmp_path / "a.json").write_text(json.dumps(table))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table[:1]), tmp_path / "a.parquet")
    for suffix, inputs in {".jsonl": [None, "c", None], ".json": [None, "c", None], ".parquet": [None]}.items():
        source = open_source(entry(str(tmp_path / f"a{suffix}")))
        assert [row.values["input"] for row in source.rows(["text", "input"], ["input"])] == inputs
        with pytest.raises(ConfigError, match=r"a\.\w+(:1|\[0\])?: no column 'input'. Available: text"):
            list(source.rows(["text", "input"]))


def test_other_files_of_a_directory_are_named(tmp_path: Path) -> None:
    for name in ("a.txt", "b.zip", "README.md", ".hidden"):
        (tmp_path / name).write_text(name)
    printed = open_source(entry(str(tmp_path))).left_out()
    assert printed == (
        "files not read, since their kind is none of .txt, .jsonl, .json, .csv, .tsv, .parquet, "
        "or compressed (.gz, .bz2, .xz, .zst; not .parquet): README.md, b.zip"
    )
    assert open_source(entry(str(tmp_path / "a.txt"))).left_out() is None


def test_parquet_with_two_columns_of_one_name_is_refused(tmp_path: Path) -> None:
    arrays = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet: column 'text' appears twice"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl: the file is empty"),
        ("a.jsonl", b"\n\n", r"a\.jsonl: contains no rows"),
        ("a.json", b"[]", r"a\.json: contains no rows"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"a\.jsonl:2: not one JSON object per line"),
        ("a.jsonl", b'{"text": "a"}\n["b"]\n', r"a\.jsonl:2: holds a list"),
        ("a.jsonl", b'{"text": "a"}\n{"other": "b", "id": 1}\n', r"a\.jsonl:2: no column 'text'. Available: other"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2: not UTF-8: byte 0xff"),
        ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1: not one JSON"),
        ("a.json", b'[{"text": "a"}, {"text": ', r"a\.json: element 1 of the array"),
        ("a.json", b'[{"text": "a"}\n, 3]', r"a\.json\[1\]: holds a number \(3\), not an object"),
        ("a.jsonl", b'{"text": "a"}\nnull\n', r"a\.jsonl:2: holds null, not an object"),
        ("a.jsonl", b'{"text": %s}' % (b"1" * 5000), r"value has 5000 digits\. Correct"),
        ("a.json", b'[{"text": "\xff"}]', r"a\.json: not UTF-8"),
        ("a.json", b'{\n"text": "a"\n}', r"a\.json:1: not one JSON"),
        ("a.txt", b"abc\xff", r"a\.txt: not UTF-8: byte 0xff at offset 3"),
        ("a.jsonl", b'{"text": "a", "text": "b"}\n', r"a\.jsonl:1: key 'text' appears twice in one object"),
        ("a.jsonl", b'{"text": "a", "meta": {"x": 1, "x": 2}}\n', r"a\.jsonl:1: key 'x' appears twice"),
        ("a.json", b'[{"text": "a"}, {"text": "a", "text": "b"}]', r"a\.json\[1\]: key 'text' appears twice"),
        ("a.json", b'[{"text": "a"}]\n[{"text": "b"}]', r"a\.json: has text after its array: '\[\{"),
        ("a.csv", b"text,text\na,b\n", r"a\.csv: column 'text' appears twice"),
        ("a.csv", b"id,text\n1,a\n2,b,c\n", r"a\.csv:3: 3 cells, but the header has 2"),
        ("a.csv", b'id,text\n1,"a\n', r"a\.csv:2: not CSV"),
        ("a.csv", b"id,words\n1,a\n", r"a\.csv:2: no column 'text'. Available: id, words"),
        ("a.csv", b"id,text\n", r"a\.csv: contains no rows"),
        ("a.parquet", b"PAR1 nothing of the kind", r"a\.parquet: not parquet"),
        ("a.bin", b"abc", r"a\.bin is none of \.txt"),
    ],
)
def test_unusable_file_is_named_with_its_line(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / name)


def test_truncated_parquet_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", TEXTS)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"a\.parquet: not parquet, or damaged"):
        read(path)
    write_rows(path, TEXTS)
    content = path.read_bytes()
    pages = len(content) - 8 - int.from_bytes(content[-8:-4], "little") - 4
    path.write_bytes(content[:4] + b"\0" * pages + content[4 + pages :])  # a good footer over damaged pages
    with pytest.raises(ConfigError, match=r"a\.parquet"):
        read(path)


def test_parquet_without_the_column_names_the_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no column 'body'\. Available: id, text"):
        read(write_rows(tmp_path / "a.parquet", TEXTS), column="body")


@pytest.mark.parametrize(
    ("path", "keys", "message"),
    [
        ("missing.txt", {}, "does not exist"),
        ("some/dir/missing", {}, "does not exist"),
        ("", {}, "does not exist"),
        pytest.param("x" * 5000, {}, "does not exist", id="long"),
        ("a\0b", {}, "does not exist"),
        ("~no_such_user/a.txt", {}, "does not exist"),
        ("missing/*.jsonl", {}, "no file matches"),
        ("gopher://host/a.jsonl", {}, "path: gopher://host/a.jsonl: .*Protocol not known"),
        ("empty", {}, "contains no file that is .txt"),
        (
            "mixed",
            {},
            r'several kinds \(\.jsonl, \.txt\).*\n  - path: "mixed/\*\*/\*\.jsonl"\n  - path: "mixed/\*\*/\*\.txt"',
        ),
        ("mixed/*", {}, r'\n  - path: "FOLDER/\*\*/\*\.jsonl"'),
        ("rows.gz", {}, "rows.gz is none of .* Unpack it: gunzip -k rows.gz"),
        ("packed", {}, "rows 1.parquet.zst is none of .* Unpack it: zstd -d 'packed/rows 1.parquet.zst'"),
        ("some/rows.jsonl.gz", {}, "does not exist"),
        (
            "both",
            {},
            r'several kinds \(\.txt, \.txt\.gz\), .* rows may be the same.*\n.*\n  - path: "both/\*\*/\*\.txt\.gz"',
        ),
        ("mixed/a.txt", {"split": "test"}, "split: test is for Hub datasets"),
        ("mixed/a.txt", {"subset": "x"}, "subset: x is for Hub datasets"),
        ("mixed/b.jsonl", {"sample_by": "line"}, "sample_by: line is for .txt"),
    ],
)
def test_unusable_entry_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, keys: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "mixed", "packed", "both"):
        (tmp_path / name).mkdir()
    (tmp_path / "packed/README.md").touch()
    (tmp_path / "packed/rows 1.parquet.zst").touch()
    (tmp_path / "both/a.txt").write_text("a")
    (tmp_path / "both/a.txt.gz").write_bytes(gzip.compress(b"a"))
    (tmp_path / "mixed/a.txt").write_text("a")
    (tmp_path / "mixed/b.jsonl").write_text('{"text": "b"}')
    (tmp_path / "rows.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(ConfigError, match=message):
        read(path, **keys)


def test_hub_dataset_is_read_through_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"id": list(range(3)), "text": TEXTS})
    asked: list[Any] = []

    def load_dataset(name: str, subset: str | None, *, split: str) -> Any:
        asked.append((name, subset, split))
        return table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read("owner/name", subset="small", split="test") == TEXTS
    assert asked == [("owner/name", "small", "test")]
    assert read("owner/name", samples=2) == TEXTS[:2]
    with pytest.raises(ConfigError, match=r"owner/name\[train\]: no column 'body'. Available: id, text"):
        read("owner/name", column="body")
    source = open_source(entry("owner/name"))
    places = [(row.where, source.place(row.file, row.number)) for row in source.rows(["text"])]
    assert places == [(f"owner/name[train] row {n}",) * 2 for n in range(3)]
    first = open_source(entry("owner/name")).content_hash()
    assert open_source(entry("owner/name")).content_hash() == first
    limited = open_source(entry("owner/name", samples=2)).content_hash()
    assert limited == open_source(entry("owner/name", samples=2)).content_hash() != first


def test_hub_failure_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*arguments: Any, **keys: Any) -> Any:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match="Hub cannot be reached: unset HF_HUB_OFFLINE"):
        read("owner/name")


def test_only_hub_datasets_need_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    for suffix in (".jsonl", ".json", ".csv", ".parquet"):
        assert read(write_rows(tmp_path / f"a{suffix}", TEXTS)) == TEXTS
    with pytest.raises(ConfigError, match="pip install datasets"):
        read("owner/name")


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match="pip install pyarrow"):
        read(path)
    (tmp_path / "a.jsonl.zst").write_bytes(b"any")
    with pytest.raises(ConfigError, match=r"a\.jsonl\.zst: reading it needs pyarrow: .*Install it, or decompress"):
        read(tmp_path / "a.jsonl.zst")
