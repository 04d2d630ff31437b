"""Makes reStructuredText of this project's docstrings, for Sphinx.

Docstrings are written to be read in the source: code in single backticks, examples indented after a colon, and fields
of a class as a table of two columns, the name and what it means.
"""

from __future__ import annotations

import re

from sphinx.application import Sphinx

_ROW = re.compile(r"^(?P<name>[\w<>]+(?:, [\w<>]+)*)(?:\s{2,}(?P<text>\S.*))?$")
_NARROW_ROW = re.compile(r"^(?P<name>\w+) (?P<text>.*)$")  # of a name as wide as its column
_CODE = re.compile(r"(`[^`]*`)")


def as_rest(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Rewrite the lines of one docstring in place."""
    fields = getattr(obj, "__annotations__", {})
    written: list[str] = []
    in_row = False
    for number, line in enumerate(lines):
        rest = lines[number + 1 :]
        row = _ROW.match(line)
        narrow = _NARROW_ROW.match(line) if in_row and lines[number - 1] else None
        if narrow and narrow["name"] in fields:
            row = row or narrow
        indented = line.startswith(" ")
        if row and (row["text"] or (rest and rest[0].startswith(" "))):
            in_row = True
            written += ["", f"``{row['name']}``", f"    {escaped(row['text'] or '')}"]
        elif in_row and indented:
            written.append(f"    {escaped(line.strip())}")
        else:
            if in_row and line:
                written.append("")
            in_row = in_row and not line
            begins_code = line.endswith(":") and len(rest) > 1 and not rest[0] and rest[1].startswith(" ")
            written.append(f"{escaped(line)}:" if begins_code else line if indented else escaped(line))
    lines[:] = written


def escaped(text: str) -> str:
    """Keep `*`, `|` and "file:" from meaning anything, outside of code."""
    return "".join(
        part if part.startswith("`") else re.sub(r"([*|]|(?<=file):)", r"\\\1", part) for part in _CODE.split(text)
    )


def met_before(app: Sphinx, what: str, name: str, obj: object, skip: bool, options: object) -> bool | None:
    """Leave out a name that another module of the page has too."""
    if what != "module" or not hasattr(obj, "__module__"):
        return None
    module = app.env.ref_context.get("py:module")
    return None if _first.setdefault((app.env.docname, f"{obj.__module__}.{name}"), module) == module else True


_first: dict[tuple[str, str], str | None] = {}
"""By page and definition: the module that shows it."""


def setup(app: Sphinx) -> None:
    app.connect("autodoc-skip-member", met_before)
    app.connect("autodoc-process-docstring", as_rest)
