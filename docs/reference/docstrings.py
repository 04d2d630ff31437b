"""Fills pages with docstrings, in place: python docs/reference/docstrings.py

A page has `<!-- docstrings: NAME ... -->` and, below, `<!-- end of docstrings -->`. What is between them is made from
the source of the names: modules, with all that they make public, or definitions. So pages say the same in a checkout,
in a terminal and on the site. A name that several modules of a page have is described once.
"""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import api

DOCS = api.ROOT / "docs"

SOURCES = {
    **{folder.name: folder for folder in (api.CORE, api.MODELS, api.MIXTURES)},
    "surogate": api.ROOT / "src/surogate",
}
"""The folder of each package that pages show."""

_PART = re.compile(r"^(<!-- docstrings: (?P<names>[\w. ]+) -->\n).*?^(?=<!-- end of docstrings -->$)", re.M | re.S)
_HEADING = re.compile(r"^(#+) ", re.M)
_ROW = re.compile(r"^(?P<name>[\w<>]+(?:, [\w<>]+)*)(?:\s{2,}(?P<text>\S.*))?$")
_NARROW_ROW = re.compile(r"^(?P<name>\w+) (?P<text>.*)$")  # of a name as wide as its column
_CODE = re.compile(r"(`[^`]*`)")
_MARK = re.compile(r"[*<]|\b_(?!\w)|(?<!\w)_\b|\[(?=[^]]*\]\()")


def pages() -> list[Path]:
    """Return the pages that show docstrings."""
    return [path for path in sorted(DOCS.rglob("*.md")) if _PART.search(path.read_text())]


def filled(text: str) -> str:
    """Return the text of a page with the docstrings of today."""
    seen: set[api.Place] = set()

    def fill(part: re.Match[str]) -> str:
        level = len(_HEADING.findall(text[: part.start()])[-1])
        lines = [line for name in part["names"].split() for line in _named(name, level + 1, seen)]
        return "\n".join([part[1], *lines, ""])

    return _PART.sub(fill, text)


def _named(name: str, level: int, seen: set[api.Place]) -> Iterator[str]:
    """Yield the lines of a module, or of a definition."""
    module, _, last = name.rpartition(".")
    if path := _file(name):
        yield from _text(ast.get_docstring(ast.parse(path.read_text())) or "", ())
        bound = api.top_level(path).keys()  # not what comes from another package
        places = {public: api.defined(path, public) for public in api.public_names(path) if public in bound}
    elif (path := _file(module)) and last in api.top_level(path):
        places = {last: api.defined(path, last)}
    else:
        raise LookupError(f"{name}: no such module or definition in {', '.join(SOURCES)}")
    for public, place in sorted(places.items(), key=lambda item: (item[0].upper(), item[0])):
        if place not in seen:
            seen.add(place)
            yield from _definition(public, place, level)


def _file(module: str) -> Path | None:
    """Return the file of a module."""
    package, _, rest = module.partition(".")
    if package not in SOURCES:
        return None
    path = SOURCES[package].joinpath(*rest.split(".")) if rest else SOURCES[package]
    found = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return found[0] if found else None


def _definition(name: str, place: api.Place, level: int) -> Iterator[str]:
    """Yield heading, signature and docstring of a name, and the docstrings of its methods."""
    node = api.top_level(place[0])[place[1]]
    yield from (f"{'#' * level} `{name}`", "", "```text", *api.described(name, place), "```", "")
    if isinstance(node, ast.ClassDef):
        fields = [field.target.id for field in node.body if _is_field(field)]
        yield from _text(ast.get_docstring(node) or "", fields)
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                yield from _method(member)
    elif isinstance(node, ast.FunctionDef):
        yield from _text(ast.get_docstring(node) or "", ())
    else:
        yield from _text(_below(place), ())


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


def _method(node: ast.FunctionDef) -> Iterator[str]:
    """Yield a list item with the docstring of a method. The signature is in that of its class."""
    if lines := list(_text(ast.get_docstring(node) or "", ())):
        yield f"- `{node.name}`: {lines[0]}"
        yield from textwrap.indent("\n".join(lines[1:]), "  ").split("\n")


def _below(place: api.Place) -> str:
    """Return the string below the assignment of a constant."""
    body = ast.parse(place[0].read_text()).body
    for node, following in pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == place[1] and isinstance(following, ast.Expr):
            value = following.value
            return str(value.value) if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
    return ""


# ---------------------------------------------------------------------------------------------------------- docstrings


def _text(docstring: str, fields: list[str] | tuple[str, ...]) -> Iterator[str]:
    """Yield Markdown of a docstring: paragraphs, code that is indented, and a table where lines have two columns."""
    lines = docstring.strip().split("\n") if docstring.strip() else []
    rows: dict[str, str] = {}
    name = ""
    code: list[str] = []
    for number, line in enumerate([*lines, ""] if lines else []):
        row = _row(lines, number, rows, fields) if number < len(lines) else None
        indented = line.startswith(" ")
        if code and line and not indented:
            yield from _fenced(code)
        if row:
            name, rows[row[0]] = row[0], row[1]
        elif rows and indented:
            rows[name] = f"{rows[name]} {line.strip()}".strip()
        elif indented or (code and not line):
            code.append(line)
        else:
            if rows:
                yield from _table(rows)
            yield _escaped(line)
    if code:
        yield from _fenced(code)
        yield ""


def _row(lines: list[str], number: int, rows: dict[str, str], fields: object) -> tuple[str, str] | None:
    """Return name and text of a line that begins a row."""
    line, following = lines[number], lines[number + 1 : number + 2]
    if row := _ROW.match(line):
        continues = bool(following and following[0].startswith(" "))
        return (row["name"], row["text"] or "") if row["text"] or continues else None
    narrow = _NARROW_ROW.match(line) if rows and lines[number - 1] else None
    return (narrow["name"], narrow["text"]) if narrow and narrow["name"] in fields else None  # type: ignore[operator]


def _table(rows: dict[str, str]) -> Iterator[str]:
    yield from ("| name | meaning |", "|---|---|")
    for name, text in rows.items():
        cell = _escaped(text).replace("|", "\\|")
        yield f"| `{name}` | {cell} |"
    rows.clear()


def _fenced(code: list[str]) -> Iterator[str]:
    yield from ("```text", *textwrap.dedent("\n".join(code)).strip("\n").split("\n"), "```", "")
    code.clear()


def _escaped(text: str) -> str:
    """Keep marks of Markdown from meaning anything, outside of code."""
    return "".join(part if part.startswith("`") else _MARK.sub(r"\\\g<0>", part) for part in _CODE.split(text))


if __name__ == "__main__":
    for page in pages():
        page.write_text(filled(page.read_text()))
