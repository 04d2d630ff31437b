"""The result of `surogate verify` as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from surogate.cli.json_output import print_json
from surogate.cli.options import RunArguments
from surogate.cli.render import paint, print_warning

from .stored_weights import StoredMatrix
from .verdict import Row, Verdict
from .verification import Extent, Verification, verify

FAILED: Final = 1
_WIDTH: Final = 80
_HEAD: Final = ("model", "recipe", "dtypes", "device", "weights", "tokens")


def verify_command(arguments: RunArguments, extent: Extent, *, as_json: bool) -> int:
    """Print the comparison. Return 0 if every error is within its bound, else 1."""
    result = verify(arguments.config, arguments.overrides, extent, mode=arguments.mode, notice=print_warning)
    if as_json:
        print_json(to_json(result))
    else:
        _print(result)
    return 0 if result.passed else FAILED


def to_json(result: Verification) -> dict[str, Any]:
    """Return the comparison as data: the contract of `surogate verify --json`."""
    wrong = result.first_wrong
    return {
        "passed": result.passed,
        "first_wrong": wrong.name if wrong else None,
        **{name: getattr(result, name) for name in _HEAD},
        "left_out": list(result.left_out),
        "needs_bytes": {"device": result.needs.device, "host": result.needs.host},
        "model_in_fp32": _verdict(result.in_fp32) if result.in_fp32 else None,
        "stored": [{"name": m.name, "layer": m.layer, "snr_db": m.snr, "worst_block": m.worst} for m in result.stored],
        **{key: value for key, value in _verdict(result.verdict).items() if key != "passed"},
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    """`loss` is ours, `transformers_loss` is that of transformers in float64."""
    return {
        "passed": verdict.passed,
        "precision": verdict.precision,
        "loss": verdict.loss,
        "transformers_loss": verdict.true_loss,
        "not_compared": list(verdict.not_compared),
        "rows": [
            {
                "name": row.name,
                "kind": row.kind,
                "layer": row.layer if row.layer >= 0 else None,
                **{key: getattr(row, key) for key in ("error", "transformers_error", "allowed", "cosine")},
                "ok": row.ok,
            }
            for row in verdict.rows
        ],
    }


def _print(result: Verification) -> None:
    console = Console(width=_WIDTH, highlight=False)
    for name in _HEAD:
        console.print(f"{name:<10}{getattr(result, name)}", markup=False)
    if result.left_out:
        console.print(f"{'dropout':<10}off on both sides ({', '.join(result.left_out)})", markup=False)
    console.print(f"{'memory':<10}about {result.needs}\n", markup=False)
    if result.in_fp32 is not None and result.in_fp32.passed:
        console.print("\n".join(_in_fp32(result.in_fp32)), markup=False, soft_wrap=True)
        console.print()
    for verdict in [v for v in result.verdicts if v is result.verdict or not v.passed]:
        _print_tables(console, verdict)
    if result.stored:
        console.print(_stored_table(result.stored))
        console.print()
    console.print("\n".join(_conclusion(result)), markup=False, soft_wrap=True)


def _stored_table(matrices: Sequence[StoredMatrix]) -> Table:
    """Return the errors of stored matrices by layer: the lowest SNR, and the worst 64 consecutive weights."""
    table = Table(box=None, width=_WIDTH, pad_edge=False)
    table.add_column("stored weights", no_wrap=True, ratio=1)
    for head in ("lowest SNR", "worst block"):
        table.add_column(head, justify="right", no_wrap=True)
    for layer, group in groupby(matrices, lambda matrix: matrix.layer):
        members = list(group)
        lowest, worst = min(members, key=lambda m: m.snr), max(members, key=lambda m: m.worst)
        names = [m.name.removesuffix(".weight").rpartition(".")[2] for m in (lowest, worst)]
        table.add_row(_layer(layer), f"{lowest.snr:.1f} dB {names[0]}", f"{worst.worst:.1%} {names[1]}")
    return table


def _print_tables(console: Console, verdict: Verdict) -> None:
    forward = [row for row in verdict.rows if row.kind in ("output", "loss")]
    console.print(_table("forward", forward, verdict.precision, cosine=False))
    console.print(f"loss {verdict.loss:.6f}, transformers in float64 {verdict.true_loss:.6f}\n", markup=False)
    gradients = [row for row in verdict.rows if row.kind in ("gradient", "average")]
    console.print(_table("gradients", gradients, verdict.precision, cosine=True))
    console.print()


def _in_fp32(verdict: Verdict) -> Iterator[str]:
    worst = max(verdict.rows, key=lambda row: row.error)
    yield f"model in fp32, without the recipe: all {len(verdict.rows)} within bounds"
    reference = f"transformers in fp32 {worst.transformers_error:.1e}"
    yield f"          largest error {worst.error:.1e} ({worst.name}); {reference}"


def _table(title: str, rows: list[Row], precision: str, *, cosine: bool) -> Table:
    """Return the errors as a table: relative distances to transformers in float64, ours and transformers' own in
    `precision`."""
    table = Table(box=None, width=_WIDTH, pad_edge=False)
    table.add_column(title, no_wrap=True, ratio=1)
    for head in ["ours", precision, "allowed", *(["cosine"] if cosine else []), ""]:
        table.add_column(head, justify="right", no_wrap=True)
    for section, group in groupby(rows, lambda row: _layer(row.layer) if row.kind == "gradient" else ""):
        members = list(group)
        if section:
            table.add_row(section)
        prefix = _shared([row.name for row in members]) if members[0].kind == "gradient" else ""
        for row in members:
            cells = [f"{row.error:.1e}", f"{row.transformers_error:.1e}", f"{row.allowed:.1e}"]
            cells += [f"{row.cosine:.6f}" if row.cosine is not None else ""] if cosine else []
            name = ("  " if section else "") + row.name.removeprefix(prefix)
            table.add_row(name, *cells, "" if row.ok else "wrong", style="" if row.ok else "red")
    return table


def _layer(layer: int) -> str:
    return f"layer {layer}" if layer >= 0 else "outside the layers"


def _shared(names: list[str]) -> str:
    """Return what all names begin with, up to a dot: the name of the layer."""
    parts = zip(*(name.split(".")[:-1] for name in names), strict=False)
    return "".join(f"{one}." for one, *_ in takewhile(lambda alike: len({*alike}) == 1, parts))


def _conclusion(result: Verification) -> Iterator[str]:
    wrong = result.first_wrong
    if wrong is None:
        yield f"{paint('pass', 'green')}: all {len(result.verdict.rows)} within bounds"
        if missing := result.verdict.not_compared:
            yield f"      not compared, because only one side has or trains it: {', '.join(missing)}"
        return
    verdict = next(verdict for verdict in result.verdicts if not verdict.passed)
    count = sum(not row.ok for row in verdict.rows)
    place = {
        "output": f"forward pass: the first wrong output is that of {wrong.name}",
        "loss": "forward pass: every layer is right, the loss is wrong",
        "gradient": "forward pass right; backward pass: the first wrong gradient after the loss is that of\n"
        f"      {wrong.name}",
        "average": "each gradient is within its bound, but not their average: something rounds too much",
    }[wrong.kind]
    yield (
        f"{paint('fail', 'red')}: {count} of {len(verdict.rows)} are farther from transformers in float64 than allowed"
    )
    yield f"      {place}"
    if verdict is result.in_fp32:
        yield "      wrong in fp32 too: the error is in the model, not in the recipe"
    elif result.in_fp32 is not None:
        where = "the recipe, the weight format or their kernels" if result.stored else "the recipe or its kernels"
        yield f"      right in fp32: the error is in {where}"
