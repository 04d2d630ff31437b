"""`surogate report`: a run, or two beside each other, as text, as JSON and as a page."""

from __future__ import annotations

from pathlib import Path

from surogate_core.errors import ConfigError

from ..report.page import refuse_other
from ..report.plan_facts import read_profile
from ..report.records import names_of
from ..report.reports import opened, run_json, run_lines, run_page
from .json_output import print_json
from .render import output_width, paragraph
from .written_page import print_written


def report_command(
    folder: Path, other: Path | None, html: Path | None, profile: Path | None = None, *, as_json: bool = False
) -> int:
    """Print the headline, figures and findings of runs, and write their page to `html` if given.

    profile: document of `surogate profile --json`, whose times the page has beside the planned ones.
    """
    if profile is not None and html is None:
        raise ConfigError(f"--profile {profile}: its times are on the page. Add --html FILE.")
    if other is not None and other.resolve() == folder.resolve():
        raise ConfigError(f"{other}: is the same run. Name another, or one alone.")
    if html is not None:
        refuse_other(html)
    measured = None if profile is None else read_profile(profile)
    runs = [opened(one) for one in (folder, other) if one is not None]
    written = None if html is None else run_page(runs, html, measured)
    if as_json:
        print_json({"runs": [run_json(run) for run in runs], "html": html})
    else:
        width = output_width()
        for run, name in zip(runs, names_of(runs), strict=True):
            print("\n".join(paragraph(line, width) for line in run_lines(run, name)))
    if html is not None and written is not None:
        print_written(html, written)
    return 0
