"""Every part of a conversation reaches the tokens, or is reported as left out, with counts, before training."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_formats import GENERATION, QWEN25, chat_tokenizer, published_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surogate.config.dataset_entry import DatasetEntry
from surogate.config.schema import TrainConfig
from surogate.data.chat.conversation import ConversationOptions, encode_conversation
from surogate.data.corpora import load_corpora
from surogate.data.tokenizer import Tokenizer
from surogate.plugin import surogate_dataset_formats
from surogate_core.api import Encoded
from surogate_core.errors import ConfigError

Row = dict[str, Any]

FORMATS = {definition.name: definition for definition in surogate_dataset_formats()}
HELLO = [{"role": "user", "content": "Who goes there?"}, {"role": "assistant", "content": "A friend."}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]


def encode(tokenizer: Tokenizer, messages: list[Row], tools: list[Any] | None = None, **options: Any) -> Encoded:
    row = {"messages": messages, "tools": tools}
    return encode_conversation(row, tokenizer, ConversationOptions(tools_field="tools", **options))


def trained_text(encoded: Encoded, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([t for t, on in zip(encoded.tokens, encoded.trained, strict=True) if on])


def printed(encoded: Encoded) -> dict[tuple[str, str], tuple[int, int]]:
    return {(one.what, one.unit): (one.count, one.of) for one in encoded.omissions if one.count}


# ----------------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize(
    ("key", "no", "yes"),
    [
        *[("weight", 0, 1), ("train", False, True), ("loss", False, True), ("trainable", False, True)],
        *[("loss_mask", 0, 1), ("train_on_turn", False, True), ("training", False, True), ("loss_weight", 0.0, 1.0)],
    ],
)
def test_answers_with_weight_zero_are_not_trained(key: str, no: Any, yes: Any, tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "openhermes")
    more = [{"role": "user", "content": "Stand!"}, {"role": "assistant", "content": "I stand.", key: yes}]
    messages = [HELLO[0], {**HELLO[1], key: no}, *more]
    encoded = encode(tokenizer, messages)
    assert trained_text(encoded, tokenizer) == "I stand.<|im_end|>" and not printed(encoded)
    whole = trained_text(encode(tokenizer, messages, loss_scale="all"), tokenizer)
    assert "Who goes there?" in whole and "A friend." not in whole and "I stand." in whole
    nothing = encode(tokenizer, messages[:2])
    assert not nothing.tokens and "from training" in nothing.left_out
    users = encode(tokenizer, [{**HELLO[0], key: yes}, HELLO[1]])
    assert printed(users) == {(f"the key {key!r}", "messages that are not the assistant's"): (1, 1)}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"weight": 0.5}, r"message 1 \(assistant\) has weight 0.5: an answer is trained or not, 1 or 0"),
        ({"weight": "0"}, "has weight '0'"),
        ({"train": "no"}, "has train 'no': an answer is trained or not, 1 or 0"),
        ({"weight": 0, "train": True}, "has contradictory keys"),
        (
            {"mask": 1},
            r"message 1 \(assistant\) has mask 1, which may say what is trained, or what is not. Write train",
        ),
        ({"label_mask": [0, 1]}, "has label_mask .*, which may say what is trained"),
        ({"masked": True}, "has masked True, which may"),
        ({"trainable": "no"}, "has trainable 'no': an answer is trained or not"),
        ({"train_detail": []}, "has train_detail: parts of an answer cannot be trained alone"),
    ],
)
def test_other_weights_are_refused(keys: Row, problem: str, tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "openhermes")
    with pytest.raises(ConfigError, match=problem):
        encode(tokenizer, [HELLO[0], {**HELLO[1], **keys}])


# ---------------------------------------------------------------------------------------------------------- omissions


def test_parts_that_a_template_does_not_write_are_named_and_counted(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "qwen3")
    developer = [{"role": "developer", "content": "Be brief."}, {"role": "developer", "content": "friend"}]
    named = [{**HELLO[0], "name": "Bob"}, {**HELLO[1], "name": "Eve"}]
    assert printed(encode(tokenizer, [*developer, *named])) == {
        ("the text", "messages with role developer"): (2, 2),
        ("the key 'name'", "messages"): (2, 2),
    }
    plain = published_tokenizer(tmp_path / "plain", "openhermes")
    assert printed(encode(plain, HELLO, [{"type": "function", "function": {"name": "add"}}])) == {
        ("tools", "rows with tools"): (1, 1)
    }


def test_a_system_prompt_that_a_template_drops_is_reported(tmp_path: Path) -> None:
    """Mistral's v3 templates write it into the last message only if that is the user's, hence never in training."""
    tokenizer = published_tokenizer(tmp_path / "model", "mistral-v3-tekken")
    encoded = encode(tokenizer, [{"role": "system", "content": "Be brief."}, *HELLO])
    of_server = ("the prompt of a server", "answers")  # it has the system prompt
    assert printed(encoded) == {("the text", "messages with role system"): (1, 1), of_server: (1, 1)}
    assert trained_text(encoded, tokenizer) == "A friend.</s>"


def test_replaced_names_and_keys_without_a_place_are_reported(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "qwen2.5")
    said = [{"type": "text", "text": "Who goes there?", "cache": "x"}]
    call = {**CALL, "id": "call-1", "index": 7007, "function": {**CALL["function"], "strict": True}}
    messages = [{**CALLED[0], "content": said}, {**CALLED[1], "tool_calls": [call]}, *CALLED[2:]]
    assert printed(encode(tokenizer, messages)) == {
        ("the key 'index'", "tool calls"): (1, 1),
        ("the key 'cache'", "parts of messages"): (1, 1),
        ("the key 'strict'", "functions of tool calls"): (1, 1),
        ("the tools", "conversations with calls"): (1, 1),
    }
    shared = [{"who": one["role"], "role": "x", "content": one["content"]} for one in HELLO]
    mapped = encode(tokenizer, shared, message_property_mappings={"role": "who"})
    assert printed(mapped) == {("the key 'role'", "messages"): (2, 2)}


def test_calls_of_functions_that_a_row_does_not_show_are_counted(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "qwen2.5")
    unseen = {("the tools", "conversations with calls"): (1, 1)}
    assert printed(encode(tokenizer, CALLED)) == unseen
    assert printed(encode(tokenizer, CALLED, [{"type": "function", "function": {"name": "other"}}])) == unseen
    assert printed(encode(tokenizer, CALLED, [{"type": "function", "function": {"name": "add"}}])) == {}
    assert printed(encode(tokenizer, [{"role": "system", "content": "You may call add(a, b)."}, *CALLED])) == {}


def test_ids_of_calls_are_not_reported(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "qwen2.5")
    call, result = {**CALL, "id": "call-1"}, {**CALLED[2], "tool_call_id": "call-1"}
    messages = [CALLED[0], {**CALLED[1], "tool_calls": [call]}, result, CALLED[3]]
    assert printed(encode(tokenizer, messages, [{"type": "function", "function": {"name": "add"}}])) == {}


def load(tmp_path: Path, tokenizer: Tokenizer, rows: list[Row], notices: list[str]) -> Any:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"tools": None, **row}) + "\n" for row in rows))
    entry = DatasetEntry(path=str(tmp_path / "rows.jsonl"), type="conversation", options={"tools_field": "tools"})
    config = TrainConfig(model="model", datasets=(entry,), validation_split_ratio=0)
    return load_corpora(config, FORMATS, tokenizer.directory, tokenizer.vocab_size, notices.append)


def test_omissions_are_reported_with_counts_also_from_the_cache(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "qwen3")
    thought = {**HELLO[1], "reasoning_content": "A test."}
    rows = [HELLO, [*HELLO, *HELLO], [HELLO[0], {**thought, "weight": 0}], [HELLO[0], thought, HELLO[0], thought]]
    expected = [
        "datasets.0: left out: the empty think block of 1 of 3 answers without reasoning: the chat template writes it "
        "in other answers of the same conversation, so the model learns both forms. To train one, end a row after each "
        "answer, and set loss_scale: last_round. chat_template_kwargs (such as enable_thinking: false) may make the "
        "block a part of the prompt (first: rows.jsonl:2)",
        "datasets.0: left out: 1 of 4 rows: a key such as weight, train or loss excludes every answer from training "
        "(first: rows.jsonl:3)",
        "datasets.0: left out: the reasoning of 1 of 2 answers with reasoning: the chat template does not write it "
        "(first: rows.jsonl:4)",
        "datasets.0: left out: the training of 1 of 2 answers: the template drops their reasoning but keeps that of a "
        "later answer, and the model never writes such answers. To train each with its reasoning, end a row after it "
        "(first: rows.jsonl:4)",
    ]
    for _ in range(2):
        notices: list[str] = []
        data = load(tmp_path, tokenizer, [{"messages": messages} for messages in rows], notices)
        assert notices == expected
        assert data.train.corpus.datasets[0].n_docs == 3


def test_a_marked_template_that_drops_calls_leaves_the_row_out(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", GENERATION)
    assert encode(tokenizer, CALLED).left_out.startswith("the chat template leaves an answer empty. To")
    block = {"role": "assistant", "content": "<think>A test.</think>A friend.", "weight": 1}
    messages = [HELLO[0], block, HELLO[0], {**HELLO[1], "weight": 0}]
    assert trained_text(encode(tokenizer, messages), tokenizer) == "<think>A test.</think>A friend.<|im_end|>"


def test_a_dataset_of_which_every_row_is_left_out_is_refused(tmp_path: Path) -> None:
    tokenizer = published_tokenizer(tmp_path / "model", "openhermes")
    with pytest.raises(ConfigError, match="every row is left out: the chat template does not write the tool calls"):
        load(tmp_path, tokenizer, [{"messages": CALLED}] * 3, [])
    with pytest.raises(
        ConfigError, match=r"such as weight, train or loss excludes .*Correct the rows or the chat template"
    ):
        load(tmp_path, tokenizer, [{"messages": [HELLO[0], {**HELLO[1], "weight": 0}]}] * 3, [])


# ---------------------------------------------------------------------------------------------------------- property

_NAMES = ("qwen2.5", "qwen3", "qwq", "openhermes", "zephyr", "smollm3", "granite-3.3", "phi-3.5", "deepseek-r1-distill")
_EXTRA = ("name", "id", "note", "tool_call_id")


@cache
def _tokenizer(folder: Path, name: str) -> Tokenizer:
    return published_tokenizer(folder / name, name)


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """A conversation in which every text is a different word."""
    numbers = iter(range(1000))

    def word() -> str:
        return f"q{next(numbers)}z"

    def maybe(value: Any) -> Any:
        return draw(st.sampled_from([None, value]))

    messages: list[Row] = []
    for role in draw(st.sampled_from([[], ["system"], ["developer"]])):
        messages.append({"role": role, "content": word()})
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": word()})
        if draw(st.integers(0, 2)) == 0:
            calls = [
                {"id": word(), "function": {"name": word(), "arguments": {word(): word()}}}
                for _ in range(draw(st.integers(1, 2)))
            ]
            said = draw(st.sampled_from([None, "", "said"]))
            called = {"role": "assistant", "tool_calls": calls, "content": word() if said == "said" else said}
            messages += [called, {"role": "tool", "content": word()}]
        answer: Row = {"role": "assistant", "content": word()}
        reasoning = draw(st.sampled_from(["none", "key", "inline"]))
        if reasoning == "key":
            answer["reasoning_content"] = word()
        elif reasoning == "inline":
            answer["content"] = f"<think>\n{word()}\n</think>\n\n{word()}"
        if draw(st.integers(0, 3)) == 0:
            answer["weight"] = draw(st.sampled_from([0, 1]))
        messages.append(answer)
    for message in messages:
        if draw(st.integers(0, 4)) == 0:
            message[draw(st.sampled_from(_EXTRA))] = maybe(word())
    tools = [{"type": "function", "function": {"name": word(), "description": word()}}]
    return {"messages": messages, "tools": maybe(tools)}


def missing_of(row: Row, text: str) -> Counter[tuple[str, str]]:
    """Return the names that the omissions of the row must have: of the parts that are not in `text`."""
    missing: Counter[tuple[str, str]] = Counter()
    for message in row["messages"]:
        role, content = message["role"], message.get("content") or ""
        thought, _, said = content.rpartition("</think>")
        reasoning = thought.removeprefix("<think>").strip() or message.get("reasoning_content") or ""
        missing["the reasoning", "answers with reasoning"] += reasoning not in text
        names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        missing["the text", f"messages with role {role}"] += any(one.strip() not in text for one in [said, *names])
        for key in _EXTRA:
            unwritten = key != "tool_call_id" and (message.get(key) or "") not in text
            missing[f"the key {key!r}", "messages"] += unwritten
    for tool in row["tools"] or ():
        missing["tools", "rows with tools"] += tool["function"]["name"] not in text
    return +missing


def test_every_part_of_a_row_is_in_its_tokens_or_reported_with_counts(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()

    @settings(max_examples=250, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(row=rows(), name=st.sampled_from(_NAMES), loss_scale=st.sampled_from(["default", "last_round", "all"]))
    def check(row: Row, name: str, loss_scale: str) -> None:
        outcomes[_outcome(row, _tokenizer(tmp_path, name), loss_scale)] += 1

    check()
    assert min(outcomes["whole"], outcomes["named"], outcomes["left out"]) > 20, outcomes


_NOT_MISSING = ("the training", "the tools", "the prompt of a server", "the empty think block")


def _outcome(row: Row, tokenizer: Tokenizer, loss_scale: str) -> str:
    """Return "whole", "named" (parts are missing and reported), "left out" or "refused", after checking that claim."""
    template = tokenizer.chat_template
    assert template is not None
    try:
        encoded = encode(tokenizer, json.loads(json.dumps(row["messages"])), row["tools"], loss_scale=loss_scale)
    except ConfigError as error:
        assert "refuses these messages" in str(error)
        return "refused"
    answers = [message for message in row["messages"] if message["role"] == "assistant"]
    if encoded.left_out:
        assert not encoded.tokens
        if "from training" in encoded.left_out:
            assert answers[-1].get("weight") == 0
        elif "end the turn" not in encoded.left_out:
            text = template.render([{"content": "", **message} for message in row["messages"]], row["tools"])
            missing = missing_of(row, text)
            assert missing["the text", "messages with role assistant"], encoded.left_out
        return "left out"
    named = Counter({key: count for key, (count, _) in printed(encoded).items() if key[0] not in _NOT_MISSING})
    assert named == missing_of(row, tokenizer.decode(encoded.tokens))
    trained = trained_text(encoded, tokenizer)
    for message in row["messages"]:
        said = (message.get("content") or "").rpartition("</think>")[2].strip()
        if said and (message.get("weight") == 0 or (message["role"] != "assistant" and loss_scale != "all")):
            assert said not in trained
    said = answers[-1]["content"].rpartition("</think>")[2].strip()
    assert said in trained or answers[-1].get("weight") == 0 or loss_scale == "default"
    return "named" if named else "whole"


def test_parts_of_a_row_that_reach_the_tokens_are_not_reported(tmp_path: Path) -> None:
    tokenizer = chat_tokenizer(tmp_path / "model", QWEN25)
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "title": 'a "b"'}}}]
    assert not printed(encode(tokenizer, [{"role": "system", "content": "Be brief."}, *CALLED], tools))
