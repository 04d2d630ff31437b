"""The sections of a run's data, from the document of `surogate tokenize --debug --json`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..reporting.text import counted
from .records import Json

SHOWN = 1600
"""Characters of a piece of a document that are shown at most: its beginning and its end."""

ROW_CHARACTERS = 400
"""Characters of a row that is left out."""

LONGEST_LINE = 1 << 20
"""Bytes of a file that are read to show a row that is left out."""


class Piece(NamedTuple):
    """A piece of a document. cut: characters that are not shown in the middle of it, in front of `end`."""

    text: str
    trained: bool
    cut: int = 0
    end: str = ""


@dataclass(frozen=True)
class Shown:
    """A document as the model reads it. missing: its tokens that no row has. side: chosen or rejected, of a pair."""

    where: str
    side: str
    tokens: int
    missing: int
    pieces: list[Piece]


@dataclass(frozen=True)
class Out:
    """Rows or parts that are left out: a count, the reason, the first one and its text."""

    count: str
    why: str
    first: str
    text: str
    tokens: int | None


class Bin(NamedTuple):
    """A bar of the histogram: documents of `least` to `most` tokens; `over`: longer than a row."""

    height: float
    least: int
    most: int
    documents: int
    over: bool


@dataclass(frozen=True)
class Packing:
    """Rows of `sequence_len`, each a list of (share of the row, share of it that is trained, tokens)."""

    says: str
    rows: list[list[tuple[float, float, int]]]


@dataclass(frozen=True)
class Dataset:
    """An entry of the config, and what is said about its lengths."""

    path: str
    type: str
    unit: str
    documents: int
    tokens: int
    trained: float
    says: str
    bins: list[Bin]
    left_out: list[Out]
    shown: list[Shown]


def datasets_of(document: Json, folder: Path) -> list[Dataset]:
    """Return the data sets of a document. folder: that of the run's config, beside which places of rows may lie."""
    length = document["rows"]["train"]["sequence_len"]
    return [_dataset(one, document, length, folder) for one in document["datasets"]]


def packing_of(document: Json) -> dict[str, Packing]:
    """Return the packing of the rows to train and to validate."""
    return {part: _packing(rows) for part, rows in document["rows"].items()}


def _dataset(one: Json, document: Json, length: int, folder: Path) -> Dataset:
    unit = {1: "documents", 2: "pairs"}.get(one["group"], f"groups of {one['group']}")
    count, most = one["documents"] // one["group"], max((n for *_, n in one["histogram"]), default=1)
    bins = [Bin(n / most, low, high, n, low > length) for low, high, n in one["histogram"]]
    least, longest = one["histogram"][0][0], one["histogram"][-1][1]
    says = f"{count:,} {unit} of {least:,} to {longest:,} tokens; a row has {length:,}."
    return Dataset(
        path=one["path"],
        type=one["type"],
        unit=unit,
        documents=count,
        tokens=one["tokens"],
        trained=one["trained"] / one["tokens"] if one["tokens"] else 0.0,
        says=says,
        bins=bins,
        left_out=[_out(found, folder) for found in one["left_out"]],
        shown=[
            _shown(d, one["group"])
            for d in document["documents"]
            if (d["path"], d["type"]) == (one["path"], one["type"])
        ],
    )


def _out(found: Json, folder: Path) -> Out:
    part = f"{found['what']} of " if found["what"] else ""
    text = "" if found["what"] else row_text(found["first"], folder)
    return Out(
        f"{part}{found['count']:,} of {found['of']:,} {found['unit']}",
        found["why"],
        found["first"],
        text,
        found["tokens"],
    )


def row_text(place: str, folder: Path) -> str:
    """Return the line of a file that messages name as rows.jsonl:7, cut; "" for other places."""
    path, _, line = place.rpartition(":")
    if not path or not line.isdigit():
        return ""
    file = next((each for each in (Path(path), folder / path) if each.is_file()), None)
    if file is None or file.suffix not in (".jsonl", ".json", ".txt", ".csv", ".tsv"):
        return ""
    with file.open("rb") as lines:
        for _ in range(int(line) - 1):
            if not lines.readline():
                return ""
        text = lines.readline(LONGEST_LINE).decode("utf-8", "replace").strip()
    return f"{text[:ROW_CHARACTERS]}…" if len(text) > ROW_CHARACTERS else text


def _shown(document: Json, group: int) -> Shown:
    side = ("chosen", "rejected")[(document["document"] - 1) % 2] if group == 2 else ""
    tokens = document["tokens"]
    pieces = [_piece(piece) for piece in document["pieces"]]
    return Shown(document["row"], side, tokens, document["whole_tokens"] - tokens, pieces)


def _piece(piece: Json) -> Piece:
    text, half = piece["text"], SHOWN // 2
    if len(text) <= SHOWN + 100:
        return Piece(text, piece["trained"])
    return Piece(text[:half], piece["trained"], len(text) - 2 * half, text[-half:])


def _packing(rows: Json) -> Packing:
    length = rows["sequence_len"]
    says = (
        f"{counted(rows['tokens'], 'token')} in {counted(rows['rows'], 'row')} of {length:,}: "
        f"{rows['documents_per_row']:.3g} documents a row, {rows['padding']:.1%} padding."
    )
    return Packing(says, [[(n / length, t / n if n else 0.0, n) for n, t in row] for row in rows["first_rows"]])


def tiles_of(document: Json) -> Iterator[tuple[str, str, str]]:
    """Yield (what, figure, beside it) of the data: documents, tokens, the trained share, rows, padding."""
    sets, rows = document["datasets"], document["rows"]
    tokens, trained = (sum(one[key] for one in sets) for key in ("tokens", "trained"))
    yield "documents", f"{sum(one['documents'] for one in sets):,}", counted(len(sets), "data set")
    yield "tokens", f"{tokens:,}", f"{trained / tokens if tokens else 0:.1%} are trained"
    yield "rows to train", f"{rows['train']['rows']:,}", f"of {rows['train']['sequence_len']:,} tokens"
    if "validate" in rows:
        yield "rows to validate", f"{rows['validate']['rows']:,}", f"{rows['validate']['tokens']:,} tokens"
    out = sum(one["tokens"] or 0 for entry in sets for one in entry["left_out"])
    gone = sum(1 for entry in sets for _ in entry["left_out"])
    yield "padding", f"{rows['train']['padding']:.1%}", "of the rows to train"
    reasons = counted(gone, "reason")
    if out:
        yield "left out", f"{out:,}", f"tokens, {reasons}"
    else:
        yield "left out", "rows" if gone else "nothing", reasons if gone else "of the data"
