"""The three reports: of runs, of a plan and of data. Each gathers facts and writes a page, or returns them as data."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surogate_core.errors import ConfigError

from ..reporting.text import count_text
from ..runs.plan_json import PLAN_FILE
from . import charts, data_facts, findings, headline, plan_facts
from .charts import Chart
from .curves import axes
from .headline import seconds_text, size_text
from .page import refuse_other, write_page
from .records import Json, RunRecords, State, names_of, read_run

SECTION_TITLES = {
    "preferences": (
        "Preferences",
        "Does it learn to prefer the chosen answers? If the margin grows while both rewards fall, chosen answers "
        "become less likely too.",
    ),
    "routing": (
        "Routing of experts",
        "Do all experts work? If the imbalance rises while the entropy falls, the router collapses.",
    ),
    "metrics": ("Other metrics", "What else do the loss and the model report?"),
}

FILES = {
    "adapter": "the adapter",
    "merged": "base and adapter as one model",
    "model.safetensors": "the model",
    "model.safetensors.index.json": "the model, in several files",
    "run.yaml": "the config, with all defaults and versions",
    "metrics.jsonl": "every step",
    "plan.json": "the plan, with the memory op by op",
}
_TONES = {"finished": "good", "running": "accent", "stopped": "warn", "killed": "bad", "not started": ""}
_TOLD_IN_NUMBERS = re.compile(r"(validation_)?datasets\.\d+: (tokenizing: |left out: |.* longer than sequence_len)")
"""Notices on data that its page has in a form of its own."""

_SAMPLES = 12
"""Samples of one prompt that are shown: the last ones and the first."""


def opened(folder: Path) -> RunRecords:
    """Return the records of a run (`read_run`), without a plan.json of another form, which is a finding."""
    run = read_run(folder)
    if run.plan is not None:
        try:
            plan_facts.memory_of(run.plan)
            plan_facts.times_of(run.plan)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
            run.plan = None
            run.problems.append(f"{PLAN_FILE} is not the plan of a run ({type(error).__name__}): memory is not shown.")
    return run


def run_page(runs: Sequence[RunRecords], path: Path, measured: plan_facts.Times | None = None) -> int:
    """Write the page of a run, or of two beside each other, and return its bytes. measured: times of a profile."""
    run, names = runs[0], names_of(runs)
    whose = f"{names[0]}: " if len(runs) > 1 else ""

    def named_of(all_charts: Iterable[Chart]) -> list[Chart]:
        """Say whose figures a sentence has, where there are two runs."""
        return [replace(chart, says=f"{whose}{chart.says}") for chart in all_charts]

    steps = named_of(charts.step_charts(runs)) if run.steps else []
    metrics = {section: named_of(found) for section, found in charts.metric_charts(runs).items()}
    (loss,) = named_of([charts.loss_chart(runs)])
    named = [(id, *SECTION_TITLES[id], found) for id, found in metrics.items()]
    memory = plan_facts.memory_of(run.plan) if run.plan else None
    times = measured or (plan_facts.times_of(run.plan) if run.plan else None)
    every = [loss, *steps, *(chart for found in metrics.values() for chart in found)]
    links = {
        "loss": "Loss" if run.steps else "",
        "differences": "What differs" if len(runs) > 1 else "",
        "steps": "Steps" if run.steps else "",
        **{id: title.split()[0] for id, title, *_ in named},
        "numerics": "Numerics" if run.numerics else "",
        "samples": "Samples" if any(one.samples for one in runs) else "",
        "memory": "Memory" if memory else "",
        "time": "Time" if times else "",
        "use": "Use it",
    }
    facts: Json = {
        "title": f"{' and '.join(names)}: report",
        "sections": [(id, name) for id, name in links.items() if name],
        "runs": [_run_facts(one, name) for one, name in zip(runs, names, strict=True)],
        "figures": headline.side_by_side(runs),
        "compared": headline.compared(runs) if len(runs) > 1 else "",
        "differences": headline.differences(runs) if len(runs) > 1 else [],
        "loss": loss,
        "steps": steps,
        "metrics": named,
        "memory": memory,
        "times": times,
    }
    drawn: Json = {
        "runs": [{"name": name, "x": axes(one)} for one, name in zip(runs, names, strict=True)],
        "charts": {chart.id: chart.drawn for chart in every},
        "numerics": run.numerics,
        "resumed": run.resumed,
    }
    return write_page(path, "run.html", facts, drawn | ({"memory": memory.drawn} if memory else {}))


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run as `surogate report --json` prints it.

    state     "finished", "running", "stopped", "killed" or "not started"
    steps     that are recorded, of `total_steps`
    figures   `what`, the `figure` as text with its unit, and a word `beside` it
    findings  what stands out: `weight` "bad", "warn" or "note", and a sentence, `text`
    """

    folder: str
    name: str
    state: State
    steps: int
    total_steps: int
    figures: Sequence[headline.Tile]
    findings: Sequence[findings.Finding]


def run_report(run: RunRecords) -> RunReport:
    return RunReport(
        folder=str(run.folder),
        name=run.name,
        state=run.state,
        steps=run.done,
        total_steps=run.total,
        figures=list(headline.tiles(run)),
        findings=list(findings.findings(run)),
    )


def run_json(run: RunRecords) -> Json:
    """Return a run's report as data: the contract of `surogate report --json`."""
    found = run_report(run)
    named = {"figures": [tile._asdict() for tile in found.figures]}
    return {**vars(found), **named, "findings": [finding._asdict() for finding in found.findings]}


def read_reports(
    folder: Path, other: Path | None, html: Path | None, profile: Path | None
) -> tuple[list[RunRecords], int]:
    """Return the records of one run or two, and the bytes of the page that is written to `html`; 0 without one.

    profile: document of `surogate profile --json`, whose times the page has beside the planned ones. Raises ConfigError
    for a folder that is no run, the same run twice, a profile without a page, or a path that is not to be replaced.
    """
    if profile is not None and html is None:
        raise ConfigError(f"--profile {profile}: its times are on the page. Add --html FILE.")
    if other is not None and other.resolve() == folder.resolve():
        raise ConfigError(f"{other}: is the same run. Name another, or one alone.")
    if html is not None:
        refuse_other(html)
    measured = None if profile is None else plan_facts.read_profile(profile)
    runs = [opened(one) for one in (folder, other) if one is not None]
    return runs, 0 if html is None else run_page(runs, html, measured)


def run_lines(run: RunRecords, name: str) -> list[str]:
    """Return a run's report as lines of text: its headline, figures and findings."""
    lines = [f"{name}: {headline.state_text(run)}", f"  {headline.facts(run)}"]
    lines += [f"  {what:<18}{figure:>12}   {beside}" for what, figure, beside in headline.tiles(run)]
    marks = {"bad": "!", "warn": "!", "note": "-"}
    return [*lines, *(f"  {marks[weight]} {text}" for weight, text in findings.findings(run))]


def _run_facts(run: RunRecords, name: str) -> Json:
    commands = run.plan.get("commands") or [] if run.plan else []
    resume = f"surogate train {run.folder}/run.yaml --set resume_from_checkpoint=true"
    goes_on = [("resume", resume)] if run.state in ("stopped", "killed") and any(run.folder.glob("step_*")) else []
    versions = run.head.get("versions")
    kept = {**run.config, **(versions if isinstance(versions, dict) else {})}
    return {
        "name": name,
        "state": headline.state_text(run),
        "tone": _TONES[run.state],
        "facts": headline.facts(run),
        "tiles": list(headline.tiles(run)),
        "findings": findings.findings(run),
        "has_steps": bool(run.steps),
        "numerics": len(run.numerics),
        "samples": _samples(run),
        "commands": [*goes_on, *(tuple(command) for command in commands if run.state == "finished")],
        "files": [(str(run.folder / name), what) for name, what in FILES.items() if (run.folder / name).exists()],
        "config": [(key, value) for key, value in kept.items() if value not in (None, [], {})],
    }


def _samples(run: RunRecords) -> list[tuple[str, list[tuple[int, str]]]]:
    """Return (prompt, [(step, text)], the last first) of what the run wrote."""
    found: dict[str, list[tuple[int, str]]] = {}
    for record in run.samples:
        found.setdefault(str(record.get("prompt") or ""), []).append((record["step"], record["text"]))
    return [
        (prompt, [*texts[:-_SAMPLES:-1], *texts[:1]] if len(texts) > _SAMPLES else texts[::-1])
        for prompt, texts in found.items()
    ]


def plan_page(document: Json, name: str, path: Path) -> int:
    """Write the page of a plan's document with its timeline, and return its bytes."""
    memory, times = plan_facts.memory_of(document), plan_facts.times_of(document)
    step, device = document["step"], document["device"]
    room = memory.limit - memory.total
    count = f"{device['count']} x {device['title']}" if device["count"] > 1 else device["title"]
    tiles = [
        ("memory", size_text(memory.total), f"of {size_text(memory.limit)}, each device"),
        ("to spare" if room >= 0 else "too much", size_text(abs(room)), f"{abs(room) / memory.limit:.1%} of it"),
        ("tokens/s", count_text(step["tokens_per_second"]), count),
        ("a step", seconds_text(step["seconds"]), f"{step['tokens']:,} tokens"),
        ("host memory", size_text(document["host_bytes"]["total"]), "pinned, and batches"),
    ]
    if document.get("disk"):
        tiles.append(("on disk", size_text(document["disk"]["checkpoint"]), "each checkpoint"))
    kernels = defaultdict[str, list[str]](list)
    for kind, provider in document["kernels"].items():
        kernels[provider].append(kind)
    facts: Json = {
        "title": f"{name}: plan",
        "sections": [("memory", "Memory"), ("time", "Time"), ("kernels", "Kernels")],
        "name": name,
        "fits": document["fits"],
        "facts": f"{count} ({device['chosen']}), rates: {device['source']}",
        "tiles": tiles,
        "findings": _plan_findings(document),
        "memory": memory,
        "times": times,
        "kernels": sorted(kernels.items()),
        "refused": [(kind, reasons) for kind, reasons in document["refusals"].items() if reasons],
    }
    return write_page(path, "plan.html", facts, {"memory": memory.drawn, "charts": {}, "runs": []})


def _plan_findings(document: Json) -> list[findings.Finding]:
    found = []
    if document["device"]["problem"]:
        found.append(findings.Finding("bad", document["device"]["problem"]))
    if not document["fits"]:
        fit = "It does not fit: surogate plan --fit auto proposes what to change."
        found.append(findings.Finding("bad", fit))
    if chosen := document["recompute"]:
        parts = ", ".join(chosen["parts"]) or "nothing"
        first = chosen["first_blocks"]
        some = f", {', '.join(first['parts'])} in the first {first['count']} blocks" if first["count"] else ""
        saves = f"saves {size_text(chosen['saves'])}, adds {seconds_text(chosen['seconds'])} to a step"
        found.append(findings.Finding("note", f"recompute: auto recomputes {parts}{some}: {saves}."))
    return [*found, *(findings.Finding("note", line) for line in document["notices"])]


def data_page(document: Json, name: str, folder: Path, notices: Sequence[str], path: Path) -> int:
    """Write the page of the data of `surogate tokenize --debug --json`, and return its bytes.

    folder: that of the config, beside which rows may lie.
    """
    sets = data_facts.datasets_of(document, folder)
    links = [(f"data-{index}", Path(one.path).name or one.path) for index, one in enumerate(sets, 1)]
    facts: Json = {
        "title": f"{name}: data",
        "sections": [*links, ("packing", "Packing")],
        "name": name,
        "facts": ", ".join(f"{one.path} ({one.type})" for one in sets),
        "tiles": list(data_facts.tiles_of(document)),
        "notices": [line for line in dict.fromkeys(notices) if not _TOLD_IN_NUMBERS.match(line)],
        "datasets": sets,
        "packing": data_facts.packing_of(document),
    }
    return write_page(path, "data.html", facts, {"charts": {}, "runs": []})
