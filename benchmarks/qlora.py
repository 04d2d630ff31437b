"""The loss of LoRA on frozen weights in each format, against bf16.

    python benchmarks/convergence.py prepare work --text docs.jsonl --chat gsm8k.jsonl
    python benchmarks/convergence.py train work full bf16
    python benchmarks/qlora.py train work
    python benchmarks/qlora.py compare work --picture docs/qlora-loss.png

`train` fine-tunes the model of the run full bf16, 98M parameters, on questions and answers: six formats, three seeds of
the adapter and of the order of the data, several processes at a time on one GPU. The validation set is the same in all.
`--part 1/2` trains every second run, for a second GPU; train `--part 1/18` first, which chooses the algorithms of
products for both. `--set key=value` changes every run.

`compare` prints a Markdown table. Differences to bf16 are between runs of the same seed: of the loss on the validation
set after the last step, and of the loss of the first step, which is that of the model before training. It exits with 1
if a mean difference is larger than LIMITS allow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from convergence import COMMON, LORA, read

FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "FP8": {"qlora_fp8": True},
    "NF4": {"qlora_bnb": True, "qlora_bnb_double_quant": False},
    "NF4, double quantization": {"qlora_bnb": True},
    "FP4": {"qlora_fp4": True, "qlora_four_over_six": False},
    "FP4, 4/6": {"qlora_fp4": True},
}
BASE = "bf16"
SEEDS = (1, 2, 3)
LIMITS = {"FP8": 0.3, "NF4": 1.0, "NF4, double quantization": 1.0}
"""Percent by which the mean loss of a format may differ from that of bf16."""
SETTINGS = {"learning_rate": 1e-3, "eval_steps": 30}
"""Besides LORA. At its learning rate, 4e-3, another algorithm for products alone moves a run by 0.6 %."""


@dataclass(frozen=True)
class Curve:
    """The losses of a run.

    first     of the first step, before any update
    held_out  (step, loss) of each evaluation
    """

    first: float
    held_out: Sequence[tuple[int, float]]

    @property
    def last(self) -> float:
        return self.held_out[-1][1]


Curves = Mapping[str, Sequence[Curve]]
"""Format -> its runs, in the order of SEEDS."""


def main() -> None:
    arguments = parse(sys.argv[1:])
    {"train": train, "compare": compare}[arguments.command](arguments)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trains, compares = (commands.add_parser(name) for name in ("train", "compare"))
    for command in (trains, compares):
        command.add_argument("folder", type=Path, help="of convergence.py prepare")
    trains.add_argument("--part", type=part, default=(1, 1), metavar="I/N")
    trains.add_argument("--at-a-time", type=int, default=3)
    trains.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    compares.add_argument("--picture", type=Path)
    return parser.parse_args(words)


def part(word: str) -> tuple[int, int]:
    index, count = (int(number) for number in word.split("/"))
    if not 1 <= index <= count:
        raise ValueError(word)
    return index, count


def train(arguments: argparse.Namespace) -> None:
    index, count = arguments.part
    every = [(name, seed) for seed in SEEDS for name in FORMATS]
    chosen = every[index - 1 :: count]
    train_one = partial(train_run, arguments.folder.resolve(), arguments.set)
    # The first run alone: it times the algorithms of products, and the others take the same. Other algorithms would
    # move the losses by more than the formats do.
    if any(map(train_one, chosen[:1])):
        sys.exit(1)
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        codes = list(pool.map(train_one, chosen[1:]))
    sys.exit(1 if any(codes) else 0)


def train_run(folder: Path, settings: Sequence[str], format_and_seed: tuple[str, int]) -> int:
    """Train a run in a process of its own, and return its exit code. Its output is written to a log in `folder`."""
    name, seed = format_and_seed
    output = folder_of(folder, name, seed)
    raw = COMMON | LORA | SETTINGS | FORMATS[name] | {"model": str(folder / "full-bf16-1"), "train_seed": seed}
    fields = {"instruction_field": "question", "output_field": "answer"}
    raw |= {"datasets": [{"path": str(folder / "chat.jsonl"), "type": "instruction", **fields}]}
    raw |= {"validation_split_ratio": 0.05, "output_dir": str(output)}
    config = output.with_suffix(".yaml")
    config.write_text(json.dumps(raw, indent=2))
    overrides = [word for setting in settings for word in ("--set", setting)]
    with output.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", "surogate_core.cli", "sft", str(config), *overrides]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    result = f"held out {read_run(output).last:.4f}" if code == 0 else f"failed, see {log.name}"
    print(f"{output.name:<36}{result}", flush=True)
    return code


def folder_of(folder: Path, name: str, seed: int) -> Path:
    word = name.lower().replace(", ", "-").replace(" ", "-").replace("/", "")
    return folder / f"qlora-{word}-{seed}"


def read_run(output: Path) -> Curve:
    steps, evaluations = read(output / "metrics.jsonl")
    return Curve(steps[0], evaluations)


def compare(arguments: argparse.Namespace) -> None:
    curves = {name: [read_run(folder_of(arguments.folder, name, seed)) for seed in SEEDS] for name in FORMATS}
    print("\n".join(table(curves)))
    if arguments.picture:
        draw(arguments.picture, curves)
    broken = {name: limit for name, limit in LIMITS.items() if abs(mean(gaps(curves, name))) > limit}
    sys.exit("\n".join(f"{name}: differs from bf16 by more than {limit} %" for name, limit in broken.items()) or 0)


def table(curves: Curves) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        f"| frozen weights | loss, mean of {len(SEEDS)} seeds | lowest to highest | difference to bf16 | of each seed "
        "| before training |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        last = [run.last for run in runs]
        cells = [name, f"{mean(last):.4f}", f"{min(last):.4f} to {max(last):.4f}"]
        if name != BASE:
            found = gaps(curves, name)
            before = [percent(a.first, b.first) for a, b in zip(runs, curves[BASE], strict=True)]
            cells += [f"{mean(found):+.2f} %", ", ".join(f"{gap:+.2f}" for gap in found), f"{mean(before):+.2f} %"]
        lines.append(f"| {' | '.join(cells + [''] * (6 - len(cells)))} |")
    return lines


def gaps(curves: Curves, name: str) -> list[float]:
    """Return by how many percent the last loss of each run is above that of bf16 with the same seed."""
    return [percent(a.last, b.last) for a, b in zip(curves[name], curves[BASE], strict=True)]


def percent(loss: float, base: float) -> float:
    return 100 * (loss / base - 1)


def draw(path: Path, curves: Curves) -> None:
    """Draw the mean loss on the validation set, and the difference to bf16, mean and range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for number, (name, runs) in enumerate(curves.items()):
        steps = [step for step, _ in runs[0].held_out]
        losses = [[loss for _, loss in run.held_out] for run in runs]
        base = [[loss for _, loss in run.held_out] for run in curves[BASE]]
        above = [[percent(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(losses, base, strict=True)]
        color = "black" if name == BASE else f"C{number - 1}"
        left.plot(steps, [mean(at_step) for at_step in zip(*losses, strict=True)], color=color, label=name)
        gap = list(zip(*above, strict=True))
        right.plot(steps, [mean(at_step) for at_step in gap], color=color)
        right.fill_between(steps, list(map(min, gap)), list(map(max, gap)), color=color, alpha=0.1, lw=0)
    left.set(xlabel="step", ylabel="loss on held-out questions, mean of the seeds")
    right.set(xlabel="step", ylabel="difference to bf16 of the same seed, %")
    left.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
