"""Our training steps compared with those of PyTorch at its best, in one run: ratio, memory, clock and power.

    python benchmarks/compare.py --out rows.jsonl                          # all rows of one GPU in rows.py
    python benchmarks/compare.py "lora-*" full-qwen3-8b --seconds 90 --out rows.jsonl
    python benchmarks/compare.py "lora-*" --only ours --set deterministic=true
    python benchmarks/compare.py "two-*" --limit 560 --out two.jsonl       # on two GPUs

Each side runs in a process of its own, ours (`step.py`) first, then PyTorch's (`torch_step.py`). A row is printed, and
appended to `--out` as a line of JSON, when it is done, so a run that is stopped leaves the rows before. A row takes at
most `--seconds`: a side that is not done by then is ended and reported as an error, and the next row begins. All rows
take at most `--limit`: those that it leaves no time for are named at the end, and their exit code is 1.

Rows in FP8 have torchao's tensorwise FP8 on the other side, and on one GPU our own bf16 in a line of its own. On
several GPUs the other side is FSDP2, or PEFT with one sum of gradients a step; `scale` is our tokens/s over those of
the same rows on one of them times the number of GPUs. One GPU is measured once for all levels of ZeRO.

ratio: our tokens/s over theirs. floor: our tokens/s over the in-step floor of rows.py, on the GPU that it was measured
on. plan: our planned time of a step over the measured one. GiB: device memory of the process during the timed steps,
context included, of the first GPU; `plan GiB`: as planned. MHz, W: mean clock and power in that time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from card import Sample, reader, sampling
from rows import FLOOR_GPU, MODELS, Row, chosen

HERE = Path(__file__).parent
SIDES = ("torch", "ours", "ours in bf16", "ours on one")
LEAST_SECONDS = 30.0
"""No row begins with less of --limit left: imports, weights and the choice of algorithms take longer."""
WIDTH = 34
HEADINGS = (
    f"{'row':<{WIDTH}}{'torch tok/s':>12}{'GiB':>7}{'MHz':>6}{'W':>5}{'ours tok/s':>12}{'GiB':>7}{'MHz':>6}{'W':>5}"
    f"{'ratio':>7}{'floor':>7}{'plan':>6}{'plan GiB':>10}{'scale':>7}"
)
FIGURES = (
    ("ratio", 7, ".3f"),
    ("share_of_floor", 7, ".3f"),
    ("planned_share", 6, ".2f"),
    ("planned_gib", 10, ".2f"),
    ("scaling", 7, ".3f"),
)
"""Keys of a line of the results, with the width and form of their column."""


def main() -> None:
    arguments = parse(sys.argv[1:])
    try:
        rows = chosen(arguments.rows)
    except ValueError as error:
        sys.exit(f"compare.py: {error}")
    read = reader()
    if read is None:
        print("no NVML (pip install nvidia-ml-py) and no nvidia-smi: no clock, power and process memory", flush=True)
    sys.exit(print_rows(rows, arguments, read))


def print_rows(
    rows: Sequence[Row],
    arguments: argparse.Namespace,
    read: Callable[[], Sample] | None,
    remarks: Callable[[Mapping[str, Any]], Iterable[str]] = lambda found: (),
) -> str | None:
    """Measure rows; print each, and append it to `--out`, when it is done, with a line for each of its `remarks`.

    Return which rows failed or were not measured; None if there are none.
    """
    print(HEADINGS, flush=True)
    failed, on_one, end_at = list[str](), dict[tuple[str, ...], dict[str, Any]](), time.monotonic() + arguments.limit
    for index, row in enumerate(rows):
        if time.monotonic() > end_at - LEAST_SECONDS:
            names = ", ".join(left.name for left in rows[index:])
            return f"--limit {arguments.limit:.0f} left no time for {names}"
        found = compare(row, arguments, read, on_one, end_at)
        print("\n".join([line(found), *(f"  {remark}" for remark in remarks(found))]), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(found) + "\n")
        failed += [row.name] if any("error" in found[side] for side in SIDES if found.get(side)) else []
    return f"failed: {', '.join(failed)}" if failed else None


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="names or patterns of rows.py; all of one GPU without any")
    parser.add_argument("--seconds", type=float, default=180.0, help="a row, both sides with their start")
    parser.add_argument("--limit", type=float, default=inf, help="seconds of all rows")
    parser.add_argument("--timed", type=float, default=5.0, help="seconds of timed steps a side, at most 20 steps")
    parser.add_argument("--only", choices=["ours", "torch"])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key of our side")
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def compare(
    row: Row,
    arguments: argparse.Namespace,
    read: Callable[[], Sample] | None,
    on_one: dict[tuple[str, ...], dict[str, Any]],
    end_at: float = inf,
) -> dict[str, Any]:
    """Measure all sides of a row. A side that fails is {"error": ...}, one that is not wanted is {}.

    on_one: what was measured on one GPU, by the words of `step.py`. end_at: of all rows, as `time.monotonic`.
    """
    deadline = min(time.monotonic() + arguments.seconds, end_at)
    sides: dict[str, dict[str, Any]] = {"ours": {}, "torch": {}}
    others = {"ours in bf16": replace(row, fp8=False)} if row.fp8 and row.gpus == 1 else {}
    others |= {"ours on one": replace(row, gpus=1, zero_level=1)} if row.alone else {}
    for side, measured in {"ours": row, "torch": row, **others}.items():
        if arguments.only is not None and not side.startswith(arguments.only):
            continue
        words = words_of(side, measured, arguments)
        known = on_one.get(words)
        sides[side] = known or measure_side([sys.executable, *words], deadline - time.monotonic(), read)
        if side == "ours on one" and "error" not in sides[side]:
            on_one[words] = sides[side]
    return summarise(row, sides)


def words_of(side: str, row: Row, arguments: argparse.Namespace) -> tuple[str, ...]:
    """The script of a side, and its arguments."""
    sizes = ["--seq-len", row.seq_len, "--batch", row.batch, "--accumulate", row.accumulate, "--gpus", row.gpus]
    words = ["--model", str(arguments.models / row.model), *map(str, sizes), "--seconds", str(arguments.timed)]
    words += ["--lora"] if row.lora else []
    words += ["--warm-up", "1", "--steps", "1"] if row.long else []
    if side == "torch":
        flags = {"--fp8": row.fp8, "--nf4": row.nf4, "--dpo": row.dpo, "--checkpointing": row.checkpointed}
        level = "3" if row.zero_level == 3 else "2"
        return (str(HERE / "torch_step.py"), *words, *(f for f, on in flags.items() if on), "--zero-level", level)
    settings = [word for setting in (*row.settings, *arguments.set) for word in ("--set", setting)]
    return (str(HERE / "step.py"), *words, *(["--documents", "2"] if row.dpo else []), *settings)


def measure_side(words: list[str], seconds: float, read: Callable[[], Sample] | None) -> dict[str, Any]:
    """Run a script to its end, or for at most `seconds`. Returns the JSON that it prints last, and clock and power."""
    if seconds <= 0:
        return {"error": "the sides before took all of --seconds, or of --limit"}
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
    ours, torch, one = sides["ours"], sides["torch"], sides.get("ours on one", {})
    rate, their_rate, one_rate = (side.get("tokens_per_second") for side in (ours, torch, one))
    known = row.floor if ours.get("gpu") == FLOOR_GPU else None
    return {
        "row": row.name,
        "model": row.model,
        "batch": row.batch,
        "seq_len": row.seq_len,
        "accumulate": row.accumulate,
        "gpus": row.gpus,
        "mode": " ".join(word for word in ("fp8", "nf4", "dpo") if getattr(row, word))
        + (" lora" if row.lora else " full"),
        "ratio": round(rate / their_rate, 4) if rate and their_rate else None,
        "floor_tokens_per_second": known,
        "share_of_floor": round(rate / known, 4) if rate and known else None,
        "planned_share": round(ours["planned_ms"] / ours["step_ms"], 4) if rate else None,
        "planned_gib": round(ours["planned_bytes"] / 2**30, 2) if rate else None,
        "scaling": round(rate / one_rate / row.gpus, 4) if rate and one_rate else None,
        **sides,
    }


def line(found: dict[str, Any]) -> str:
    """The row of the table, and a line for each error."""
    cells = f"{found['row']:<{WIDTH}}"
    for side in ("torch", "ours"):
        cells += _side(found[side])
    for key, width, form in FIGURES:
        cells += f"{'-' if found[key] is None else format(found[key], form):>{width}}"
    lines = [cells]
    for side in SIDES[2:]:
        if found.get(side):
            lines.append(f"{f'  {side}':<{WIDTH}}{'':>30}{_side(found[side])}")
    for side in SIDES:
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
