"""Arguments of tool calls are objects, in every form that a file has them; what is none is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_formats import QWEN25, chat_tokenizer

from surogate.data.readers import read_file
from surogate.data.tokenizer import Tokenizer
from surogate.run import load, tokenize_row
from surogate_core.api import ConfigError

USER, RESULT = {"role": "user", "content": "Stop the clock."}, {"role": "tool", "content": "stopped"}
DONE = {"role": "assistant", "content": "Done."}


def messages(function: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "stop", **function}}
    return [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, RESULT, DONE]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("model") / "model", QWEN25)


def trained(path: Path, model: Tokenizer) -> str:
    entry = {"path": str(path), "type": "conversation"}
    place = f"{path.name}:1" if path.suffix == ".jsonl" else f"{path.name} row 0"
    (found,) = tokenize_row(load({"model": str(model.directory), "datasets": [entry]}), place).documents
    return model.decode([token for token, on in zip(found.tokens, found.trained, strict=True) if on])


@pytest.mark.parametrize(
    "given", [{}, {"arguments": None}, {"arguments": ""}, {"arguments": " \n"}, {"arguments": "{}"}]
)
def test_no_arguments_are_an_empty_object(given: dict[str, Any], model: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages(given)}))
    assert '"arguments": {}}' in trained(path, model)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("now", r"message 1 calls 'stop' with arguments that are text \(now\), not a JSON object. Correct such rows"),
        ("{now}", r"arguments that are text \(\{now\}\), not a JSON object"),
        ('"{}"', "not a JSON object"),
        ("null", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ([["city", "Oslo"]], r"arguments that are a list .*, not a JSON object"),
        (5, r"arguments that are a number \(5\), not a JSON object"),
        (False, "not a JSON object"),
        ('{"city": "Oslo", "city": "Rome"}', "with arguments: key 'city' appears twice in one object"),
        ('{"at": {"a": 1, "a": 2}}', "with arguments: key 'a' appears twice"),
    ],
)
def test_arguments_that_are_no_object_are_refused_by_row(
    given: Any, problem: str, model: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": messages({"arguments": given})}))
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: column 'messages', .*{problem}"):
        trained(path, model)


def test_a_key_twice_in_messages_that_are_json_text_is_refused(model: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": '[{"role": "user", "role": "assistant", "content": "a"}]'}))
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: key 'role' appears twice in one object"):
        trained(path, model)


def _parquet(path: Path, arguments: list[tuple[str, str]]) -> Path:
    function = pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])
    call = pa.struct([("type", pa.string()), ("function", function)])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    rows = pa.array([messages({"arguments": arguments})], type=pa.list_(message))
    pq.write_table(pa.table({"messages": rows}), path)
    return path


def test_a_map_of_a_parquet_file_is_an_object(model: Tokenizer, tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows.parquet", [("city", "Oslo")])
    assert '"arguments": {"city": "Oslo"}}' in trained(path, model)
    with pytest.raises(ConfigError, match=r"rows.parquet rows 0 to 0: a map has a key twice"):
        list(read_file(_parquet(tmp_path / "rows.parquet", [("city", "Oslo"), ("city", "Rome")]), None))
