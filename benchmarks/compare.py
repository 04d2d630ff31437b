"""Our training steps compared with those of PyTorch at its best, in one run: ratio, memory, clock and power.

    python benchmarks/compare.py --out rows.jsonl                          # all rows of one GPU in rows.py
    python benchmarks/compare.py "lora-*" full-qwen3-8b --seconds 90 --out rows.jsonl
    python benchmarks/compare.py "lora-*" --only ours --set deterministic=true
    python benchmarks/compare.py "two-*" --out two.jsonl                   # on two GPUs

Each side runs in a process of its own, ours (`step.py`) first, then PyTorch's (`torch_step.py`). A row is printed, and
appended to `--out` as a line of JSON, when it is done, so a run that is stopped leaves the rows before. A row takes at
most `--seconds`: a side that is not done by then is ended and reported as an error, and the next row begins.

Rows in FP8 have torchao's tensorwise FP8 on the other side, and our own bf16 in a line of its own.

ratio: our tokens/s over theirs. floor: our tokens/s over the in-step floor of rows.py, on the GPU that it was measured
on. plan: our planned time of a step over the measured one. GiB: device memory of the process during the timed steps,
context included. MHz, W: mean clock and power in that time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from card import Sample, reader, sampling
from rows import FLOOR_GPU, MODELS, Row, chosen

HERE = Path(__file__).parent
HEADINGS = (
    f"{'row':<20}{'torch tok/s':>12}{'GiB':>7}{'MHz':>6}{'W':>5}{'ours tok/s':>12}{'GiB':>7}{'MHz':>6}{'W':>5}"
    f"{'ratio':>7}{'floor':>7}{'plan':>6}"
)


def main() -> None:
    arguments = parse(sys.argv[1:])
    try:
        rows = chosen(arguments.rows)
    except ValueError as error:
        sys.exit(f"compare.py: {error}")
    read = reader()
    if read is None:
        print("no NVML (pip install nvidia-ml-py) and no nvidia-smi: no clock, power and process memory", flush=True)
    print(HEADINGS, flush=True)
    failed = False
    for row in rows:
        found = compare(row, arguments, read)
        print(line(found), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
        failed |= any("error" in found[side] for side in ("ours", "torch") if found[side])
    sys.exit(1 if failed else 0)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="names or patterns of rows.py; all of one GPU without any")
    parser.add_argument("--seconds", type=float, default=180.0, help="a row, both sides with their start")
    parser.add_argument("--timed", type=float, default=5.0, help="seconds of timed steps a side, at most 20 steps")
    parser.add_argument("--only", choices=["ours", "torch"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key of our side")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def compare(row: Row, arguments: argparse.Namespace, read: Callable[[], Sample] | None) -> dict[str, Any]:
    """Measure both sides of a row. A side that fails is {"error": ...}, one that is not wanted is {}."""
    deadline = time.monotonic() + arguments.seconds
    bf16 = replace(row, fp8=False)
    sides: dict[str, dict[str, Any]] = {"ours": {}, "torch": {}}
    for side, measured in (("ours", row), ("torch", row), *([("ours in bf16", bf16)] if row.fp8 else [])):
        words = [sys.executable, str(HERE / ("torch_step.py" if side == "torch" else "step.py"))]
        words += options(measured, arguments)
        if side == "torch":
            words += ["--fp8"] if row.fp8 else []
            words += ["--zero-level", str(max(2, row.zero_level))]
        else:
            words += [word for setting in (*measured.settings, *arguments.set) for word in ("--set", setting)]
        if arguments.only is None or side.startswith(arguments.only):
            sides[side] = measure_side(words, deadline - time.monotonic(), read)
    return summarise(row, sides)


def options(row: Row, arguments: argparse.Namespace) -> list[str]:
    """The arguments of both scripts."""
    sizes = ["--seq-len", row.seq_len, "--batch", row.batch, "--accumulate", row.accumulate, "--gpus", row.gpus]
    return [
        *("--model", str(arguments.models / row.model), *map(str, sizes), "--seconds", str(arguments.timed)),
        *(["--lora"] if row.lora else []),
    ]


def measure_side(words: list[str], seconds: float, read: Callable[[], Sample] | None) -> dict[str, Any]:
    """Run a script to its end, or for at most `seconds`. Returns the JSON that it prints last, and clock and power."""
    if seconds <= 0:
        return {"error": "the other side took all of --seconds"}
    began = time.monotonic()
    with sampling(read) as samples:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            end(process)
            return {"error": f"not done after {seconds:.0f} s, what --seconds left"}
        except BaseException:
            end(process)
            raise
    if process.returncode:
        return {"error": (err.strip() or f"exit code {process.returncode}")[-600:]}
    try:
        result: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": f"printed no JSON but {out[-200:]!r}"}
    return result | samples.during(*result["window"]) | {"process_seconds": round(time.monotonic() - began, 1)}


def end(process: subprocess.Popen[str]) -> None:
    """End a side with the compilers that it started, and wait until the GPU's memory is free again."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def summarise(row: Row, sides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A line of the results: the row, its sides, and what follows from them; None where a side is missing."""
    ours, torch = sides["ours"], sides["torch"]
    rate, their_rate = ours.get("tokens_per_second"), torch.get("tokens_per_second")
    known = row.floor if ours.get("gpu") == FLOOR_GPU else None
    return {
        "row": row.name,
        "model": row.model,
        "batch": row.batch,
        "seq_len": row.seq_len,
        "accumulate": row.accumulate,
        "gpus": row.gpus,
        "mode": ("fp8 " if row.fp8 else "") + ("lora" if row.lora else "full"),
        "ratio": round(rate / their_rate, 4) if rate and their_rate else None,
        "floor_tokens_per_second": known,
        "share_of_floor": round(rate / known, 4) if rate and known else None,
        "planned_share": round(ours["planned_ms"] / ours["step_ms"], 4) if rate else None,
        **sides,
    }


def line(found: dict[str, Any]) -> str:
    """The row of the table, and a line for each error."""
    cells = f"{found['row']:<20}"
    for side in ("torch", "ours"):
        cells += _side(found[side])
    for key, width, form in (("ratio", 7, ".3f"), ("share_of_floor", 7, ".3f"), ("planned_share", 6, ".2f")):
        cells += f"{'-' if found[key] is None else format(found[key], form):>{width}}"
    lines = [cells]
    if found.get("ours in bf16"):
        lines.append(f"{'  ours in bf16':<20}{'':>30}{_side(found['ours in bf16'])}")
    for side in ("torch", "ours", "ours in bf16"):
        if "error" in found.get(side, {}):
            lines.append(f"  {side}: {found[side]['error'].splitlines()[-1]}")
    return "\n".join(lines)


def _side(side: dict[str, Any]) -> str:
    if "tokens_per_second" not in side:
        return f"{'error' if side else '-':>12}{'':>18}"
    graph = "g" if side.get("captured") is True else ""
    nbytes, clock, watts = side.get("process_bytes"), side.get("clock_mhz"), side.get("watts")
    memory = "-" if nbytes is None else f"{nbytes / 2**30:.1f}"
    rate = f"{side['tokens_per_second']:,}{graph}"
    return f"{rate:>12}{memory:>7}{'-' if clock is None else clock:>6}{'-' if watts is None else watts:>5}"


if __name__ == "__main__":
    main()
