"""The thinking switches of Qwen3.5, 3.6 and 3.8: what is trained, and what no server would ask for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from chat_formats import chat_tokenizer
from models.harness import tiny_config
from qwen_templates import TEMPLATES

from surogate.data.chat.conversation import ConversationOptions, encode_conversation
from surogate.data.chat.token_spans import runs
from surogate.data.tokenizer import Tokenizer
from surogate.run import load, tokenize
from surogate_core.api import ConfigError, Encoded

Messages = list[dict[str, Any]]

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def said(*answers: str, key: str = "") -> Messages:
    """Return a conversation of one question for each answer. key: where reasoning is, in front of "|"."""
    messages = []
    for answer in answers:
        thought, _, text = answer.rpartition("|")
        given = {key: thought, "content": text} if key else {"content": answer}
        messages += [{"role": "user", "content": "Ask."}, {"role": "assistant", **given}]
    return messages


PLAIN = said("yes", "no")
THOUGHT = said("hm|yes", "ha|no", key="reasoning_content")
IN_CONTENT = said("<think>\nhm\n</think>\n\nyes", "<think>\nha\n</think>\n\nno")
CALLED: Messages = [
    {"role": "user", "content": "1 + x?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
OPEN, CLOSED = "<think>\n", "<think>\n\n</think>\n\n"
ON, OFF, KEPT, DROPPED = (
    {"enable_thinking": True},
    {"enable_thinking": False},
    {"preserve_thinking": True},
    {"preserve_thinking": False},
)
ONE_OF_TWO = {"the prompt of a server": (1, 2)}
FIRST_DROPPED = {"the reasoning": (1, 2), "the training": (1, 2)}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("qwen")
    return {name: chat_tokenizer(folder / name, template) for name, template in TEMPLATES.items()}


def encoded(tokenizer: Tokenizer, messages: Messages, variables: dict[str, Any], tools: Any = None) -> Encoded:
    options = ConversationOptions(chat_template_kwargs=variables)  # type: ignore[call-arg]
    return encode_conversation({"messages": messages, "tools": tools}, tokenizer, options)


def answers(found: Encoded, tokenizer: Tokenizer) -> list[str]:
    """Return each answer behind its header, with what is trained in [[ ]]; those that are not trained without."""
    shown = "".join(f"[[{text}]]" if trained else text for text, trained in runs(found, tokenizer))
    return [part.partition("<|im_end|>")[0].replace("]]", "") for part in shown.split("<|im_start|>assistant\n")[1:]]


def counts(found: Encoded) -> dict[str, tuple[int, int]]:
    return {one.what: (one.count, one.of) for one in found.omissions if one.count}


@pytest.mark.parametrize(
    ("name", "messages", "variables", "trained", "named"),
    [
        ("Qwen3.5", PLAIN, {}, ["[[yes", OPEN + "[[\n</think>\n\nno"], ONE_OF_TWO),
        ("Qwen3.5", PLAIN, OFF, ["[[yes", CLOSED + "[[no"], ONE_OF_TWO),
        ("Qwen3.5", THOUGHT, {}, ["yes", OPEN + "[[ha\n</think>\n\nno"], FIRST_DROPPED),
        ("Qwen3.5", IN_CONTENT, {}, ["yes", OPEN + "[[ha\n</think>\n\nno"], FIRST_DROPPED),
        ("Qwen3.5, small", PLAIN, {}, ["[[yes", CLOSED + "[[no"], ONE_OF_TWO),
        ("Qwen3.5, small", THOUGHT, ON, ["yes", OPEN + "[[ha\n</think>\n\nno"], FIRST_DROPPED),
        (
            *("Qwen3.5, small", THOUGHT, {}, ["yes", "[[<think>\nha\n</think>\n\nno"]),
            FIRST_DROPPED | {"the prompt of a server": (1, 1)},
        ),
        ("Qwen3.6", PLAIN, {}, ["[[yes", OPEN + "[[\n</think>\n\nno"], ONE_OF_TWO),
        ("Qwen3.6", THOUGHT, KEPT, [OPEN + "[[hm\n</think>\n\nyes", OPEN + "[[ha\n</think>\n\nno"], {}),
        ("Qwen3.6", IN_CONTENT, KEPT, [OPEN + "[[hm\n</think>\n\nyes", OPEN + "[[ha\n</think>\n\nno"], {}),
        ("Qwen3.6", PLAIN, KEPT | OFF, [CLOSED + "[[yes", CLOSED + "[[no"], {}),
        ("Qwen3.8", PLAIN, {}, [OPEN + "[[\n</think>\n\nyes", OPEN + "[[\n</think>\n\nno"], {}),
        ("Qwen3.8", PLAIN, OFF, [CLOSED + "[[yes", CLOSED + "[[no"], {}),
        ("Qwen3.8", PLAIN, DROPPED, ["[[yes", OPEN + "[[\n</think>\n\nno"], ONE_OF_TWO),
        ("Qwen3.8", THOUGHT, {}, [OPEN + "[[hm\n</think>\n\nyes", OPEN + "[[ha\n</think>\n\nno"], {}),
        ("Qwen3.8", THOUGHT, OFF, ["[[<think>\nhm\n</think>\n\nyes", "[[<think>\nha\n</think>\n\nno"],
         {"the prompt of a server": (2, 2)}),
    ],
)  # fmt: skip
def test_each_switch_trains_behind_the_prompt_of_a_server_or_is_named(
    tokenizers: dict[str, Tokenizer],
    name: str,
    messages: Messages,
    variables: dict[str, Any],
    trained: list[str],
    named: dict[str, tuple[int, int]],
) -> None:
    tokenizer = tokenizers[name]
    found = encoded(tokenizer, messages, variables)
    assert answers(found, tokenizer) == trained
    assert counts(found) == named


@pytest.mark.parametrize("name", TEMPLATES)
def test_rounds_with_calls_are_trained_behind_the_prompt_of_a_server(
    tokenizers: dict[str, Tokenizer], name: str
) -> None:
    """Both answers follow the last question."""
    tokenizer = tokenizers[name]
    found = encoded(tokenizer, CALLED, {}, [TOOL])
    call, answer = answers(found, tokenizer)
    assert "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n</parameter>\n" in call
    assert "[[" in call and answer.endswith("It is 3.") and "[[" in answer
    assert counts(found) == {}


def test_the_effort_of_reasoning_is_a_variable(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["Qwen3.8"]

    def begin(**variables: Any) -> str:
        return tokenizer.decode(encoded(tokenizer, PLAIN, variables).tokens).partition("Ask.")[0]

    assert "<|im_start|>system\nReasoning effort is set to xhigh.<|im_end|>" in begin()
    assert "<|im_start|>system\nReasoning effort is set to low.<|im_end|>" in begin(reasoning_effort="low")
    assert "system" not in begin(reasoning_effort="medium") and "system" not in begin(**OFF)
    with pytest.raises(ConfigError, match=r"refuses these messages: TemplateError: Unexpected reasoning effort high"):
        begin(reasoning_effort="high")


@pytest.mark.parametrize("name", ["Qwen3.5", "Qwen3.6"])
def test_a_switch_that_a_template_does_not_have_is_refused(tokenizers: dict[str, Tokenizer], name: str) -> None:
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: reasoning_effort: .* reads no such variable"):
        encoded(tokenizers[name], PLAIN, {"reasoning_effort": "low"})


@pytest.mark.parametrize("variables", [{}, OFF, DROPPED])
def test_reasoning_in_the_content_of_an_answer_is_left_out_where_the_template_writes_a_block_before_it(
    tokenizers: dict[str, Tokenizer], variables: dict[str, Any]
) -> None:
    found = encoded(tokenizers["Qwen3.8"], IN_CONTENT, variables)
    assert not found.tokens
    assert found.left_out == (
        "an answer has its reasoning in its content, and the chat template writes a think block of its own before. "
        "Move the reasoning into the key reasoning_content"
    )


def test_a_run_names_the_first_row_with_an_answer_that_follows_no_prompt(tmp_path: Path) -> None:
    """On one line, with a remedy that the template has."""
    tokenizer = chat_tokenizer(tmp_path / "model", TEMPLATES["Qwen3.6"])
    (tokenizer.directory / "config.json").write_text(json.dumps(tiny_config(vocab_size=600)))
    rows = [said("yes"), PLAIN, PLAIN]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    entry = {"path": str(tmp_path / "rows.jsonl"), "type": "conversation"}

    def lines(**more: Any) -> list[str]:
        said: list[str] = []
        tokenize(load({"model": str(tokenizer.directory), "datasets": [entry | more]}), said.append)
        return [line for line in said if "the prompt of a server" in line]

    (line,) = lines()
    assert re.search(r"the prompt of a server of 2 of 5 answers: .*\(first: .*rows\.jsonl:2\)$", line)
    assert "preserve_thinking: true" in line and "\n" not in line
    assert lines(chat_template_kwargs=KEPT) == []
