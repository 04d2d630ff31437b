"""`surogate docs`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from .pages import find, pages


def docs(
    topic: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC", help="A page, a heading, or a key. Default: list the pages."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print a page of the documentation, a section, or what a key of the config means.

    Examples:
    surogate docs
    surogate docs preference
    surogate docs learning_rate
    """
    found = pages()
    if topic:
        wanted = " ".join(topic)
        text = find(wanted, found)
        print(json.dumps({"topic": wanted, "text": text}, indent=2)) if as_json else _show(text)
    elif as_json:
        listed = [{"name": page.name, "title": page.title, "summary": page.summary} for page in found.values()]
        print(json.dumps({"pages": listed}, indent=2))
    else:
        width = max(map(len, found))
        print("\n".join(f"{page.name:<{width}}  {page.title}" for page in found.values()))


def _show(text: str) -> None:
    """Print Markdown: rendered in a terminal, as it is where it is read by a program."""
    if not sys.stdout.isatty():
        print(text, end="" if text.endswith("\n") else "\n")
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(text, hyperlinks=False))
