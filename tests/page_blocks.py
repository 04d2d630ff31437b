"""The fenced blocks of a page, and what the comments before them say of a test (`docs/check_docs.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^<!-- test: setup (?P<setup>[^>]*?) -->$"
    r"|(?:<!-- test: (?P<todo>[^>]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block. `todo`: "run", "file", "output", "quote", or "" for no test. `file`: of "file" and "quote"."""

    language: str
    text: str
    todo: str
    file: str
    code: int
    line: int


def blocks(document: Path) -> Iterator[Block]:
    content = document.read_text()
    for match in _FENCE.finditer(content):
        if match["setup"]:
            yield Block("bash", match["setup"], "run", "", 0, content.count("\n", 0, match.start()) + 1)
            continue
        words = (match["todo"] or "").split()
        line = content.count("\n", 0, match.start("language")) + 1
        where = f"{document.name}:{line}"
        todo = words[0].rstrip(",") if words else ""
        assert todo in ("", "run", "file", "output", "quote"), f"{where}: unknown comment {match['todo']!r}"
        code = int(words[2]) if words[1:2] == ["exit"] else 0
        yield Block(match["language"], match["text"], todo, words[1] if todo in ("file", "quote") else "", code, line)
