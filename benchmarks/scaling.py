"""What several GPUs of a host bring: our steps on all of them and on one, against their plans, in three calls.

    python benchmarks/scaling.py a --limit 560 --out a.jsonl   # sums and gathers; 0.5B and 8B at every level, 8B LoRA
    python benchmarks/scaling.py b --limit 560 --out b.jsonl   # Llama-70B LoRA in FP8 at 4k; 30B-A3B, LoRA and in full
    python benchmarks/scaling.py c --limit 560 --out c.jsonl   # a killed and a stopped rank
    python benchmarks/scaling.py b --plan h100 --gpus 8        # the plans alone; needs no GPU

On all visible GPUs, or `--gpus`. Models are made on the GPUs; nothing is read, and nothing written but `--out`. A line
is printed, and appended to `--out`, when it is done; what `--limit` leaves no time for is named at the end. Columns are
those of compare.py, without another side. A line below a row says by how much it misses a goal: GOALS, and a plan
within 8 %.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import step
import torch
from card import reader
from compare import HERE, print_rows, words_of
from rows import BF16_8BIT, MODELS, Row

from surogate_core.api import DeviceInfo
from surogate_core.machine.devices import device
from surogate_core.runtime.device import training_device

FITTED = ("recompute=auto",)
MARGIN = 3 << 30
"""Bytes of a GPU that rows with FITTED leave free: else a plan would fill it to the last MiB."""

PLANNED = 0.08
"""Goal of all rows: by how much the planned time of a step differs from the measured one."""


@dataclass(frozen=True)
class Call:
    """scripts of their own that are run first, and rows."""

    scripts: Sequence[str] = ()
    rows: Sequence[Row] = ()


def levels(name: str, *sizes: Any) -> list[Row]:
    return [Row(f"{name}-zero{level}", *sizes, zero_level=level, alone=True) for level in (1, 2, 3)]


CALLS: Mapping[str, Call] = {
    "a": Call(
        ["collectives.py"],
        [
            *levels("full-qwen2.5-0.5b", "qwen2.5-0.5b", 32, 1024, 4),
            *levels("full-qwen3-8b", "qwen3-8b", 2, 2048, 4),
            Row("lora-qwen3-8b", "qwen3-8b", 2, 2048, 4, lora=True, alone=True),
        ],
    ),
    "b": Call(
        [],
        [
            Row("fp8-lora-llama-70b", "llama-3.1-70b", 1, 4096, 4, lora=True, fp8=True, zero_level=3, keys=FITTED),
            Row("lora-qwen3-30b-a3b", "qwen3-30b-a3b", 1, 2048, 4, lora=True, alone=True),
            Row("full-qwen3-30b-a3b", "qwen3-30b-a3b", 4, 2048, 1, zero_level=3, base=BF16_8BIT, keys=FITTED),
        ],
    ),
    "c": Call(["lost_ranks.py"]),
}

GOALS: Mapping[str, float] = {
    "full-qwen2.5-0.5b-zero1": 0.975,
    "full-qwen3-8b-zero1": 0.975,
    "lora-qwen3-8b": 0.975,
    "fp8-lora-llama-70b": 2700.0,
}
"""Of rows: the share of the speed of so many times one GPU, or tokens/s of a GPU."""


def main() -> None:
    arguments = parse(sys.argv[1:])
    call, end_at = CALLS[arguments.call], time.monotonic() + arguments.limit
    card = device(arguments.plan) if arguments.plan else training_device()
    limit = f"device_memory_limit={(card.memory_bytes - MARGIN) >> 20}MiB"
    given = [replace(row, keys=(*row.keys, limit)) if row.keys == FITTED else row for row in call.rows]
    rows = [replace(row, gpus=arguments.gpus) for row in given]
    if arguments.plan:
        for text in plans(rows, card, arguments):
            print(text, flush=True)
        return
    failed = [script for script in call.scripts if not run(script, arguments, end_at)]
    arguments.limit = end_at - time.monotonic()
    left = print_rows(rows, arguments, reader(), missed) if rows else None
    said = [f"failed: {', '.join(failed)}"] if failed else []
    sys.exit("; ".join([*said, *([left] if left else [])]) or 0)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALLS)
    parser.add_argument("--gpus", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--limit", type=float, default=inf, help="seconds of all")
    parser.add_argument("--seconds", type=float, default=180.0, help="a row, with its start")
    parser.add_argument("--timed", type=float, default=5.0, help="seconds of timed steps, at most 20 steps")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models")
    parser.add_argument("--plan", metavar="DEVICE", help="print the plans for this device instead")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words, argparse.Namespace(only="ours"))


def run(script: str, arguments: argparse.Namespace, end_at: float) -> bool:
    """Run a script of its own, which prints its lines itself. Return whether it did what it should."""
    words = [sys.executable, str(HERE / script), "--gpus", str(arguments.gpus)]
    words += ["--out", str(arguments.out)] if arguments.out else []
    left = end_at - time.monotonic()
    try:
        return subprocess.run(words, timeout=None if left == inf else left, check=False).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def missed(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield by how much the results of a row miss its goals."""
    share, goal = found["planned_share"], GOALS.get(found["row"])
    if share and not abs(share - 1) <= PLANNED:
        yield f"planned {share - 1:+.0%} of the measured time, more than {PLANNED:.0%}"
    if goal is None or not share:
        return
    reached = found["scaling"] if goal < 1 else found["ours"]["tokens_per_second"] / found["gpus"]
    if reached and reached < goal:
        yield f"{reached:,.4g} reached of {goal:,.4g}" + (" times so many GPUs" if goal < 1 else " tokens/s of a GPU")


def plans(rows: Sequence[Row], card: DeviceInfo, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the plan of each row, beside that of one GPU if it is measured too."""
    yield f"{'row':<26}{'GPUs':>5}{'ms':>10}{'tokens/s':>11}{'of a GPU':>10}{'GiB':>9}{'scale':>8}"
    for row in rows:
        one = replace(row, gpus=1, zero_level=1)
        rates = []
        for planned in (row, *([one] if row.alone else [])):
            _, *words = words_of("ours", planned, arguments)
            report = step.plan(step.parse(words), row.batch, card)[1].report
            rates.append(report.tokens_per_second)
            scale = f"{rates[0] / rates[-1] / row.gpus:>8.3f}" if len(rates) > 1 else f"{'':>8}"
            gib, fits = report.device_bytes["total"] / 2**30, "" if report.fits else "  does not fit"
            ms, of_each = report.step.seconds * 1e3, report.tokens_per_second / planned.gpus
            figures = f"{planned.gpus:>5}{ms:>10.1f}{rates[-1]:>11,.0f}{of_each:>10,.0f}{gib:>9.2f}"
            yield f"{row.name:<26}{figures}{scale}{fits}"


if __name__ == "__main__":
    main()
