"""A page: one file of HTML that loads nothing. Its text is complete without scripts, which draw the charts."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from reprlib import Repr
from typing import Any

from surogate_core.api import refuse_checkpoint
from surogate_core.errors import ConfigError
from surogate_core.version import __version__

from ..machine.replaced_file import replaced
from ..reporting.text import count_text
from .headline import seconds_text, size_text

ASSETS = Path(__file__).parent / "assets"
"""Templates, style and scripts."""

SCRIPTS = ("base.js", "series.js", "memory.js", "numerics.js", "start.js")
"""One script, which shares the names of all files."""

UPLOT = ("vendor/uPlot.iife.min.js", "vendor/uPlot.min.css", "vendor/uPlot.LICENSE")
"""uPlot 1.6.32 by Leon Sorokin: https://github.com/leeoniya/uPlot. The page has its licence too."""

MARK = '<meta name="generator" content="surogate report">'
"""A line of every page, by which a page is known as one that may be replaced."""


LONGEST_VALUE = 2000
"""Characters of a value of a config."""


class _Brief(Repr):
    """Values of configs as text, cut: by aliases, YAML can name a list of a billion entries."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxlist, self.maxstring, self.maxother = 4, 24, 24, 400, 400


def write_page(path: Path, template: str, facts: Mapping[str, Any], drawn: Mapping[str, Any]) -> int:
    """Write a page and return its bytes. It appears whole or not at all, in place of an earlier page only.

    Raises ConfigError for a path that cannot be written, or that holds anything but a page.
    """
    refuse_other(path)
    text = rendered(template, facts, drawn).encode("utf-8", "replace")  # half a surrogate pair is no character
    try:
        with replaced(path) as fresh:
            fresh.write_bytes(text)
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot be written: {error.strerror or error}.") from None
    return len(text)


def refuse_other(path: Path) -> None:
    """Raise ConfigError unless a page may be written to `path`: nothing is there, or an earlier page."""
    refuse_checkpoint(path, "--html ")
    if path.is_dir():
        raise ConfigError(f"--html {path}: is a folder. Name a file, such as {path / 'report.html'}.")
    if not path.parent.is_dir():
        raise ConfigError(f"--html {path}: the folder {path.parent} does not exist. Make it, or name another.")
    if os.path.lexists(path) and not _is_page(path):
        raise ConfigError(f"--html {path}: exists and is no report. Name another file.")


def _is_page(path: Path) -> bool:
    """Return whether a path holds an earlier page, or nothing yet: an empty file."""
    if not path.is_file():  # a pipe, or a link to nothing
        return False
    with path.open("rb") as file:
        start = file.read(2048)
    return not start or MARK.encode() in start


def rendered(template: str, facts: Mapping[str, Any], drawn: Mapping[str, Any]) -> str:
    """Return a page of `template`. drawn: data of the charts, as JSON. Equal facts give equal pages."""
    scripts = [_text(UPLOT[0]), _script()]
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    policy = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; script-src "
    page: str = (
        _environment()
        .get_template(template)
        .render(
            facts,
            scripts=scripts,
            styles=[_text(UPLOT[1]), _text("style.css")],
            licence=_text(UPLOT[2]).replace("--", "- -"),
            policy=policy + " ".join(f"'sha256-{one}'" for one in hashes),
            drawn=json.dumps(drawn, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
            mark=MARK,
            version=__version__,
        )
    )
    return page


def place_text(value: Any) -> str:
    """Return a value as text, without the folder where the command was given, and with ~ for the user's own."""
    text = value if isinstance(value, str) else _Brief().repr(value)[:LONGEST_VALUE]
    return text.replace(f"{os.getcwd()}/", "").replace(str(Path.home()), "~")


@cache
def _environment() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    environment.filters |= {
        "size": size_text,
        "short": count_text,
        "seconds": seconds_text,
        "place": place_text,
        "commas": lambda value: f"{value:,.0f}",
        "percent": lambda share: f"{share:.1%}",
        "value": lambda value: "none" if value is None else place_text(value),
    }
    return environment


@cache
def _text(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _script() -> str:
    return "(() => {\n" + "\n".join(map(_text, SCRIPTS)) + "\n})();"
