"""The same answer in two forms, variables of chat templates, and tool calls that end with a token of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from chat_formats import QWEN3, chat_tokenizer

from surogate.data.chat.conversation import ConversationOptions, encode_conversation
from surogate.data.chat.token_spans import marked
from surogate.data.tokenizer import Tokenizer
from surogate.run import load, tokenize_row
from surogate_core.api import ConfigError, Encoded

NO_THINK = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "no"},
]

HARMONY = """
{%- set last = namespace(call=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- set later = namespace(final=false) %}
{%- for other in messages[loop.index:] %}
{%- if other.role == 'assistant' and not other.tool_calls %}{%- set later.final = true %}{%- endif %}
{%- endfor %}
{%- if message.thinking and not later.final %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}
{%- endif %}
{%- set last.call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + last.call.name + '<|channel|>commentary json<|message|>' }}
{{- (last.call.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + last.call.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) + '<|end|>' }}
{%- else %}
{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
HARMONY_TOKENS = tuple(
    f"<|{name}|>" for name in ("start", "end", "message", "channel", "call", "return", "im_end", "endoftext")
)
"""The format of gpt-oss: calls end with <|call|>, a last answer with <|return|>, other answers with <|end|>."""

CLOCK = {"type": "function", "function": {"name": "clock", "arguments": {"city": "Oslo"}}}
ASKED = [
    {"role": "user", "content": "Time in Oslo?"},
    {"role": "assistant", "content": "", "thinking": "ask", "tool_calls": [CLOCK]},
]
ANSWERED = [*ASKED, {"role": "tool", "name": "clock", "content": "noon"}, {"role": "assistant", "content": "Noon."}]


def encoded(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> Encoded:
    return encode_conversation({"messages": messages}, tokenizer, ConversationOptions(**options))  # type: ignore[arg-type]


def counts(found: Encoded) -> dict[str, tuple[int, int]]:
    return {one.what: (one.count, one.of) for one in found.omissions if one.count}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return chat_tokenizer(tmp_path_factory.mktemp("qwen3") / "model", QWEN3)


def test_answers_with_and_without_an_empty_think_block_in_one_conversation_are_counted(qwen3: Tokenizer) -> None:
    found = encoded(qwen3, NO_THINK)
    assert "[[yes<|im_end|>]]" in marked(found, qwen3) and "[[<think>" in marked(found, qwen3)
    assert counts(found) == {"the empty think block": (1, 2)}
    assert not counts(encoded(qwen3, NO_THINK, loss_scale="last_round"))
    assert not counts(encoded(qwen3, NO_THINK[:2]))


def test_variables_of_the_template_apply_to_prompts_and_a_row_that_follows_none_is_counted(qwen3: Tokenizer) -> None:
    server = {"chat_template_kwargs": {"enable_thinking": False}}
    found = encoded(qwen3, NO_THINK, **server)
    assert marked(found, qwen3).endswith(r"<|im_start|>assistant\n<think>\n\n</think>\n\n[[no<|im_end|>]]\n")
    assert counts(found) == {"the prompt of a server": (1, 2)}  # "yes" has no think block before it
    (why,) = [one.why for one in found.omissions if one.count]
    assert "chat_template_kwargs" in why and "loss_scale: last_round" in why
    assert not counts(encoded(qwen3, NO_THINK, loss_scale="last_round", **server))
    assert not counts(encoded(qwen3, NO_THINK[:2], **server))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"enable_thinkin": False},
            r"chat_template_kwargs: enable_thinkin: chat template \(.*\) reads no such variable",
        ),
        ({"messages": []}, "chat_template_kwargs: messages: is set by the rows and the tokenizer. Remove it"),
    ],
)
def test_a_variable_without_effect_is_refused(given: dict[str, Any], problem: str, qwen3: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=problem):
        encoded(qwen3, NO_THINK, chat_template_kwargs=given)


def test_a_variable_without_effect_is_refused_once_also_if_bad_rows_are_skipped(
    qwen3: Tokenizer, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n' * 3)
    entry = {"path": str(tmp_path / "rows.jsonl"), "type": "conversation", "bad_rows": "skip"}
    config = {"model": str(qwen3.directory), "datasets": [{**entry, "chat_template_kwargs": {"thinking": True}}]}
    with pytest.raises(ConfigError, match=r"^datasets\.0: chat_template_kwargs: thinking: chat template"):
        tokenize_row(load(config), "rows.jsonl:1")


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"type": "instruction", "use_chat_template": False},
            "chat_template_kwargs has no effect with use_chat_template: false",
        ),
        ({"type": "preference", "text_as": "text"}, "chat_template_kwargs has no effect with text_as: text"),
        ({"loss_scale": "completion"}, "loss_scale: completion needs completion_field"),
    ],
)
def test_keys_of_an_entry_that_exclude_each_other_are_refused(keys: dict[str, Any], problem: str) -> None:
    entry = {"path": "rows.jsonl", "type": "conversation", "chat_template_kwargs": {"enable_thinking": False}}
    with pytest.raises(ConfigError, match=problem):
        load({"model": "m", "datasets": [{**entry, **keys}]})


def test_every_type_that_renders_the_template_takes_its_variables(qwen3: Tokenizer, tmp_path: Path) -> None:
    rows = {
        "conversation": '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
        "instruction": '{"instruction": "a", "output": "b"}',
        "preference": '{"prompt": "a", "chosen": "b", "rejected": "c"}',
        "labelled": '{"prompt": "a", "completion": "b", "label": true}',
    }
    for name, row in rows.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text(row)
        entry = {"path": str(path), "type": name, "chat_template_kwargs": {"enable_thinking": False}}
        found = tokenize_row(load({"model": str(qwen3.directory), "datasets": [entry]}), f"{name}.jsonl:1")
        assert r"</think>\n\n[[b<|im_end|>]]" in marked(found.documents[0], found.tokenizer), name


@pytest.mark.parametrize("thought", ["A test.", "Another test."])
def test_reasoning_that_a_template_writes_twice_leaves_the_row_out(thought: str, qwen3: Tokenizer) -> None:
    said = {"role": "assistant", "content": "<think>A test.</think>yes"}
    found = encoded(qwen3, [NO_THINK[0], {**said, "reasoning_content": thought}])
    assert not found.tokens and found.left_out.startswith(
        "the reasoning of an answer is in a key of its own and in its"
    )
    assert encoded(qwen3, [NO_THINK[0], said]).tokens
    assert encoded(qwen3, [NO_THINK[0], {**said, "reasoning_content": ""}]).tokens


def test_tool_calls_may_end_with_a_special_token_of_their_own(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", HARMONY, special=HARMONY_TOKENS)
    call = '<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>'
    shown = marked(encoded(tokenizer, ANSWERED), tokenizer)
    assert f"<|start|>assistant[[ to=functions.clock{call}]]<|start|>functions.clock to=assistant" in shown
    assert shown.endswith("<|start|>assistant[[<|channel|>final<|message|>Noon.<|return|>]]")
    alone = marked(encoded(tokenizer, ASKED), tokenizer)
    thought = "[[<|channel|>analysis<|message|>ask<|end|><|start|>assistant to=functions.clock"
    assert alone.endswith(f"<|start|>assistant{thought}{call}]]")
    longer = marked(encoded(tokenizer, [*ANSWERED, *NO_THINK[:2]]), tokenizer, chars=2000)
    assert f"{call}]]" in longer and "Noon.<|end|>]]" in longer and longer.endswith("yes<|return|>]]")


def test_calls_that_no_token_ends_leave_the_row_out(tmp_path: Path) -> None:
    without = HARMONY.replace("+ '<|call|>'", "")
    found = encoded(chat_tokenizer(tmp_path / "model", without, special=HARMONY_TOKENS), ANSWERED)
    assert not found.tokens and found.left_out.startswith("the chat template does not end the turn after tool calls")
