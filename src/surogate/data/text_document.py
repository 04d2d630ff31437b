"""A .txt file that is one document, read in parts."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from surogate_core.errors import ConfigError

from .divide import Divide
from .row import Largest, Row


def read_document(file: BinaryIO, path: Path, largest: Largest, divide: Divide) -> Iterator[Row]:
    """Yield the parts of the document, as `divide` makes them. Raises ConfigError if it is too large, or not UTF-8."""
    text = _Text(file, path, largest)
    text.refuse_above(path.stat().st_size)  # without reading it, unless it is larger decompressed
    parts = divide(text.more)
    part, first = next(parts), True
    for following in parts:
        text.held -= len(part.encode())
        yield Row(str(path), {"text": part}, 0, first=first, last=False)
        part, first = following, False
    yield Row(str(path), {"text": part}, 0, first=first)


class _Text:
    """The characters of a UTF-8 file without its byte order mark. held: bytes that were read and not yielded."""

    def __init__(self, file: BinaryIO, path: Path, largest: Largest) -> None:
        self._file, self._path, self._largest = file, path, largest
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._bytes, self._mark = 0, 0
        self.held = 0

    def more(self, chars: int) -> str:
        text = ""
        while not text:
            data = self._file.read(chars)
            pending = len(self._decoder.getstate()[0])
            if not self._bytes and data.startswith(codecs.BOM_UTF8):
                data, self._mark = data.removeprefix(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = self._bytes - pending + error.start
                raise ConfigError(
                    f"{self._path}: not UTF-8: byte 0x{error.object[error.start]:02x} at offset {at}. Convert it "
                    "(iconv -t UTF-8)."
                ) from error
            self._count(len(data))
            if not data:
                break
        return text

    def refuse_above(self, size: int) -> None:
        most = self._largest.document
        if size > most:
            raise ConfigError(
                f"{self._path}: the document has more than {most:,} bytes (max_document_bytes). Set sample_by to line "
                "or paragraph, split the file, or raise max_document_bytes of the entry."
            )

    def _count(self, size: int) -> None:
        self._bytes += size
        self.held += size
        self.refuse_above(self._bytes + self._mark)
        if self.held > self._largest.held:
            raise ConfigError(
                f"{self._path}: more than {self._largest.held:,} bytes of the document would be held in memory: it "
                "cannot be tokenized in parts, as it lacks lines to cut between, or its dataset type or the tokenizer "
                "reads a text whole. Set sample_by to line or paragraph, or split the file."
            )
