"""Checks of dataset formats. Examples are rows."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate_core.api import DatasetFormatDef, Encoded
from surogate_core.errors import ConfigError

from ..bench import LINES, Bench
from ..check import NotApplicable, proves


def _rows(definition: DatasetFormatDef, bench: Bench) -> list[dict[str, Any]]:
    """Return rows that the format reads. Raises NotApplicable if there are none."""
    given = bench.subject.examples(definition)
    columns = list(definition.fields(definition.options()))
    rows = given or [dict.fromkeys(columns, line) for line in LINES]
    if given:
        return given
    try:
        definition.encode(deepcopy(rows[0]), _tokenizer(bench), definition.options())
    except ConfigError as error:
        where = f'Give rows: SUROGATE_EXAMPLES = {{"format {definition.name}": [{{...}}]}}'
        raise NotApplicable(f"rows of plain text in {', '.join(columns)} are refused ({error}). {where}") from None
    return rows


def _tokenizer(bench: Bench) -> RowTokenizer:
    return bench.once("tokenizer", lambda: RowTokenizer(bench.model_dir()))


def _documents(found: Any) -> list[Encoded]:
    """Return the documents of a row. Raises AssertionError for anything else."""
    documents = found if isinstance(found, list | tuple) else [found]
    assert all(isinstance(one, Encoded) for one in documents), f"returns {found!r:.80}, expected Encoded"
    return list(documents)


@proves(
    "format", remedy="Return Encoded with as many `trained` as `tokens`, and neither change the row nor draw numbers."
)
def a_row_becomes_the_same_document_every_time(definition: DatasetFormatDef, bench: Bench) -> None:
    options, tokenizer = definition.options(), _tokenizer(bench)
    for row in _rows(definition, bench):
        given = deepcopy(row)
        found, again = (definition.encode(given, tokenizer, options) for _ in range(2))
        assert given == row, "encode changes the row"
        assert found == again, f"a second call returns {again!r:.80} after {found!r:.80}"
        for one in _documents(found):
            assert len(one.tokens) == len(one.trained), f"{len(one.tokens)} tokens, but {len(one.trained)} of trained"
            assert all(isinstance(t, int) and 0 <= t < 260 for t in one.tokens), "a token is not in the vocabulary"
            assert one.tokens or one.left_out, f"{row!r:.80} gives no tokens and no reason (left_out)"
            assert any(one.trained) or one.left_out, f"no token of {row!r:.80} is trained"


@proves("format", remedy="Raise ConfigError that says what is wrong with a row; a run then names its file and line.")
def a_bad_row_is_refused_or_left_out(definition: DatasetFormatDef, bench: Bench) -> None:
    options, tokenizer = definition.options(), _tokenizer(bench)
    rows, optional = _rows(definition, bench), set(definition.optional(options))
    for column in definition.fields(options):
        for bad in (*(() if column in optional else (None,)), 7, [], {"a": 1}):
            row = {**dict.fromkeys(definition.fields(options)), **deepcopy(rows[0]), column: bad}
            try:
                found = definition.encode(row, tokenizer, options)
            except ConfigError:
                continue
            except Exception as error:
                raise AssertionError(f"{column} = {bad!r} raises {error}, expected a ConfigError") from error
            assert _documents(found), f"{column} = {bad!r} returns {found!r:.60}"


@proves("format", remedy="List every column that encode reads in DatasetFormatDef.fields.")
def it_reads_the_columns_that_it_names(definition: DatasetFormatDef, bench: Bench) -> None:
    options, tokenizer, read = definition.options(), _tokenizer(bench), set[str]()

    class Row(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            read.add(name)
            return super().__getitem__(name)

        def get(self, name: str, default: Any = None) -> Any:
            read.add(name)
            return super().get(name, default)

    for row in _rows(definition, bench):
        definition.encode(Row({**dict.fromkeys(definition.fields(options)), **row}), tokenizer, options)
    unnamed = sorted(read - set(definition.fields(options)))
    assert not unnamed, f"encode reads {', '.join(unnamed)}, which fields does not name"


@proves("format", remedy="Give rows as examples that make up two steps.")
def a_run_trains_on_it(definition: DatasetFormatDef, bench: Bench) -> None:
    if definition.group_size > 1:
        raise NotApplicable(f"only losses of groups of {definition.group_size} documents train on it")
    path = bench._new("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _rows(definition, bench) * 24))
    data = [{"path": str(path), "type": definition.name}]
    losses = bench.train(max_steps=2, sequence_len=64, datasets=data).losses
    assert len(losses) == 2, f"a run of two steps reports {len(losses)}"
