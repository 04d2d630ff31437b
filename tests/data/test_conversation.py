from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from chat_formats import QWEN25, chat_tokenizer

from surogate.config.dataset_entry import DatasetEntry
from surogate.config.schema import TrainConfig
from surogate.data.chat.conversation import ConversationOptions, encode_conversation
from surogate.data.corpora import Corpora, load_corpora
from surogate.data.pack import DocumentSpans
from surogate.data.readers import read_file
from surogate.data.spans import weigh
from surogate.data.tokenizer import Tokenizer
from surogate.plugin import surogate_dataset_formats
from surogate_core.errors import ConfigError

FORMATS = {definition.name: definition for definition in surogate_dataset_formats()}
HELLO = [{"role": "user", "content": "Who goes there?"}, {"role": "assistant", "content": "A friend."}]


@pytest.fixture
def chat(tmp_path: Path) -> Tokenizer:
    return chat_tokenizer(tmp_path / "model", QWEN25)


def both(row: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> tuple[str, str]:
    """Return the text of a row, and its trained part."""
    encoded = encode_conversation(row, tokenizer, ConversationOptions(**options))
    trained = [token for token, on in zip(encoded.tokens, encoded.trained, strict=True) if on]
    return tokenizer.decode(encoded.tokens), tokenizer.decode(trained)


def test_share_gpt_names_are_understood(chat: Tokenizer) -> None:
    shared = [
        {"from": "human", "value": "1 + 2?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ]
    plain = [
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    assert both({"messages": shared}, chat) == both({"messages": plain}, chat)
    assert '{"name": "add", "arguments": {"a": 1}}' in both({"messages": plain}, chat)[1]


def test_the_keys_of_messages_may_be_half_those_of_share_gpt(chat: Tokenizer) -> None:
    expected = both({"messages": HELLO}, chat)
    for role, content in (("role", "value"), ("from", "content")):
        mixed = [{role: message["role"], content: message["content"]} for message in HELLO]
        assert both({"messages": mixed}, chat) == expected


def test_messages_may_have_other_names_be_json_or_lists_of_parts(chat: Tokenizer) -> None:
    expected = both({"messages": HELLO}, chat)
    named = [{"who": message["role"], "said": message["content"]} for message in HELLO]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in HELLO]
    nulls = [{**message, "tool_calls": None, "name": None} for message in HELLO]  # as tables fill what is missing
    assert both({"m": named}, chat, messages_field="m",
                message_property_mappings={"role": "who", "content": "said"}) == expected  # fmt: skip
    for messages in (json.dumps(HELLO), parts, nulls):
        assert both({"messages": messages}, chat) == expected


def test_system_prompt_completion_and_tools_come_from_their_columns(chat: Tokenizer) -> None:
    row = {"prompt": HELLO[:1], "completion": "A friend.", "sys": "Be brief.", "tools": '[{"name": "add"}]'}
    options = {"messages_field": "prompt", "completion_field": "completion", "system_field": "sys"}
    text, trained = both({**row, "tools": None}, chat, **options)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n") and trained == "A friend.<|im_end|>"
    assert both({**row, "tools": None, "completion": HELLO[1:]}, chat, **options) == (text, trained)
    assert both(row, chat, **options, tools_field=None) == (text, trained)
    named = row | {"t": row["tools"]}
    for keys in ({}, {"tools_field": "t"}):
        assert '<tools>\n{"name": "add"}\n</tools>' in both(named, chat, **options, **keys)[0]


def test_the_columns_system_and_tools_are_read_unless_the_keys_are_null(chat: Tokenizer, tmp_path: Path) -> None:
    row = {"messages": HELLO, "system": "Be brief.", "tools": [{"name": "add"}]}
    assert both(row, chat)[0].startswith('<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n{"name": "add"}')
    plain = both({"messages": HELLO}, chat)
    assert both(row, chat, system_field=None, tools_field=None) == plain
    once = {**row, "messages": [{"role": "system", "content": "Be brief."}, *HELLO]}
    assert both(once, chat) == both(row, chat)
    with pytest.raises(ConfigError, match=r"begin with another. Remove one, or set system_field: null"):
        both({**once, "system": "Be long."}, chat)
    assert corpora(tmp_path, chat, [{"messages": HELLO}])[1] == []
    with pytest.raises(ConfigError, match="no column 'tools'"):
        corpora(tmp_path, chat, [{"messages": HELLO}], options={"tools_field": "tools"})


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "column 'messages' holds no message"),
        (None, "column 'messages' holds null, not a list of messages"),
        ("hello", "holds text"),
        (["hello"], r"message 0 is text \(hello\), not an object"),
        ([{"role": "narrator", "content": "x"}], "message 0 has role 'narrator'. Known: human, gpt"),
        ([{"speaker": "user", "text": "x"}], "message 0 has role None.*Keys there: speaker, text"),
        ([HELLO[0], {"role": "assistant", "content": None}], "message 1 has content null, not text"),
        ([HELLO[0], {"role": "assistant", "content": " "}], "message 1 is an empty message of the assistant"),
        ([HELLO[0], {"role": "assistant", "content": [{"type": "refusal"}]}], "part 0 is .*, not of type text"),
        ([HELLO[0], {"role": "assistant", "content": ["A friend."]}], r"part 0 is text \(A friend.\), not of"),
        ([HELLO[0], {"role": "assistant", "content": [{"type": "text"}]}], "part 0 is of type text without a text"),
        ([HELLO[0], {"role": "assistant", "content": {"type": "text"}}], "message 1 has content an object"),
        ([{**HELLO[0], "tool_calls": [{"name": "f"}]}], "message 0 calls tools, but its role is user"),
        ([HELLO[0], {"role": "assistant", "tool_calls": [{"f": 1}]}], "tool call without the name"),
        ([{"role": "user", "content": "\ud800"}, HELLO[1]], "message 0 .user. contains half a surrogate pair"),
    ],
)  # fmt: skip
def test_unusable_messages_are_named(messages: object, problem: str, chat: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=problem):
        both({"messages": messages}, chat)


def test_two_system_prompts_and_invalid_tools_are_refused(chat: Tokenizer) -> None:
    row = {"messages": [{"role": "system", "content": "a"}, *HELLO], "sys": "b", "tools": "add"}
    with pytest.raises(ConfigError, match="begin with another"):
        both(row, chat, system_field="sys")
    with pytest.raises(ConfigError, match=r"column 'tools' holds .*not a list of tools"):
        both(row, chat, tools_field="tools")


# ------------------------------------------------------------------------------------------------------ as a run loads


def corpora(tmp_path: Path, tokenizer: Tokenizer, rows: list[dict[str, Any]], **keys: Any) -> tuple[Corpora, list[str]]:
    """Return the data of a run on a JSONL file of `rows`, and the notices."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    entry = DatasetEntry(path=str(tmp_path / "rows.jsonl"), type=keys.pop("type", "conversation"))
    entry = entry.model_copy(update={"options": keys.pop("options", {})})
    config = TrainConfig(**{"model": "model", "datasets": (entry,), "validation_split_ratio": 0, **keys})
    notices: list[str] = []
    return load_corpora(config, FORMATS, tokenizer.directory, tokenizer.vocab_size, notices.append), notices


def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, chat: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: column 'messages' holds no message"):
        corpora(tmp_path, chat, [{"messages": HELLO}, {"messages": []}])
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no column 'messages'. Available: chat"):
        corpora(tmp_path, chat, [{"chat": HELLO}])


def long(words: int) -> dict[str, Any]:
    return {"messages": [HELLO[0], {"role": "assistant", "content": "A friend. " * words}]}


def test_conversations_longer_than_a_row_are_left_out_and_counted(tmp_path: Path, chat: Tokenizer) -> None:
    data, notices = corpora(tmp_path, chat, [long(1), long(100), long(2)], sequence_len=128)
    assert len(data.train.start) == 2
    assert "datasets.0: 1 of 3 documents (33.3%) is longer than sequence_len (128; the longest, /" in notices[0]
    assert "/rows.jsonl:2, has " in notices[0]
    assert notices[0].endswith("tokens): left out")


@pytest.mark.parametrize(
    ("strategy", "starts", "ends"),
    [("right", "<|im_start|>system", "A friend."), ("left", "A friend", "<|im_end|>\n")],
)
def test_truncation_on_one_side_keeps_the_other_end(
    strategy: str, starts: str, ends: str, tmp_path: Path, chat: Tokenizer
) -> None:
    data, notices = corpora(tmp_path, chat, [long(100)], sequence_len=128, truncation_strategy=strategy)
    tokens, trained = data.train.corpus.read(data.train.start[0] + range(128))
    assert int(data.train.stop[0] - data.train.start[0]) == 128 and trained.any()
    text = chat.decode(tokens.tolist())
    assert starts in text[:20] and ends in text[-14:]
    assert f"cut at the {strategy}" in notices[0]


def test_conversations_cut_before_their_answer_are_left_out(tmp_path: Path, chat: Tokenizer) -> None:
    late = {"messages": [{"role": "user", "content": "Who? " * 200}, HELLO[1]]}
    data, notices = corpora(tmp_path, chat, [late, long(1)], sequence_len=128, truncation_strategy="right")
    assert len(data.train.start) == 1 and "1 of them left out with nothing to train" in notices[0]
    with pytest.raises(ConfigError, match=r"datasets.0: .*no document remains .*Raise sequence_len"):
        corpora(tmp_path, chat, [late], sequence_len=128)


def test_split_trains_the_pieces_of_a_long_conversation(tmp_path: Path, chat: Tokenizer) -> None:
    data, notices = corpora(tmp_path, chat, [long(100)], sequence_len=128, truncation_strategy="split")
    assert data.train.n_tokens == data.train.corpus.datasets[0].n_tokens and not notices


def test_validation_takes_whole_conversations(tmp_path: Path, chat: Tokenizer) -> None:
    rows = [long(n % 5 + 1) for n in range(40)]
    data, _ = corpora(tmp_path, chat, rows, sequence_len=128, validation_split_ratio=0.25)
    assert data.validation is not None
    offsets = set(data.train.corpus.datasets[0].offsets.tolist())
    for part in (data.train, data.validation):
        assert {*part.start.tolist(), *part.stop.tolist()} <= offsets
    assert len(data.train.start) + len(data.validation.start) == 40
    assert 0.2 < data.validation.n_tokens / (data.train.n_tokens + data.validation.n_tokens) < 0.3


def test_the_loss_scale_of_the_run_is_the_default_of_the_entry(tmp_path: Path, chat: Tokenizer) -> None:
    row = {"messages": [*HELLO, *HELLO]}
    trained = {
        name: corpora(tmp_path, chat, [row], **keys)[0].train.corpus.datasets[0].n_trained
        for name, keys in {
            "default": {},
            "last": {"loss_scale": "last_round"},
            "entry": {"loss_scale": "last_round", "options": {"loss_scale": "default"}},
        }.items()
    }
    assert trained["last"] * 2 == trained["default"] == trained["entry"]


def test_auto_finds_the_type_and_the_columns(tmp_path: Path, chat: Tokenizer) -> None:
    rows: dict[str, dict[str, Any]] = {
        "conversation": {"conversations": HELLO},
        "instruction": {"question": "Who goes there?", "answer": "A friend."},
        "alpaca": {"instruction": "Who goes there?", "input": "", "output": "A friend."},
    }
    texts = set()
    for row in rows.values():
        data, _ = corpora(tmp_path, chat, [row], type="auto")
        texts.add(chat.decode(data.train.corpus.datasets[0].tokens.tolist()))
    assert len(texts) == 1
    with pytest.raises(ConfigError, match=r"columns question fit these types: none. Set type to one of text, instr"):
        corpora(tmp_path, chat, [{"question": "x"}], type="auto")


def test_weights_repeat_documents_and_take_random_parts(tmp_path: Path, chat: Tokenizer) -> None:
    data, _ = corpora(tmp_path, chat, [long(n % 5 + 1) for n in range(40)])
    one = data.train.corpus.datasets[0]
    documents = DocumentSpans.of([one, one])
    start = weigh(documents, [2.5, 0.25], seed=1).start.tolist()
    first = [at for at in start if at < one.n_tokens]
    assert (len(first), len(set(first)), len(start) - len(first)) == (100, 40, 10)
    assert weigh(documents, [2.5, 0.25], seed=1).start.tolist() == start
    assert weigh(documents, [2.5, 0.25], seed=2).start.tolist() != start
    assert weigh(documents, [1, 1], seed=1) is documents
    with pytest.raises(ConfigError, match=r"datasets.1: weight: 0.001 of 40 documents is none"):
        weigh(documents, [1, 0.001], seed=1)


def test_an_entry_is_trained_by_its_weight_and_validated_once(tmp_path: Path, chat: Tokenizer) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(long(n % 5 + 1)) + "\n" for n in range(40)))
    entry = DatasetEntry(path=str(tmp_path / "rows.jsonl"), type="conversation", weight=2)
    config = TrainConfig(model="model", datasets=(entry,), validation_split_ratio=0.25)
    data = load_corpora(config, FORMATS, chat.directory, chat.vocab_size, print)
    assert data.validation is not None
    held_out = set(data.validation.start.tolist())
    assert len(data.train.start) == 2 * (40 - len(held_out)) and not held_out & set(data.train.start.tolist())
    only = TrainConfig(model="model", datasets=(entry,), validation_datasets=(entry,), validation_split_ratio=0)
    with pytest.raises(ConfigError, match=r"validation_datasets.0: weight is for training"):
        load_corpora(only, FORMATS, chat.directory, chat.vocab_size, print)


def test_any_row_is_encoded_or_refused(chat: Tokenizer) -> None:
    """Mutated random JSON in the shape of messages: the only exception may be ConfigError."""
    chance = random.Random(7)
    leaves: list[Any] = [
        None,
        "",
        " ",
        "x",
        "user",
        "assistant",
        "tool",
        "system",
        "[",
        "{",
        '{"name": 3}',
        1,
        True,
        0.5,
    ]
    leaves += [
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "\udfff",
        "\x00",
        "{% generation %}",
        "{{ 1 / 0 }}",
        float("nan"),
    ]
    keys = ["role", "content", "from", "value", "tool_calls", "function", "name", "arguments", "type", "text"]

    def value(depth: int) -> Any:
        kind = chance.random()
        if depth == 0 or kind < 0.4:
            return chance.choice(leaves)
        if kind < 0.6:
            return [value(depth - 1) for _ in range(chance.randrange(3))]
        return {chance.choice(keys): value(depth - 1) for _ in range(chance.randrange(4))}

    outcomes = [0, 0]
    for _ in range(1500):
        messages: Any = [*HELLO, *HELLO] if chance.random() < 0.9 else value(3)
        if isinstance(messages, list):
            messages = [dict(message) if isinstance(message, dict) else message for message in messages]
            target = chance.choice(messages) if messages else None
            if isinstance(target, dict):
                target[chance.choice(keys)] = value(2)
        try:
            encoded = encode_conversation(
                {"messages": messages, "t": value(2)}, chat, ConversationOptions(tools_field="t")
            )
            assert any(encoded.trained) and not all(encoded.trained)
            outcomes[0] += 1
        except ConfigError:
            outcomes[1] += 1
    assert min(outcomes) > 100


def test_a_parquet_file_gives_the_tokens_of_the_same_rows_in_jsonl(chat: Tokenizer, tmp_path: Path) -> None:
    """Structs in a table have the keys of all rows: a key that a row lacks must not reach the template as null."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

    def row(name: str, **arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        tool = {"type": "function", "function": {"name": name, "parameters": schema}}
        return {"messages": [HELLO[0], said, {"role": "tool", "content": "3"}, HELLO[1]], "tools": [tool]}

    rows = [row("add", a="1", b="2"), row("find", where="here")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    options = ConversationOptions(tools_field="tools")
    read = {
        name: [encode_conversation(r.values, chat, options) for r in read_file(tmp_path / name, ["messages", "tools"])]
        for name in ("a.jsonl", "a.parquet")
    }
    assert read["a.parquet"] == read["a.jsonl"]
    assert "null" not in chat.decode(read["a.parquet"][1].tokens)
