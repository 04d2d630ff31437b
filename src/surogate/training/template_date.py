"""The date that the chat template of a run writes, if it asks for one: fixed at the start, and written down."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from ..data.tokenizer import asks_for_date

if TYPE_CHECKING:
    from ..checkpoints.resume import Resumed
    from ..runs.run import Run
    from ..world.processes import Processes

KEY = "template_date"


def dated(run: Run, resumed: Resumed | None, processes: Processes) -> Run:
    """Return the run with its date: that of the config, of the checkpoint that it goes on with, or of today."""
    if run.config.template_date is not None:
        return run
    day: str | None = None
    if processes.world.writer and asks_for_date(Path(run.model_dir)):
        day = (resumed.manifest.config.get(KEY) if resumed else None) or date.today().isoformat()
    day = processes.share(day, "the date of the chat template")
    return replace(run, loaded=replace(run.loaded, config=run.config.model_copy(update={KEY: day})))


def date_line(run: Run) -> str:
    """Return the line that tells a user the date; "" if the template writes none."""
    day = run.config.template_date
    if day is None or not asks_for_date(Path(run.model_dir)):
        return ""
    return f"chat template: writes the date {day} in every row ({KEY})"
