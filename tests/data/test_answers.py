"""Mismatched answers of KTO, the dataset type `labelled`, and files with rows that are no pairs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from surogate.config.dataset_entry import DatasetEntry
from surogate.data.asked import Asked
from surogate.data.cache import TokenDataset
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.loader import micro_batch
from surogate.data.pack import DocumentSpans, pack
from surogate.data.spans import truncate
from surogate.data.tokenize import tokenize_dataset
from surogate_core.api import ConfigError, Encoded
from surogate_core.testing.ops import check_op
from surogate_loss_preference.kto import KTO, KTO_OPS, LABELLED
from surogate_loss_preference.pairs import PREFERENCE, PREFERENCE_WITH_MARGIN

ASK, GOOD = "What is 2 + 2?", "It is four."


def test_a_prepass_reads_the_answers_of_other_prompts_in_the_same_row(rows_of_answers: Any) -> None:
    rows = rows_of_answers(Asked("kto", tuple(KTO.columns(KTO.options())), 1, KTO.prepass))
    batch = micro_batch(rows, np.arange(rows.n_rows), rows.n_rows, 0)
    before = batch.before
    assert before is not None and before.asked["mean.log_ratio"] == batch.asked["mean.log_ratio"] == 0
    alone = 0
    for row in range(rows.n_rows):

        def inside(one: Any, row: int = row) -> list[list[int]]:
            spans = one.asked["groups"][: one.n_groups, 0].tolist()
            return [one.tokens[a:b].tolist() for a, b in spans if a // rows.sequence_len == row]

        given, made = inside(batch), inside(before)
        alone += len(given) == 1
        # a document n has the prompt [n, n] and an answer of tokens n + 100
        pairs = zip(given, [given[-1], *given[:-1]], strict=True) if len(given) > 1 else ()
        assert made == [[*own[:2], *other[2:]] for own, other in pairs]
    assert alone and before.n_groups == batch.n_groups - alone > 1
    labels = before.targets[before.targets >= 0]
    assert (labels >= 100).all() and before.n_valid == len(labels)
    starts = before.asked["groups"][: before.n_groups, 0, 0]
    assert (before.positions[starts] == 0).all() and np.isin(starts, before.cu_seqlens).all()


@pytest.fixture
def rows_of_answers() -> Any:
    lengths = [9, 4, 6, 5, 16, 3]
    tokens = np.concatenate([[n, n, *[n + 100] * (length - 2)] for n, length in enumerate(lengths)]).astype("<u2")
    dataset = TokenDataset(
        tokens=tokens,
        mask=np.packbits(tokens >= 100, bitorder="little"),
        offsets=np.cumsum([0, *lengths]),
        n_bytes=0,
        max_token=105,
        n_trained=int((tokens >= 100).sum()),
        columns={"desirable": np.ones(len(lengths), np.float32)},
    )
    return lambda asked: pack(DocumentSpans.of([dataset]), 16, asked=asked)


def test_the_reference_of_the_op_fits_its_shape_rule() -> None:
    two, scale = torch.tensor([[-3.0], [0.0]]), torch.tensor(0.5)
    counts, mean = torch.tensor([[4.0], [0.0]]), torch.tensor(-1.0)
    given = {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    loss, *_, accuracy, by_label = check_op(KTO_OPS[0], two, counts, scale, two - 1, counts, mean, **given)
    assert float(loss) == pytest.approx(0.5 * float(torch.sigmoid(torch.tensor(-0.1)))) and accuracy == 0.5
    assert torch.allclose(by_label, 0.5 * torch.tensor([[1.0, 0.1, -3.0], [0, 0, 0]]))


@pytest.fixture(scope="module")
def tokenizer() -> RowTokenizer:
    return RowTokenizer(Path(__file__).parents[2] / "examples/tiny-qwen3")


SAID = [{"role": "user", "content": ASK}, {"role": "assistant", "content": GOOD}]


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"prompt": ASK, "completion": GOOD, "label": True}, {}),
        ({"prompt": SAID[:1], "completion": SAID[1:], "label": True}, {}),
        ({"messages": SAID, "label": "true"}, {"prompt_field": None, "completion_field": "messages"}),
    ],
)
def test_every_form_gives_the_same_answer(row: dict[str, Any], keys: dict[str, Any], tokenizer: RowTokenizer) -> None:
    options = LABELLED.options(**keys)
    (found,) = LABELLED.encode(row, tokenizer, options)  # type: ignore[misc]
    assert isinstance(found, Encoded) and found.columns == {"desirable": 1.0}
    answer = [t for t, trained in zip(found.tokens, found.trained, strict=True) if trained]
    assert tokenizer.decode(answer).startswith(GOOD)


def test_a_label_that_is_no_label_is_refused(tokenizer: RowTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"column 'label' must be true or false \(got 'good'\)"):
        LABELLED.encode({"prompt": ASK, "completion": GOOD, "label": "good"}, tokenizer, LABELLED.options())
    with pytest.raises(ConfigError, match=r"messages ends without an answer"):
        row = {"messages": SAID[:1], "label": False}
        LABELLED.encode(row, tokenizer, LABELLED.options(prompt_field=None, completion_field="messages"))


def test_rows_that_are_no_pairs_are_listed_with_file_and_line_or_counted(
    tokenizer: RowTokenizer, tmp_path: Path
) -> None:
    file = tmp_path / "pairs.jsonl"

    def said(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    asked, other = SAID[:1], [{"role": "user", "content": "And 3 + 3?"}]
    rows: dict[str, dict[str, Any]] = {
        "": {"chosen": [*asked, said("Four.")], "rejected": [*asked, said("Five.")]},
        "chosen and rejected are equal": {"chosen": SAID, "rejected": SAID},
        "column 'rejected' is empty": {"chosen": SAID, "rejected": []},
        "column 'chosen', message 0 is an empty message": {"chosen": [*asked, said("")], "rejected": SAID},
        "begin with different prompts": {"chosen": SAID, "rejected": [*other, said("Six.")]},
    }
    file.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    long = {"chosen": [*asked, said("Four. " * 40)], "rejected": SAID}

    def tokenized(**keys: Any) -> Any:
        entry = DatasetEntry(path=str(file))
        lines: list[str] = []
        found = tokenize_dataset(
            entry, PREFERENCE, PREFERENCE.options(), tokenizer, tmp_path / "cache", notice=lines.append, **keys
        )
        return found, lines

    with pytest.raises(ConfigError) as caught:
        tokenized()
    first, *others = str(caught.value).splitlines()
    assert first.startswith("4 rows cannot be used")
    for number, (line, message) in enumerate(zip(others, list(rows)[1:], strict=True), 2):
        assert f"pairs.jsonl:{number}: " in line and message in line
    found, lines = tokenized(skip_bad=True)
    assert found.n_docs == 2 and len(lines) == 4
    assert all("1 of 5 rows: bad_rows is skip, and their type refuses them: " in line for line in lines)
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[""], long)))
    spans = DocumentSpans.of([tokenized()[0]])
    notices: list[str] = []
    assert len(truncate(spans, 64, "delete", "datasets.0", notices.append)) == 1
    assert notices[0].startswith("datasets.0: 1 of 2 groups of 2 documents (50.0%) is longer than sequence_len (64;")


def test_a_pair_with_a_margin_has_it_at_both_documents_and_what_is_no_margin_is_refused(
    tokenizer: RowTokenizer,
) -> None:
    row = {"prompt": ASK, "chosen": GOOD, "rejected": "It is five."}
    options = PREFERENCE_WITH_MARGIN.options(prompt_field="prompt")
    for margin, number in ((0.5, 0.5), (2, 2.0), ("1.5", 1.5), (0, 0.0)):
        pair = PREFERENCE_WITH_MARGIN.encode({**row, "margin": margin}, tokenizer, options)
        plain = PREFERENCE.encode(row, tokenizer, PREFERENCE.options(prompt_field="prompt"))
        assert [one.columns for one in pair] == [{"margin": number}] * 2  # type: ignore[union-attr]
        assert [one.tokens for one in pair] == [one.tokens for one in plain]  # type: ignore[union-attr]
    for margin in (-1, "much", True, None, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="column 'margin' must be a number of at least 0"):
            PREFERENCE_WITH_MARGIN.encode({**row, "margin": margin}, tokenizer, options)
