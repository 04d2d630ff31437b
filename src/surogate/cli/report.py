"""`surogate report`: a run, or two beside each other, as text, as JSON and as a page."""

from __future__ import annotations

from pathlib import Path

from ..pages.records import names_of
from ..pages.reports import read_reports, run_json, run_lines
from ..reporting.text import printable
from .json_output import print_json
from .render import output_width, paragraph
from .written_page import print_written


def report_command(
    folder: Path, other: Path | None, html: Path | None, profile: Path | None = None, *, as_json: bool = False
) -> int:
    """Print the headline, figures and findings of runs, and write their page to `html` if given.

    profile: document of `surogate profile --json`, whose times the page has beside the planned ones.
    """
    runs, written = read_reports(folder, other, html, profile)
    if as_json:
        print_json({"runs": [run_json(run) for run in runs], "html": html})
    else:
        width = output_width()
        for run, name in zip(runs, names_of(runs), strict=True):
            print("\n".join(paragraph(printable(line), width) for line in run_lines(run, name)))
    if html is not None:
        print_written(html, written)
    return 0
