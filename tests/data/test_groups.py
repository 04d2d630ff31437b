"""Groups of documents and columns, from a dataset type to the batches of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel

from surogate.config.dataset_entry import DatasetEntry
from surogate.data.asked import Asked
from surogate.data.loader import Loader, micro_batch
from surogate.data.pack import DocumentSpans, PackedRows, pack, split_validation
from surogate.data.spans import truncate
from surogate.data.tokenize import tokenize_dataset
from surogate_core.api import Column, DatasetFormatDef, Encoded, NoOptions, PrepareContext, Prepared
from surogate_core.errors import ConfigError, PluginError

COLUMNS = (Column("weight"), Column("score", "document"))
PAIRS = Asked("acme", COLUMNS, group=2)


def document(first: int, length: int, score: float) -> Encoded:
    """Tokens that count up, the first two of which are not trained; the weight of a token is the token."""
    tokens = list(range(first, first + length))
    return Encoded(tokens, [n > 1 for n in range(length)], columns={"weight": tokens, "score": score})


def encode(row: Mapping[str, Any], tokenizer: Any, options: BaseModel) -> list[Encoded]:
    n = int(row["text"])
    return [document(10 * n, 3 + n % 4, n + 0.25), document(10 * n + 100, 4 + n % 3, n + 0.5)]


def of_later_rows(row: Mapping[str, Any], tokenizer: Any, options: BaseModel) -> list[Encoded]:
    return encode({"text": str(int(row["text"]) + 4)}, tokenizer, options)


TYPE = DatasetFormatDef(
    name="acme",
    summary="",
    options=NoOptions,
    matches=lambda columns: False,
    fields=lambda options: ("text",),
    encode=encode,
    truncation="delete",
    columns=COLUMNS,
    group_size=2,
)


class FakeTokenizer:
    vocab_size = 400
    fingerprint = "fake"


def tokenized(folder: Path, made: DatasetFormatDef = TYPE, n: int = 9) -> DocumentSpans:
    file = folder / "rows.jsonl"
    file.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(n)))
    found = tokenize_dataset(DatasetEntry(path=str(file)), made, NoOptions(), FakeTokenizer(), folder / "cache")  # type: ignore[arg-type]
    return DocumentSpans.of([found])


def packed(folder: Path, sequence_len: int = 24) -> PackedRows:
    """Pairs of two datasets."""
    (folder / "other").mkdir()
    parts = [tokenized(folder, n=4), tokenized(folder / "other", replace(TYPE, encode=of_later_rows), n=5)]
    return pack(DocumentSpans.joined(parts), sequence_len, asked=PAIRS)


def test_the_documents_of_a_pair_and_the_longest_one_name_their_row(tmp_path: Path) -> None:
    spans, lines = tokenized(tmp_path, n=4), list[str]()
    (dataset,) = spans.corpus.datasets
    assert [dataset.where(number) for number in range(8)] == [f"{tmp_path}/rows.jsonl:{n // 2 + 1}" for n in range(8)]
    truncate(spans, 9, "delete", "datasets.0", lines.append)
    assert f"(9; the longest, {tmp_path}/rows.jsonl:3, has 11 tokens): left out" in lines[0]


def test_a_batch_has_both_documents_of_each_pair_in_one_row_with_their_columns(tmp_path: Path) -> None:
    rows = packed(tmp_path)
    batch = micro_batch(rows, np.arange(rows.n_rows), rows.n_rows, 0)
    groups, scores = batch.asked["groups"], batch.asked["column.score"]
    assert batch.n_groups == 9 and not groups[9:].any()
    found = []
    for (chosen, rejected), score in zip(groups[:9].tolist(), scores[:9].tolist(), strict=True):
        n = int(score[0])
        found.append(n)
        assert score == [n + 0.25, n + 0.5] and chosen[1] == rejected[0] and chosen[0] // 24 == rejected[0] // 24
        expected = encode({"text": str(n)}, None, NoOptions())
        assert [batch.tokens[a:b].tolist() for a, b in (chosen, rejected)] == [e.tokens for e in expected]
    assert sorted(found) == list(range(9))
    labelled = batch.targets >= 0
    assert np.array_equal(batch.asked["column.weight"], np.where(labelled, batch.targets, 0))


def test_steps_count_the_groups_of_all_ranks_and_keep_pairs_whole(tmp_path: Path) -> None:
    rows = packed(tmp_path)
    one, two = Loader(rows, 1, 2, seed=3), Loader(rows, 1, 2, seed=3, ranks=range(1), world_size=2)
    for index in range(one.steps_per_epoch):
        whole, part = one.step(index), two.step(index)
        assert (whole.groups, whole.valid_tokens) == (part.groups, part.valid_tokens)
        assert whole.groups == sum(batch.n_groups for batch in whole.micro)
    kept = truncate(tokenized(tmp_path), 24, "delete", "datasets.0", pytest.fail)
    train, held_out = split_validation(kept, 0.3, seed=1)
    assert len(train) + len(held_out) == 9 and 0 < len(held_out) < 9


def test_documents_of_which_none_is_a_group_are_groups_if_they_have_a_label(tmp_path: Path) -> None:
    single = replace(TYPE, group_size=1, encode=lambda row, t, o: replace(encode(row, t, o)[0], trained=[False] * 3)
                     if row["text"] == "0" else encode(row, t, o)[0])  # fmt: skip
    rows = pack(tokenized(tmp_path, single), 24, asked=Asked("acme", (), group=1))
    batch = micro_batch(rows, np.arange(rows.n_rows), rows.n_rows, 0)
    assert batch.n_groups == 8 == len({tuple(span) for span in batch.asked["groups"][:8, 0].tolist()})


def test_a_loss_makes_columns_of_its_own_of_several_numbers_per_token(tmp_path: Path) -> None:
    own = Column("own", shape=(2,), dtype="int32")

    def prepare(context: PrepareContext[Any]) -> Prepared:
        assert context.folder.name.endswith(".made") and not context.folder.exists()
        with pytest.raises(ConfigError, match=r"^key: 'nowhere' is neither a directory"):
            context.find_model("nowhere", where="key")
        assert context.trained(*context.offsets[:2]).tolist() == [False, False, True]
        return Prepared(
            {"own": np.stack([context.tokens, context.tokens + context.options], -1)}, facts={"seen": "all"}
        )

    asked = Asked("made", (own, *COLUMNS), 2, prepare=prepare, options=1)
    asked.check(TYPE, [TYPE], "datasets.0", "delete")
    with pytest.raises(ConfigError, match=r"^datasets.0: truncation_strategy: left cuts off .* loss: made reads them"):
        replace(asked, group=0).check(replace(TYPE, group_size=1), [TYPE], "datasets.0", "left")
    of_run: dict[str, Any] = {"model_dir": tmp_path, "sequence_len": 24, "notice": print, "progress": print}
    (dataset,) = tokenized(tmp_path).corpus.datasets
    completed = asked.complete(dataset, **of_run)
    assert completed.facts == {"seen": "all"}
    rows = pack(DocumentSpans.of([completed]), 24, asked=asked)
    batch = micro_batch(rows, np.arange(rows.n_rows), rows.n_rows, 0)
    labels, found = batch.targets * (batch.targets >= 0), batch.asked["column.own"]
    assert found.dtype == np.int32 and np.array_equal(found, np.stack([labels, labels + (labels > 0)], -1))
    for result, message in (
        (Prepared({"own": found[:, :1]}), r"no array own of int32 \[\d+, 2\]"),
        (Prepared({"own": np.zeros((dataset.n_tokens, 2))}), "no array own of int32"),
        (Prepared({"own": [[0, 0]] * dataset.n_tokens}), "no array own of int32"),
        ({"own": found}, "dict, not Prepared"),
    ):
        with pytest.raises(PluginError, match=f"loss made: prepare gave {message}"):
            replace(asked, prepare=lambda context, result=result: result).complete(dataset, **of_run)


def changed(document: Encoded, **columns: Any) -> Encoded:
    return replace(document, columns={**document.columns, **columns})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda pair: pair[:1], "1 documents; its group is 2"),
        (lambda pair: [pair[0], replace(pair[1], trained=[False] * len(pair[1].tokens))], "a document without"),
        (lambda pair: [replace(pair[0], columns={}), pair[1]], "no [a-z]+, which DatasetFormatDef.columns declares"),
        (lambda pair: [changed(pair[0], more=1), pair[1]], "more, which DatasetFormatDef.columns does not declare"),
        (lambda pair: [changed(pair[0], score=[1, 2]), pair[1]], "2 numbers of score for a document"),
        (lambda pair: [changed(pair[0], weight=[1, 2]), pair[1]], r"2 numbers of weight for \d+ tokens"),
        (lambda pair: [changed(pair[0], score=float("nan")), pair[1]], "not finite"),
    ],
)  # fmt: skip
def test_a_type_that_returns_other_than_it_declares_is_named(
    tmp_path: Path, result: Callable[[list[Encoded]], Any], message: str
) -> None:
    wrong = replace(TYPE, encode=lambda row, t, o: result(encode(row, t, o)))
    with pytest.raises(PluginError, match=rf"rows.jsonl:1: dataset type 'acme' returned .*{message}"):
        tokenized(tmp_path, wrong)


@pytest.mark.parametrize(
    ("asked", "strategy", "message"),
    [
        (Asked("next_token"), "delete", r"type: acme makes 2 documents of a row, but loss: next_token takes 1\. Types"),
        (
            Asked("z", (Column("age"),), 2),
            "delete",
            r"has no age \(one number per token\), which loss: z reads.*none that",
        ),
        (PAIRS, "left", r"truncation_strategy: left would cut groups of 2 documents"),
    ],
)
def test_a_type_that_does_not_fit_the_loss_is_refused(asked: Asked, strategy: str, message: str) -> None:
    PAIRS.check(TYPE, [TYPE], "datasets.0", "delete")
    with pytest.raises(ConfigError, match=f"datasets.0: .*{message}"):
        asked.check(TYPE, [TYPE], "datasets.0", strategy)


def test_a_loss_of_whole_documents_takes_no_parts_of_them() -> None:
    single, alone = replace(TYPE, group_size=1), Asked("alone", COLUMNS, 1)
    alone.check(single, [single], "datasets.0", "delete")
    replace(alone, group=0).check(single, [single], "datasets.0", "split")
    for strategy in ("split", "left", "right"):
        with pytest.raises(
            ConfigError, match=rf"{strategy} would cut documents, which loss: alone takes whole\. Remove"
        ):
            alone.check(single, [single], "datasets.0", strategy)
