"""The dataset type `preference`: forms of TRL, axolotl and LLaMA-Factory, masks, cuts, rows that are no pairs."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from chat_formats import QWEN25, chat_tokenizer

from surogate.config.dataset_entry import DatasetEntry
from surogate.config.schema import TrainConfig
from surogate.data.asked import Asked
from surogate.data.chat.row_tokenizer import RowTokenizer as Tokenizer
from surogate.data.corpora import load_corpora
from surogate_core.api import ConfigError, Encoded
from surogate_core.plugins.discovery import load_registry
from surogate_loss_preference.kto import LABELLED, mismatched
from surogate_loss_preference.pairs import PREFERENCE

MODEL = Path(__file__).parents[2] / "examples/tiny-qwen3"
ASK, GOOD, BAD = "What is 2 + 2?", "It is four.", "It is five, of course."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(MODEL)


def said(role: str, content: str, keys: tuple[str, str] = ("role", "content")) -> dict[str, Any]:
    return dict(zip(keys, (role, content), strict=True))


def pair_of(row: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> list[Encoded]:
    guessed = PREFERENCE.found(list(row))
    found = PREFERENCE.encode(row, tokenizer, PREFERENCE.options(**{**guessed, **options}))
    assert not isinstance(found, Encoded)
    return list(found)


def texts(document: Encoded, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return the text that is not trained and the text that is."""
    asked = [t for t, trained in zip(document.tokens, document.trained, strict=True) if not trained]
    answer = [t for t, trained in zip(document.tokens, document.trained, strict=True) if trained]
    return tokenizer.decode(asked), tokenizer.decode(answer)


USER, GOOD_ONE, BAD_ONE = said("user", ASK), said("assistant", GOOD), said("assistant", BAD)
SHARE = ("from", "value")
FORMS: dict[str, dict[str, Any]] = {
    "TRL, text": {"prompt": ASK, "chosen": GOOD, "rejected": BAD},
    "TRL, messages": {"prompt": [USER], "chosen": [GOOD_ONE], "rejected": [BAD_ONE]},
    "TRL, implicit prompt": {"chosen": [USER, GOOD_ONE], "rejected": [USER, BAD_ONE]},
    "a prompt that the answers repeat": {"prompt": ASK, "chosen": [USER, GOOD_ONE], "rejected": [USER, BAD_ONE]},
    "axolotl": {"messages": [USER], "chosen": GOOD_ONE, "rejected": BAD_ONE},
    "axolotl, responses": {"question": ASK, "chosen_response": GOOD, "rejected_response": BAD},
    "LLaMA-Factory, sharegpt": {
        "conversations": [said("human", ASK, SHARE)],
        "chosen": said("gpt", GOOD, SHARE),
        "rejected": said("gpt", BAD, SHARE),
    },
    "LLaMA-Factory, alpaca": {"instruction": ASK, "input": "", "chosen": GOOD, "rejected": BAD},
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_an_entry_that_names_the_type_needs_no_key_for_columns_with_usual_names(
    kind: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    formats, path = load_registry().dataset_formats(), tmp_path / f"pairs.{kind}"

    def documents(row: dict[str, Any], **options: Any) -> list[list[int]]:
        if kind == "jsonl":
            path.write_text(json.dumps(row))
        else:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        entry = DatasetEntry(path=str(path), type="preference", options=options)
        config = TrainConfig(model=str(MODEL), datasets=[entry], validation_split_ratio=0, sequence_len=256)
        asked = Asked("pairs", group=2)
        (found,) = load_corpora(
            config, formats, MODEL, tokenizer.vocab_size, pytest.fail, asked=asked
        ).train.corpus.datasets
        return [found.tokens[a:b].tolist() for a, b in pairwise(found.offsets)]

    expected = [list(one.tokens) for one in pair_of(FORMS["TRL, messages"], tokenizer)]
    for name in FORMS:
        assert documents(FORMS[name]) == expected, name
    assert documents({"messages": [USER, GOOD_ONE], "rejected": [USER, BAD_ONE]}, chosen_field="messages") == expected
    with pytest.raises(ConfigError, match="chosen holds no prompt"):
        documents(FORMS["TRL, text"], prompt_field=None)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_pair(form: str, tokenizer: Tokenizer) -> None:
    chosen, rejected = pair_of(FORMS[form], tokenizer)
    expected = pair_of(FORMS["TRL, messages"], tokenizer)
    assert [chosen.tokens, rejected.tokens] == [one.tokens for one in expected]
    asked, answer = texts(chosen, tokenizer)
    assert ASK in asked and answer.startswith(GOOD) and ASK not in answer
    assert texts(rejected, tokenizer)[1].startswith(BAD)


def test_text_without_messages_ends_in_eos(tokenizer: Tokenizer) -> None:
    chosen, _ = pair_of({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}, tokenizer, text_as="text")
    assert texts(chosen, tokenizer)[0] == "2 + 2 =" and chosen.tokens[-1] == tokenizer.eos_id


def test_answers_that_are_lists_of_json_stay_text_unless_they_are_messages(tokenizer: Tokenizer) -> None:
    row = {"prompt": "List the sums.", "chosen": '[{"sum": 4}]', "rejected": '[{"sum": 5}]'}
    for form in ("text", "messages"):
        for name, document in zip(("chosen", "rejected"), pair_of(row, tokenizer, text_as=form), strict=True):
            assert texts(document, tokenizer)[1].startswith(row[name]), form
    stored = {name: json.dumps(value) for name, value in FORMS["TRL, messages"].items()}
    expected = pair_of(FORMS["TRL, messages"], tokenizer)
    assert [one.tokens for one in pair_of(stored, tokenizer)] == [one.tokens for one in expected]


def test_only_answers_after_the_last_question_are_trained(tokenizer: Tokenizer) -> None:
    before = [said("user", "Hello."), said("assistant", "Hello, who is it?"), USER]
    chosen, _ = pair_of({"chosen": [*before, GOOD_ONE], "rejected": [*before, BAD_ONE]}, tokenizer)
    assert texts(chosen, tokenizer)[1].startswith(GOOD) and "Hello" in texts(chosen, tokenizer)[0]


def test_a_long_prompt_keeps_its_end_and_is_counted(tokenizer: Tokenizer) -> None:
    row = {"prompt": "Once upon a time. " * 30 + ASK, "chosen": GOOD, "rejected": BAD}
    whole, cut = pair_of(row, tokenizer), pair_of(row, tokenizer, max_prompt_tokens=12)
    for before, after in zip(whole, cut, strict=True):
        assert list(after.tokens) == list(before.tokens[len(before.tokens) - len(after.tokens) :])
        assert list(after.trained).index(True) == 12 and sum(after.trained) == sum(before.trained)
    assert [(o.what, o.count, o.of) for o in cut[0].omissions if o.count] == [("the start of the prompt", 1, 1)]
    (left,) = pair_of(row, tokenizer, max_tokens=4)
    assert left.left_out == "an answer is longer than max_tokens: 4"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ASK, "chosen": GOOD, "rejected": GOOD}, "chosen and rejected are equal"),
        ({"prompt": ASK, "chosen": GOOD, "rejected": " "}, "column 'rejected' is empty"),
        ({"prompt": None, "chosen": GOOD, "rejected": BAD}, "column 'prompt' is empty"),
        ({"chosen": GOOD, "rejected": BAD}, "chosen holds no prompt. Set prompt_field"),
        ({"chosen": [USER, GOOD_ONE], "rejected": [said("user", "Else?"), BAD_ONE]}, "begin with different prompts"),
        (
            {"prompt": f"A story. {ASK}", "chosen": [USER, GOOD_ONE], "rejected": [USER, BAD_ONE]},
            "column 'prompt' is another prompt than the one that chosen and rejected begin with. Remove such rows, or "
            "set prompt_field: null",
        ),
        ({"prompt": ASK, "chosen": 5, "rejected": BAD}, "column 'chosen' must be text, a message or a list of mess"),
    ],
)
def test_a_row_that_is_no_pair_is_refused(row: dict[str, Any], message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=message):
        pair_of(row, tokenizer)


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
RESULT = {"role": "tool", "content": "4"}
AGENT = [USER, CALL, RESULT]
"""A prompt that ends with the result of a tool, as in data of agents."""

PREFILLED = [USER, said("assistant", "Let me see.")]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(chat_tokenizer(tmp_path_factory.mktemp("calling") / "model", QWEN25).directory)


@pytest.mark.parametrize("asked", [AGENT, PREFILLED], ids=["a result of a tool", "a message of the assistant"])
def test_the_answer_begins_where_the_messages_of_the_prompt_end(asked: list[Any], calling: Tokenizer) -> None:
    rows: dict[str, dict[str, Any]] = {
        "a column": {"prompt": asked, "chosen": [GOOD_ONE], "rejected": [BAD_ONE]},
        "implicit": {"chosen": [*asked, GOOD_ONE], "rejected": [*asked, BAD_ONE]},
    }
    for name, row in rows.items():
        chosen, rejected = pair_of(row, calling)
        assert texts(chosen, calling)[1] == f"{GOOD}<|im_end|>", name
        assert texts(rejected, calling)[1] == f"{BAD}<|im_end|>", name
    options = LABELLED.options()
    row = {"prompt": asked, "completion": [GOOD_ONE], "label": True}
    (alone,) = LABELLED.encode(row, calling, options)  # type: ignore[misc]
    assert isinstance(alone, Encoded) and texts(alone, calling)[1] == f"{GOOD}<|im_end|>"


def test_the_length_of_a_prompt_counts_calls_in_it(calling: Tokenizer) -> None:
    row = {"prompt": AGENT, "chosen": [GOOD_ONE], "rejected": [BAD_ONE]}
    whole, cut = pair_of(row, calling), pair_of(row, calling, max_prompt_tokens=20)
    assert list(whole[0].trained).index(True) > 20
    assert all(list(one.trained).index(True) == 20 for one in cut)


def test_every_answer_of_a_conversation_after_the_prompt_is_trained(calling: Tokenizer) -> None:
    more = [said("user", "Sure?"), said("assistant", "Yes.")]
    chosen, rejected = pair_of({"prompt": [USER], "chosen": [GOOD_ONE, *more], "rejected": [BAD_ONE]}, calling)
    assert texts(chosen, calling)[1] == f"{GOOD}<|im_end|>Yes.<|im_end|>"
    assert texts(rejected, calling)[1] == f"{BAD}<|im_end|>"


def test_a_mismatched_answer_of_kto_follows_the_whole_prompt(calling: Tokenizer) -> None:
    def document(asked: list[Any], answer: str) -> tuple[Any, Any]:
        row = {"prompt": asked, "completion": answer, "label": True}
        (one,) = LABELLED.encode(row, calling, LABELLED.options())  # type: ignore[misc]
        assert isinstance(one, Encoded)
        tokens = np.array(one.tokens)
        return tokens, np.where(np.roll(one.trained, -1), np.roll(tokens, -1), -1)

    first, second = mismatched([document(AGENT, GOOD), document([USER], BAD)])
    prompt = texts(pair_of({"prompt": AGENT, "chosen": GOOD, "rejected": BAD}, calling)[0], calling)[0]
    text = calling.decode(first[0].tolist())
    assert text.startswith(prompt.removesuffix("\n")) and text.rstrip().endswith(f"{BAD}<|im_end|>")
    assert GOOD in calling.decode(second[0].tolist())
