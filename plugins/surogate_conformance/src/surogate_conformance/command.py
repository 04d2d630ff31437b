"""`surogate plugins test`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from . import Result, conformance

FAILED = 1


def test(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A package, a plugin, a folder or a .py file.")],
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Device that kernels are asked about.")
    ] = "h200",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Test what a plugin provides, in tiny runs on the CPU."""
    results, what = [], ""
    for result in conformance(name, device):
        results.append(result)
        if as_json:
            continue
        if result.state == "not applicable":
            continue
        if result.what != what:
            print(what := result.what)
        note = f": {result.reason}" if result.reason else ""
        print(f"  {result.state:<8}  {result.sentence}{note}", flush=True)
        if result.remedy:
            print(f"  {'':<8}  {result.remedy}")
        for warning in result.warnings:
            print(f"  {'warning':<8}  {warning}")
    states = Counter(result.state for result in results)
    warnings = sum(len(result.warnings) for result in results)
    if as_json:
        print(json.dumps({"passed": not states["failed"], "results": [asdict(result) for result in results]}, indent=2))
    else:
        _print_idle(results)
        counts = [f"{states[state]} {state}" for state in ("passed", "failed", "not applicable")]
        print(f"\n{', '.join(counts)}; {warnings} warnings")
    return FAILED if states["failed"] else 0


def _print_idle(results: list[Result]) -> None:
    """Print what does not apply, each reason once for each kind of definition."""
    idle: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        if result.state == "not applicable":
            idle.setdefault((result.what, result.reason), []).append(result)
    if idle:
        print("not applicable")
    for (what, reason), found in idle.items():
        print(f"  {what}: {', '.join(result.sentence for result in found)}: {reason}")
