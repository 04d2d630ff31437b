from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surogate.data.cache import TokenDataset
from surogate.data.pack import DocumentSpans, PackedRows, pack, split_validation
from surogate.data.pieces import max_pieces
from surogate_core.errors import ConfigError

lengths_lists = st.lists(st.integers(1, 70), min_size=1, max_size=60)
sequence_lens = st.integers(2, 40)


def dataset_of(lengths: list[int], first_token: int = 0) -> TokenDataset:
    """Every token is its position, counted from `first_token`."""
    n = sum(lengths)
    return TokenDataset(
        tokens=np.arange(first_token, first_token + n, dtype=np.uint32),
        mask=np.packbits(np.ones(n, np.bool_), bitorder="little"),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        n_bytes=n,
        max_token=first_token + n - 1,
        n_trained=n,
    )


def documents_of(*lengths: list[int]) -> DocumentSpans:
    firsts = np.cumsum([0, *map(sum, lengths)])
    return DocumentSpans.of([dataset_of(own, int(first)) for own, first in zip(lengths, firsts, strict=False)])


def row_lengths(rows: PackedRows) -> list[list[int]]:
    lengths = rows.stop - rows.start
    return [lengths[a:b].tolist() for a, b in zip(rows.row_offsets[:-1], rows.row_offsets[1:], strict=True)]


def tokens_of(start: np.ndarray, stop: np.ndarray) -> list[int]:
    return sorted(token for a, b in zip(start.tolist(), stop.tolist(), strict=True) for token in range(a, b))


def pieces_by_hand(lengths: list[int], sequence_len: int) -> list[int]:
    pieces = []
    for length in lengths:
        while length > 0:
            pieces.append(min(length, sequence_len))
            length -= sequence_len
    return [piece for piece in pieces if piece > 1]


@given(lengths_lists, sequence_lens, st.booleans())
def test_packing_loses_and_duplicates_no_token(lengths: list[int], sequence_len: int, packing: bool) -> None:
    documents = documents_of(lengths)
    rows = pack(documents, sequence_len, packing)
    kept = tokens_of(rows.start, rows.stop)
    assert len(kept) == len(set(kept))
    assert sorted((rows.stop - rows.start).tolist()) == sorted(pieces_by_hand(lengths, sequence_len))
    # what is missing are pieces of a single token: the last token of a document
    missing = set(range(sum(lengths))) - set(kept)
    assert missing <= {stop - 1 for stop in documents.stop.tolist()}


@given(lengths_lists, sequence_lens, st.booleans())
def test_no_row_is_overfull_and_no_piece_crosses_a_document(
    lengths: list[int], sequence_len: int, packing: bool
) -> None:
    documents = documents_of(lengths)
    rows = pack(documents, sequence_len, packing)
    for pieces in row_lengths(rows):
        assert 0 < sum(pieces) <= sequence_len
        assert 1 <= len(pieces) <= (max_pieces(sequence_len) if packing else 1)
    owner = np.searchsorted(documents.start, rows.start, side="right") - 1
    assert (rows.start >= documents.start[owner]).all() and (rows.stop <= documents.stop[owner]).all()


@given(st.lists(st.integers(2, 40), min_size=1, max_size=80), st.integers(8, 40))
def test_rows_equal_those_of_piecewise_best_fit_decreasing(lengths: list[int], sequence_len: int) -> None:
    rooms: list[list[int]] = []
    for length in sorted(pieces_by_hand(lengths, sequence_len), reverse=True):
        fits = [row for row in rooms if sequence_len - sum(row) >= length and len(row) < max_pieces(sequence_len)]
        if fits:
            max(fits, key=sum).append(length)
        else:
            rooms.append([length])
    packed = pack(documents_of(lengths), sequence_len)
    assert packed.n_rows == len(rooms)
    # rows of equal room and different fill are alike to the rule unless the limit of pieces bites
    if all(len(row) < max_pieces(sequence_len) for row in rooms):
        assert sorted(sum(row) for row in row_lengths(packed)) == sorted(map(sum, rooms))


def test_packing_is_dense_and_deterministic() -> None:
    lengths = np.random.default_rng(0).integers(2, 2049, 20_000)
    documents = documents_of(lengths.tolist())
    first, second = pack(documents, 2048), pack(documents, 2048)
    assert first.n_tokens / (first.n_rows * 2048) > 0.99
    assert (first.start == second.start).all() and (first.row_offsets == second.row_offsets).all()


def test_without_packing_a_row_holds_one_piece_in_document_order() -> None:
    rows = pack(documents_of([5, 20, 3]), 8, sample_packing=False)
    assert row_lengths(rows) == [[5], [8], [8], [4], [3]]
    assert rows.max_documents == 2


def test_sequence_len_of_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="sequence_len: 1"):
        pack(documents_of([5]), 1)


def test_datasets_are_concatenated_and_read_from_their_own_tokens() -> None:
    documents = documents_of([3, 4], [5], [2, 2])
    assert documents.start.tolist() == [0, 3, 7, 12, 14] and documents.stop.tolist() == [3, 7, 12, 14, 16]
    positions = np.array([15, 0, 7, 11, 6, 12])
    assert documents.corpus.read(positions)[0].tolist() == positions.tolist()


@given(lengths_lists, st.floats(0, 0.99), st.integers(0, 2**64 - 1))
def test_validation_takes_its_share_and_the_parts_are_disjoint(lengths: list[int], ratio: float, seed: int) -> None:
    documents = documents_of(lengths)
    train, valid = split_validation(documents, ratio, seed)
    assert valid.n_tokens == round(ratio * sum(lengths))
    assert sorted(tokens_of(train.start, train.stop) + tokens_of(valid.start, valid.stop)) == list(range(sum(lengths)))
    cut = set(train.stop.tolist()) & set(valid.start.tolist()) - set(documents.start.tolist())
    assert len(cut) <= 1  # at most one document is cut, its head trained
    again = split_validation(documents, ratio, seed)
    assert (again[0].start == train.start).all() and (again[1].stop == valid.stop).all()


def test_validation_of_a_single_document_is_its_tail() -> None:
    train, valid = split_validation(documents_of([1000]), 0.1, 7)
    assert (train.start.tolist(), train.stop.tolist()) == ([0], [900])
    assert (valid.start.tolist(), valid.stop.tolist()) == ([900], [1000])


def test_validation_takes_whole_pieces() -> None:
    for lengths, ratio, held_out in (([1000], 0.1, 88), ([90], 0.1, 0), ([90], 0.9, 90), ([192], 0.2, 48)):
        train, valid = split_validation(documents_of(lengths), ratio, 7, piece=48)
        assert (train.n_tokens, valid.n_tokens) == (lengths[0] - held_out, held_out)


def test_validation_depends_on_the_seed() -> None:
    documents = documents_of([10] * 100)
    assert (
        split_validation(documents, 0.2, 1)[1].start.tolist() != split_validation(documents, 0.2, 2)[1].start.tolist()
    )


@pytest.mark.parametrize("ratio", [-0.1, 1.0, float("nan")])
def test_a_validation_ratio_outside_0_to_1_is_refused(ratio: float) -> None:
    with pytest.raises(ConfigError, match="validation_split_ratio"):
        split_validation(documents_of([10]), ratio, 1)
