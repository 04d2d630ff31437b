"""Settings of Sphinx for `make docs`: the Markdown of this repository as a site.

The pages have the paths of their files in the repository, so each link of a file works on the site too. The headings of
docs/README.md and their links are the navigation; a page that it does not list is an error.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
INDEX = "docs/README"

sys.path.insert(0, str(Path(__file__).parent))


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


project = "Surogate"
version = release = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinx_copybutton", "sources"]
root_doc = INDEX
source_suffix = {".md": "markdown"}
include_patterns = [
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "benchmarks/*.md",
    "dev/LOG.md",
    "docs/*.md",
    "docs/**/*.md",
    "tests/README.md",
]
myst_heading_anchors = 6  # those that GitHub makes
smartquotes = False

html_theme = "furo"
html_title = f"Surogate {version}"
html_copy_source = False
html_show_copyright = False
html_additional_pages = {"index": "index.html"}
templates_path = ["templates"]
html_static_path = ["static"]
html_css_files = ["site.css"]
html_context = {
    "commit": git("show", "--no-patch", "--format=%h of %cs", "HEAD")
    + (", with changes" if git("status", "--porcelain") else ""),
}

_SECTION = re.compile(r"^## (?P<heading>.+)\n(?P<body>(?:(?!^## ).*\n?)*)", re.M)
_ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<path>[^)#]+)\.md\)", re.M)
_EXECUTED = re.compile(r"^<!-- test: (?!setup)", re.M)


def add_navigation(app: Sphinx, page: str, source: list[str]) -> None:
    """Append a toctree to the index for each of its headings."""
    if page == INDEX:
        for section in list(_SECTION.finditer(source[0])):
            entries = "\n".join(f"{entry['title']} <{entry['path']}>" for entry in _ENTRY.finditer(section["body"]))
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section['heading']}\n\n{entries}\n```\n"


def count_executed(app: Sphinx, page: str, template: str, context: dict[str, object], doctree: object) -> None:
    """Tell the foot of a page how many of its blocks the tests run or compare."""
    path = ROOT / f"{page}.md"
    context["executed"] = len(_EXECUTED.findall(path.read_text())) if path.exists() else 0


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_navigation)
    app.connect("html-page-context", count_executed)
