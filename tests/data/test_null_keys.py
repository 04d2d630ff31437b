"""Keys of an entry that are null: no column, where the key takes null; the default elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate.config.load import resolved
from surogate.config.yaml import dump_yaml
from surogate.run import load, tokenize_row

MODEL = Path(__file__).parents[2] / "examples/tiny-qwen3"
SAID = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}


def text_of(row: dict[str, Any], folder: Path, **entry: Any) -> str:
    """Return the text of the first document of a row, as the command line reads the entry."""
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(row))
    loaded = load({"model": str(MODEL), "datasets": [{"path": str(path), **entry}]})
    (folder / "run.yaml").write_text(dump_yaml(resolved(loaded)))
    assert load(folder / "run.yaml").config.datasets == loaded.config.datasets
    found = tokenize_row(loaded, "rows.jsonl:1")
    return found.tokenizer.decode(found.documents[0].tokens)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "system_field": ("conversation", {"messages": SAID, "system": "UNREAD"}, {}),
    "tools_field": ("conversation", {"messages": SAID, "tools": [TOOL]}, {}),
    "input_field": ("auto", {"instruction": "a question", "input": "UNREAD", "output": "an answer"}, {}),
    "prompt_field": (
        "preference",
        {"prompt": "UNREAD", "chosen": SAID, "rejected": [SAID[0], {**SAID[1], "content": "b"}]},
        {},
    ),
}


@pytest.mark.parametrize("key", CASES)
@pytest.mark.parametrize("named", [True, False], ids=["the type is named", "auto"])
def test_a_column_whose_key_is_null_is_not_read(key: str, named: bool, tmp_path: Path) -> None:
    kind, row, keys = CASES[key]
    found = text_of(row, tmp_path, **({"type": kind} if named else {}), **{key: None}, **keys)
    assert "UNREAD" not in found and "clock" not in found and "an answer" in found


def test_answers_with_labels_may_have_their_prompt_in_the_conversation(tmp_path: Path) -> None:
    entry = {"type": "labelled", "prompt_field": None, "completion_field": "messages"}
    assert "a question" in text_of({"messages": SAID, "label": True}, tmp_path, **entry)


def test_null_is_the_default_of_a_key_that_takes_none(tmp_path: Path) -> None:
    keys = dict.fromkeys(("text_field", "sample_by", "add_bos", "samples", "split", "bad_rows"))
    assert "a text" in text_of({"text": "a text"}, tmp_path, type="text", **keys)
