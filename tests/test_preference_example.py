"""`examples/gsm8k-preferences/pairs.py`: which answers are wrong, and which questions a model never saw."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples/gsm8k-preferences"


@pytest.fixture(scope="module")
def pairs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pairs", EXAMPLE / "pairs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("answer", "judged"),
    [
        ("48+24 = 72\n#### 72", "right"),
        ("#### $1,200.50", "wrong"),
        ("#### 72.0", "right"),
        ("#### -72", "wrong"),
        ("so it is 72", "without a number"),
        ("#### 72 clips and then", "without a number"),
    ],
)
def test_an_answer_is_judged_by_the_number_in_its_last_line(pairs: ModuleType, answer: str, judged: str) -> None:
    assert pairs.judge(answer, "half of 144\n#### 72") == judged


def test_only_wrong_answers_become_pairs_and_held_out_questions_are_no_training_data(
    pairs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs.main(["prepare", str(tmp_path)])
    sets = [{row["question"] for row in pairs.read(tmp_path / f"{name}.jsonl")} for name in ("train", "heldout")]
    assert len(sets[0]) > 9 * (len(sets[1]) - 1) > 0 and not sets[0] & sets[1]
    assert json.loads((tmp_path / "model/config.json").read_text())["vocab_size"] == 1024

    def given(model: object, tokenizer: object, rows: list[dict[str, str]], arguments: object) -> list[str]:
        right = [row["answer"] for row in rows]
        return [["#### -1", answer, "none"][number % 3] for number, answer in enumerate(right)]

    monkeypatch.setattr(pairs, "answers", given)
    monkeypatch.setattr(pairs, "load", lambda model: (None, None))
    pairs.main(["sample", str(tmp_path), "--model", "none", "--samples", "3"])
    for name, questions in zip(("train", "heldout"), sets, strict=True):
        rows = pairs.read(tmp_path / f"{name}-pairs.jsonl")
        assert [row["rejected"] for row in rows] == ["#### -1"] * len(questions)
        assert {row["prompt"] for row in rows} == questions
