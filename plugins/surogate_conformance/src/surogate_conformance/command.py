"""`surogate plugins test`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import typer

from surogate.cli.json_output import JsonOption, print_json
from surogate.cli.render import table

from . import Result, bench_of

if TYPE_CHECKING:
    from .bandwidth import Card, Share

FAILED = 1


def test(
    name: Annotated[str, typer.Argument(metavar="NAME_OR_PATH", help="A package, a plugin, a folder or a .py file.")],
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="Device that kernels are asked about.")
    ] = "h200",
    as_json: JsonOption = False,
) -> int:
    """Test what a plugin provides, in tiny runs on the CPU. With a GPU: also kernels, and how fast they move bytes.

    Examples:
    surogate plugins test surogate-lora
    surogate plugins test my_plugin.py
    """
    from .bandwidth import shares, unmeasured, visible_card
    from .cases import cases

    results, what = list[Result](), ""
    with bench_of(name, device) as bench:
        for result in (case.run() for case in cases(bench.subject, bench)):
            results.append(result)
            if not as_json and result.state != "not applicable":
                what = _print(result, what)
        card = visible_card()
        measured = shares(bench, card) if card else []
        if card and not as_json:
            print_shares(measured, unmeasured(bench, measured), card)
    states = Counter(result.state for result in results)
    warnings = sum(len(result.warnings) for result in results)
    if as_json:
        document = {
            "passed": not states["failed"],
            "results": results,
            "copy_rate": card.copy_rate if measured and card else None,
            "bandwidth": measured,
        }
        print_json(document)
    else:
        _print_idle(results)
        counts = [f"{states[state]} {state}" for state in ("passed", "failed", "not applicable")]
        print(f"\n{', '.join(counts)}; {warnings} warnings")
    return FAILED if states["failed"] else 0


def _print(result: Result, what: str) -> str:
    """Print a result, below the definition that it is of unless that is `what`. Return the definition."""
    if result.what != what:
        print(result.what)
    note = f": {result.reason}" if result.reason else ""
    print(f"  {result.state:<8}  {result.sentence}{note}", flush=True)
    if result.remedy:
        print(f"  {'':<8}  {result.remedy}")
    for warning in result.warnings:
        print(f"  {'warning':<8}  {warning}")
    return result.what


def print_shares(measured: list[Share], missing: list[str], card: Card) -> None:
    """Print bytes, time and share of the copy rate of each kernel, and the kernels that were not measured."""
    if measured:
        print(f"bandwidth on {card.device.title}, whose copies move {card.copy_rate / 1e12:.2f} TB/s")
    rows = [
        (share.kernel, f"{share.bytes / 1e6:.1f} MB", f"{share.seconds * 1e6:.1f} us", f"{share.share:.0%}", bound)
        for share in measured
        for bound in ["bound by arithmetic" if share.arithmetic else ""]
    ]
    if rows:
        print("\n".join(f"  {line}" for line in table(rows, None).splitlines()))
    if missing:
        print(f"  not measured, because no run selects them and no example is served: {', '.join(missing)}")


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
