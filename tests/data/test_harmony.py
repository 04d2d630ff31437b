"""The published template of gpt-oss: channels, tool calls with an end of their own, and a date fixed per run."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_formats import published_tokenizer

from surogate.config.load import LoadedConfig
from surogate.config.schema import TrainConfig
from surogate.data.chat.conversation import ConversationOptions, encode_conversation
from surogate.data.chat.fixed_date import DayOfRendering
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.chat.template import ChatTemplate
from surogate.data.chat.token_spans import marked
from surogate.data.tokenizer import asks_for_date
from surogate.run import load, tokenize_row
from surogate.training.template_date import date_line, dated
from surogate_core.api import ConfigError, Encoded

DAY = datetime.date(2025, 8, 5)
CLOCK = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Oslo"}}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "The time of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASKED = [
    {"role": "user", "content": "Time in Oslo?"},
    {"role": "assistant", "content": "", "thinking": "I ask.", "tool_calls": [CLOCK]},
]
THOUGHT = [{"role": "user", "content": "Two?"}, {"role": "assistant", "content": "2", "thinking": "1 + 1"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_tokenizer(tmp_path_factory.mktemp("harmony") / "model", "gpt-oss").directory


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> RowTokenizer:
    return RowTokenizer(folder, day=DAY)


def encoded(tokenizer: RowTokenizer, messages: list[dict[str, Any]], **row: Any) -> Encoded:
    return encode_conversation({"messages": messages, **row}, tokenizer, ConversationOptions())


def shown(tokenizer: RowTokenizer, messages: list[dict[str, Any]], **row: Any) -> str:
    return marked(encoded(tokenizer, messages, **row), tokenizer, chars=4000)


# ------------------------------------------------------------------------------------------------------------ channels


def test_the_last_answer_is_trained_with_its_analysis_and_ends_with_return(tokenizer: RowTokenizer) -> None:
    end = "<|start|>assistant[[<|channel|>analysis<|message|>1 + 1<|end|><|start|>assistant<|channel|>final<|message|>2"
    assert shown(tokenizer, THOUGHT).endswith(f"{end}<|return|>]]")


def test_analysis_of_earlier_answers_is_left_out_as_at_inference(tokenizer: RowTokenizer) -> None:
    found = encoded(tokenizer, [*THOUGHT, *THOUGHT])
    text = marked(found, tokenizer, chars=4000)
    assert "<|start|>assistant<|channel|>final<|message|>2<|end|>" in text and text.count("1 + 1") == 1 == text.count(
        "[["
    )
    assert any(one.count for one in found.omissions), "the user is told"


def test_tool_calls_end_with_call_and_results_follow(tokenizer: RowTokenizer) -> None:
    call = 'assistant to=functions.clock<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>]]'
    alone = shown(tokenizer, ASKED, tools=[TOOL])
    assert alone.endswith(f"<|start|>assistant[[<|channel|>analysis<|message|>I ask.<|end|><|start|>{call}")
    assert "namespace functions" in alone and "type clock = (_: {" in alone
    answer = [{"role": "tool", "content": "noon"}, {"role": "assistant", "content": "Noon."}]
    both = shown(tokenizer, [*ASKED, *answer], tools=[TOOL])
    assert both.endswith("<|start|>assistant[[<|channel|>final<|message|>Noon.<|return|>]]")
    assert f"<|start|>assistant[[{call.removeprefix('assistant')}<|start|>functions.clock to=assistant" in both


def test_the_effort_of_reasoning_is_a_variable(tokenizer: RowTokenizer) -> None:
    options = ConversationOptions(chat_template_kwargs={"reasoning_effort": "high"})  # type: ignore[call-arg]
    found = encode_conversation({"messages": THOUGHT}, tokenizer, options)
    assert "Reasoning: high" in marked(found, tokenizer, chars=4000)


# ---------------------------------------------------------------------------------------------------------------- date


def test_every_rendering_has_the_date_that_was_given(tokenizer: RowTokenizer, folder: Path) -> None:
    assert "Current date: 2025-08-05" in shown(tokenizer, THOUGHT)
    with_variables = ConversationOptions(chat_template_kwargs={"reasoning_effort": "low"})  # type: ignore[call-arg]
    found = encode_conversation({"messages": THOUGHT}, tokenizer, with_variables)
    assert "Current date: 2025-08-05" in marked(found, tokenizer, chars=4000)
    other = RowTokenizer(folder, day=datetime.date(2024, 2, 29))
    assert "Current date: 2024-02-29" in shown(other, THOUGHT)


def test_caches_of_another_date_are_others_and_those_of_templates_without_one_are_not(
    tokenizer: RowTokenizer, folder: Path, tmp_path: Path
) -> None:
    other, same = RowTokenizer(folder, day=datetime.date(2024, 2, 29)), RowTokenizer(folder, day=DAY)
    assert len({tokenizer.fingerprint, other.fingerprint, RowTokenizer(folder).fingerprint}) == 3
    assert same.fingerprint == tokenizer.fingerprint
    without = published_tokenizer(tmp_path / "model", "qwen3").directory
    assert RowTokenizer(without, day=DAY).fingerprint == RowTokenizer(without).fingerprint
    assert asks_for_date(folder) and not asks_for_date(without)


def test_a_format_of_the_date_without_bound_is_ended(tmp_path: Path) -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%Y' * 100000) }}"}, {}, "t", day=DAY)
    with pytest.raises(ConfigError, match="format of a date of 200,000 characters; 256 are allowed"):
        template.render(THOUGHT)


def test_the_key_fixes_the_date_of_tokenised_rows(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": THOUGHT}))
    keys = {"model": str(folder), "datasets": [{"path": str(tmp_path / "rows.jsonl"), "type": "conversation"}]}
    for given in ("2020-01-31", datetime.date(2020, 1, 31)):  # as YAML reads it
        found = tokenize_row(load({**keys, "template_date": given}), "rows.jsonl:1")
        assert "Current date: 2020-01-31" in found.tokenizer.decode(found.documents[0].tokens)
    today = tokenize_row(load(keys), "rows.jsonl:1")
    assert f"Current date: {datetime.date.today()}" in today.tokenizer.decode(today.documents[0].tokens)


@pytest.mark.parametrize("given", ["today", "2025-13-01", 20250805, "05.08.2025", True])
def test_what_is_no_day_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"template_date: must be a day such as 2026-11-29"):
        load({"model": "m", "template_date": given})


class Alone:
    """The processes of a run in one process."""

    world = SimpleNamespace(writer=True)

    def share(self, value: Any, what: str) -> Any:
        return value


@dataclass(frozen=True)
class Opened:
    """What of a run the date depends on."""

    model_dir: Path
    loaded: LoadedConfig

    @property
    def config(self) -> TrainConfig:
        return self.loaded.config


def _run(folder: Path, **keys: Any) -> Any:
    return Opened(folder, load({"model": str(folder), **keys}))


def test_a_run_writes_down_its_date_and_a_resumed_one_goes_on_with_it(folder: Path, tmp_path: Path) -> None:
    processes: Any = Alone()
    fresh = dated(_run(folder), None, processes)
    assert fresh.config.template_date == str(datetime.date.today())
    assert date_line(fresh) == f"chat template: writes the date {datetime.date.today()} in every row (template_date)"
    saved: Any = SimpleNamespace(manifest=SimpleNamespace(config={"template_date": "2025-08-05"}))
    assert dated(_run(folder), saved, processes).config.template_date == "2025-08-05"
    assert dated(_run(folder, template_date="2024-01-01"), saved, processes).config.template_date == "2024-01-01"
    without = published_tokenizer(tmp_path / "model", "qwen3").directory
    undated = dated(_run(without), saved, processes)
    assert undated.config.template_date is None and date_line(undated) == ""


def test_fixed_dates_are_midnight_of_the_day() -> None:
    day = DayOfRendering()
    write = day.writer(lambda format: "now")
    assert write("%d") == "now"
    day.day = DAY
    assert write("%d %b %Y, %H:%M") == "05 Aug 2025, 00:00"
