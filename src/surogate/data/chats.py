"""The conversations of a run's data, as messages and as the tokens that are trained."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from surogate_core.api import DatasetFormatDef, Encoded
from surogate_core.errors import ConfigError

from ..config.dataset_entry import DatasetEntry
from .chat.conversation import ConversationOptions, encode_conversation, read_conversation
from .chat.row_tokenizer import RowTokenizer
from .chat.template import ChatTemplate
from .corpora import format_of, source_of
from .pack import PackedRows
from .row import Row, Wanted, with_columns


@dataclass(frozen=True)
class Chat:
    """A conversation of the data.

    where      place of its row, as messages name it
    messages   as the chat template reads them
    tools      JSON schemas; None if the row has none
    variables  values of variables of the template, `chat_template_kwargs` of its dataset
    template   the template with these values
    encoded    the tokens, and whether each is trained
    """

    where: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None
    variables: Mapping[str, Any]
    template: ChatTemplate
    encoded: Encoded


def chats_of(
    entries: Mapping[str, DatasetEntry],
    formats: Mapping[str, DatasetFormatDef],
    loss_scale: str,
    tokenizer: RowTokenizer,
    most: int,
    places: Collection[str] | None = None,
) -> list[Chat]:
    """Return at most `most` conversations of entries, which are named by their keys.

    places: of the rows that are wanted; None: the first ones. Rows that are not trained are left out. Raises
    ConfigError for a row that its type refuses.
    """
    found: list[Chat] = []
    for key, entry in entries.items():
        source = source_of(entry, key)
        chosen, options = format_of(source, entry, formats, loss_scale, key)
        if not isinstance(options, ConversationOptions):
            continue
        wanted = Wanted(chosen.fields(options), chosen.optional(options))
        for row in source.rows(None):
            if len(found) == most:
                return found
            if places is None or row.where in places:
                found += _chat(with_columns(row, wanted), options, tokenizer, skip_bad=entry.bad_rows == "skip")
    return found


def _chat(row: Row, options: ConversationOptions, tokenizer: RowTokenizer, *, skip_bad: bool) -> Iterator[Chat]:
    """Yield the conversation of a row, unless it is not trained."""
    try:
        encoded = encode_conversation(row.values, tokenizer, options)
        chat = read_conversation(row.values, options)
    except ConfigError as error:
        if skip_bad:
            return
        raise ConfigError(f"{row.where}: {error}") from error
    if not encoded.tokens:
        return
    assert tokenizer.chat_template is not None  # `encode_conversation` has rendered with it
    variables = options.chat_template_kwargs
    template = tokenizer.chat_template.with_variables(variables)
    yield Chat(row.where, chat.messages, chat.tools, variables, template, encoded)


def places_of(rows: PackedRows, most: int) -> list[str]:
    """Return the places of at most `most` documents of packed rows, drawn at random, always the same ones."""
    corpus = rows.corpus
    _, starts, _ = rows.documents(np.arange(rows.n_rows))
    numbers = np.unique(corpus.documents(np.unique(starts)))
    found: dict[str, None] = {}
    drawn = np.random.default_rng(0).choice(numbers, min(most, len(numbers)), replace=False)
    for number in np.sort(drawn).tolist():
        owner = int(np.searchsorted(corpus.document_bases, number, side="right")) - 1
        found[corpus.datasets[owner].where(number - int(corpus.document_bases[owner]))] = None
    return list(found)
