"""The pages of the documentation, and what a topic means: a page, a section, or a key of the config."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path

from surogate_core.api import ConfigError

INSTALLED = Path(__file__).parent / "docs"
IN_CHECKOUT = (Path(__file__).parent / "../../../../docs").resolve()
CONFIG = "reference/config"

_COMMENT = re.compile(r"^<!--.*?-->\n", re.M | re.S)
_HEADING = re.compile(r"^(#+) (.*)$", re.M)
_FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
_ROW = re.compile(r"^\| `([\w.]+)` \| (.*) \|$", re.M)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Page:
    """A page. name: its path below docs/, without the suffix."""

    name: str
    file: Path

    @cached_property
    def text(self) -> str:
        """The page without comments, which are for tests."""
        return _COMMENT.sub("", self.file.read_text(encoding="utf-8"))

    @property
    def title(self) -> str:
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def summary(self) -> str:
        """The first sentence below the title."""
        after = _FENCE.sub("", self.text.partition("\n")[2])
        paragraphs = (part.strip() for part in after.split("\n\n"))
        first = next((part for part in paragraphs if part and (part[0].isupper() or part[0] == "`")), "")
        text = _LINK.sub(r"\1", " ".join(first.split()))
        return re.split(r"(?<=\.) (?=[A-Z`])", text)[0].rstrip(":")

    def sections(self) -> Iterator[tuple[str, str]]:
        """Yield (heading, text) of each section below the title, with what is below it."""
        code = [match.span() for match in _FENCE.finditer(self.text)]
        inside = [m for m in _HEADING.finditer(self.text) if not any(a <= m.start() < b for a, b in code)]
        for number, match in enumerate(inside[1:], 1):
            level = len(match[1])
            end = next((m.start() for m in inside[number + 1 :] if len(m[1]) <= level), len(self.text))
            yield match[2], self.text[match.start() : end]


def pages(folder: Path | None = None) -> dict[str, Page]:
    """Return the pages by name."""
    root = folder or (INSTALLED if INSTALLED.is_dir() else IN_CHECKOUT)
    files = sorted(root.rglob("*.md"))
    if not files:
        raise ConfigError(f"docs: {root} has no pages. Install the wheel of surogate-docs again.")
    names = (path.relative_to(root).with_suffix("").as_posix() for path in files)
    return {name: Page(name, path) for name, path in zip(names, files, strict=True)}


def find(topic: str, all_pages: dict[str, Page]) -> str:
    """Return the text of a topic: a page by its name or title, a key of the config, or all sections of that heading.

    Raises ConfigError if there is none, with the nearest topics and the pages that say it most often.
    """
    wanted = _folded(topic)
    for page in all_pages.values():
        if wanted in (_folded(page.name), _folded(page.name.rpartition("/")[2]), _folded(page.title)):
            return page.text
    if row := _key(topic.partition("=")[0].strip(), all_pages):
        return row
    sections = [
        f"{text.strip()}\n\n(in {page.name})\n"
        for page in all_pages.values()
        for heading, text in page.sections()
        if _folded(heading) == wanted
    ]
    if sections:
        return "\n".join(sections)
    known = {_folded(page.name.rpartition("/")[2]): page.name for page in all_pages.values()}
    known |= {_folded(heading): heading for page in all_pages.values() for heading, _ in page.sections()}
    if CONFIG in all_pages:
        known |= {_folded(key): key for key, _ in _ROW.findall(all_pages[CONFIG].text)}
    near = [known[name] for name in get_close_matches(wanted, known, n=3, cutoff=0.75)]
    counts = {page.name: f"-{_folded(page.text)}-".count(f"-{wanted}-") for page in all_pages.values()}
    near += sorted((name for name in counts if counts[name]), key=lambda name: -counts[name])[: 3 - len(near)]
    hint = f"near: {', '.join(near)}" if near else "surogate docs lists the pages"
    raise ConfigError(f"docs: there is no page, section or key {topic!r}; {hint}")


def _key(key: str, all_pages: dict[str, Page]) -> str:
    """Return the rows of the config reference about a key, as a list."""
    if CONFIG not in all_pages:
        return ""
    found = []
    for heading, text in all_pages[CONFIG].sections():
        for name, row in _ROW.findall(text):
            if name == key:
                cells = [cell.replace("\\|", "|").strip() for cell in re.split(r"(?<!\\)\|", row)]
                head = next(line for line in text.splitlines() if line.startswith("| "))
                names = [cell.strip() for cell in head.strip("|").split("|")][1:]
                lines = [f"- {name}: {cell}" for name, cell in zip(names, cells, strict=False) if cell]
                found.append("\n".join([f"# {key}", "", f"{heading}:", "", *lines, ""]))
    return "\n".join(found)


def _folded(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
