"""Shows the source files and folders that pages link to as pages, where Sphinx would offer a download or fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from html import escape
from pathlib import Path

from docutils import nodes
from markdown_it import MarkdownIt
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
LANGUAGES = {".cu": "cuda", ".json": "json", ".py": "python", ".toml": "toml", ".yaml": "yaml"}

_HREF = re.compile(r'href="(?!https?:)([^"#]+)"')
_linked: set[str] = set()
"""Filled while pages are read. `make docs` reads all of them each time."""


def link_sources(app: Sphinx, doctree: nodes.document) -> None:
    """Point the links to a file that is no page, or to a folder, at their pages."""
    page = app.env.docname
    for link in [*doctree.findall(addnodes.download_reference), *doctree.findall(addnodes.pending_xref)]:
        path = Path(os.path.normpath(ROOT / page / ".." / link["reftarget"].partition("#")[0]))
        exists = path.is_dir() if isinstance(link, addnodes.pending_xref) else path.is_file()
        if exists and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).as_posix()
            _linked.add(name)
            uri = app.builder.get_relative_uri(page, f"source/{name}")
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def pages(app: Sphinx) -> Iterator[tuple[str, dict[str, object], str]]:
    """Make a page of each file that is linked, and one of each folder, with the names of its files."""
    for name in sorted(_linked):
        if (ROOT / name).is_dir():
            files = subprocess.run(["git", "ls-files", name], cwd=ROOT, capture_output=True, text=True, check=True)
            body = f"<pre>{escape(files.stdout)}</pre>"
        elif name.endswith(".ipynb"):
            body = notebook(app, name)
        else:
            language = LANGUAGES.get(Path(name).suffix, "text")
            body = app.builder.highlighter.highlight_block((ROOT / name).read_text(), language, force=True)
        yield f"source/{name}", {"title": name, "body": f"<h1>{escape(name)}</h1>{body}"}, "page.html"


def notebook(app: Sphinx, name: str) -> str:
    """Return the HTML of a notebook. Its links are relative to its folder."""
    cells = []
    for cell in json.loads((ROOT / name).read_text())["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            cells.append(_HREF.sub(lambda match: f'href="{uri_of(app, name, match[1])}"', MarkdownIt().render(text)))
        else:
            cells.append(app.builder.highlighter.highlight_block(text, "ipython3", force=True))
    return "\n".join(cells)


def uri_of(app: Sphinx, name: str, link: str) -> str:
    target = os.path.normpath(f"{name}/../{link}")
    page = target.removesuffix(".md") if target.endswith(".md") else f"source/{target}"
    return app.builder.get_relative_uri(f"source/{name}", page)


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", link_sources, priority=100)  # before Sphinx collects the downloads
    app.connect("html-collect-pages", pages)
