"""Damaged data files of every type and format are tokenised and checked, or refused with one error."""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import EXAMPLES
from fuzzing.mutate import both_sides, of_bytes, of_json, refused, seeds

from surogate.config.dataset_entry import DatasetEntry
from surogate.data.checks import check_rows
from surogate.data.pack import DocumentSpans, pack
from surogate.data.spans import truncate
from surogate.data.tokenize import tokenize_dataset
from surogate.data.tokenizer import Tokenizer
from surogate_core.plugins.discovery import load_registry

TEMPLATE = (
    "{% for tool in tools or [] %}<|endoftext|>{{ tool.function.name }}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|endoftext|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}"
    "<|endoftext|>{% endfor %}{% if add_generation_prompt %}<|endoftext|>assistant\n{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"a": {"type": "integer"}, "b": {"type": "text"}}},
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": f"To be, or not to be {n}", "source": "a"} for n in range(6)],
    "instruction": [{"instruction": f"Say {n}", "input": "" if n % 2 else "x", "output": f"{n}!"} for n in range(6)],
    "conversation": [
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "1 + 2?"},
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "Three."},
            ],
            "tools": [TOOL],
        },
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": []},
    ]
    * 2,
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{}, {"add_bos": False}],
    "instruction": [{}, {"input_field": "input"}, {"use_chat_template": False}, {"loss_scale": "all"}],
    "conversation": [{}, {"tools_field": "tools"}, {"loss_scale": "last_round"}],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((EXAMPLES / "tiny-qwen3" / name).read_bytes())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Tokenizer(folder)


def as_file(rows: Any, kind: str) -> bytes:
    """Encode `rows`, which may be damaged, in a file format; values it cannot hold become text."""
    if kind == "json":
        return json.dumps(rows).encode()
    lines = rows if isinstance(rows, list) else [rows]
    if kind == "jsonl":
        return "".join(json.dumps(line) + "\n" for line in lines).encode()
    tables = [line for line in lines if isinstance(line, dict)]
    columns = list(dict.fromkeys(str(key) for line in tables for key in line))
    if kind == "csv":
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows([[_cell(line.get(column)) for column in columns] for line in tables])
        return text.getvalue().encode("utf-8", "replace")
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = {}
    for column in columns:
        cells = [line.get(column) for line in tables]
        try:
            made[column] = pa.array(cells)
        except (pa.ArrowException, UnicodeEncodeError, OverflowError):
            made[column] = pa.array([_cell(cell).encode("utf-8", "replace").decode() for cell in cells])
    sink = io.BytesIO()
    try:
        pq.write_table(pa.table(made), sink)
    except (pa.ArrowException, UnicodeEncodeError):
        return json.dumps(rows).encode()
    return sink.getvalue()


def _cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def outcome(seed: int, type_: str, kind: str, tokenizer: Tokenizer, folder: Path) -> bool:
    """Return whether the case was refused."""
    choice = random.Random(f"{seed} {type_} {kind}")
    rows: Any = ROWS[type_]
    damage = choice.choice(("rows", "rows", "bytes", "both"))
    if damage != "bytes":
        rows = of_json(rows, choice)
    data = as_file(rows, kind)
    path = folder / f"data.{kind}"
    path.write_bytes(of_bytes(data, choice) if damage != "rows" else data)
    chosen = load_registry().dataset_formats()[type_]
    options = chosen.options(**choice.choice(OPTIONS[type_]))

    def tokenise() -> None:
        entry = DatasetEntry(path=str(path), type=type_)
        dataset = tokenize_dataset(entry, chosen, options, tokenizer, folder / "cache", notice=lambda line: None)
        spans = truncate(DocumentSpans.of([dataset]), 64, chosen.truncation, "datasets.0", lambda line: None)
        check_rows(pack(spans, 64), 2048)

    return refused(seed, tokenise)


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
@pytest.mark.parametrize("type_", list(ROWS))
def test_damaged_data_is_tokenised_or_refused(type_: str, kind: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    both_sides([outcome(seed, type_, kind, tokenizer, tmp_path) for seed in seeds(40)])


@pytest.mark.slow
@pytest.mark.parametrize("type_", list(ROWS))
def test_many_damaged_data_files_are_tokenised_or_refused(type_: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    kinds = ("jsonl", "json", "csv", "parquet")
    both_sides([outcome(seed, type_, kinds[seed % 4], tokenizer, tmp_path) for seed in seeds(500)])
