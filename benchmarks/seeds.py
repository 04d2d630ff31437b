"""Trains variants of a run with several seeds, and compares their losses with those of one variant.

A benchmark describes its variants by a `Comparison` and calls `main`:

    python benchmarks/qlora.py train work
    python benchmarks/qlora.py compare work --picture docs/qlora-loss.png

Further comparisons of a benchmark have names, which are its flags.

`train` runs several processes at a time on one GPU. `--part 1/2` trains every second run, for a second GPU; train
`--part 1/N` of all N runs first, which chooses the algorithms of products for both. `--set key=value` changes every
run.

`compare` prints a Markdown table. Differences are between runs of the same seed, of the loss on the validation set
after the last step. It exits with 1 if a mean difference is larger than the limits allow.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from convergence import SMOOTHED, read

SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Curve:
    """The losses of a run.

    first     of the first step, before any update
    trained   of the last steps, mean of SMOOTHED
    held_out  (step, loss) of each evaluation
    """

    first: float
    trained: float
    held_out: Sequence[tuple[int, float]]

    @property
    def last(self) -> float:
        return self.held_out[-1][1]


Curves = Mapping[str, Sequence[Curve]]
"""Variant -> its runs, in the order of SEEDS."""


@dataclass(frozen=True)
class Comparison:
    """Variants of a run.

    name      first part of the names of the folders
    mode      command of the CLI
    settings  (folder of convergence.py prepare, seed) -> the keys of every run but `output_dir`
    variants  {name: keys that differ}
    base      the variant that the others are compared with
    limits    {variant: percent by which its mean loss may differ from that of the base}
    heading   of the first column of the table
    figure    (heading, run -> loss) of a further column of differences to the base
    """

    name: str
    mode: str
    settings: Callable[[Path, int], Mapping[str, Any]]
    variants: Mapping[str, Mapping[str, Any]]
    heading: str
    figure: tuple[str, Callable[[Curve], float]]
    base: str = "bf16"
    limits: Mapping[str, float] = field(default_factory=dict)


def main(comparison: Comparison, words: Sequence[str], description: str | None, **further: Comparison) -> None:
    arguments = parse(words, description, further)
    chosen = further.get(arguments.chosen, comparison)
    {"train": train, "compare": compare}[arguments.command](chosen, arguments)


def parse(words: Sequence[str], description: str | None = None, further: Collection[str] = ()) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    trains, compares = (commands.add_parser(name) for name in ("train", "compare"))
    for command in (trains, compares):
        command.add_argument("folder", type=Path, help="of convergence.py prepare")
        command.set_defaults(chosen="")
        for name in further:
            command.add_argument(f"--{name}", dest="chosen", action="store_const", const=name)
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


def train(comparison: Comparison, arguments: argparse.Namespace) -> None:
    index, count = arguments.part
    every = [(name, seed) for seed in SEEDS for name in comparison.variants]
    chosen = every[index - 1 :: count]
    train_one = partial(train_run, comparison, arguments.folder.resolve(), arguments.set)
    # The first run alone: it times the algorithms of products, and the others take the same. Other algorithms would
    # move the losses by more than the variants do.
    if any(map(train_one, chosen[:1])):
        sys.exit(1)
    with ThreadPoolExecutor(arguments.at_a_time) as pool:
        codes = list(pool.map(train_one, chosen[1:]))
    sys.exit(1 if any(codes) else 0)


def train_run(comparison: Comparison, folder: Path, settings: Sequence[str], variant_and_seed: tuple[str, int]) -> int:
    """Train a run in a process of its own, and return its exit code. Its output is written to a log in `folder`."""
    name, seed = variant_and_seed
    output = folder_of(comparison, folder, name, seed)
    raw = {**comparison.settings(folder, seed), **comparison.variants[name], "output_dir": str(output)}
    config = output.with_suffix(".yaml")
    config.write_text(json.dumps(raw, indent=2))
    overrides = [word for setting in settings for word in ("--set", setting)]
    with output.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", "surogate.cli", comparison.mode, str(config), *overrides]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    result = f"held out {read_run(output).last:.4f}" if code == 0 else f"failed, see {log.name}"
    print(f"{output.name:<44}{result}", flush=True)
    return code


def folder_of(comparison: Comparison, folder: Path, name: str, seed: int) -> Path:
    word = name.lower().replace(", ", "-").replace(" ", "-").replace("/", "")
    return folder / f"{comparison.name}-{word}-{seed}"


def read_run(output: Path) -> Curve:
    steps, evaluations = read(output / "metrics.jsonl")
    return Curve(steps[0], mean(steps[-SMOOTHED:]), evaluations)


def compare(comparison: Comparison, arguments: argparse.Namespace) -> None:
    curves = {
        name: [read_run(folder_of(comparison, arguments.folder, name, seed)) for seed in SEEDS]
        for name in comparison.variants
    }
    print("\n".join(table(comparison, curves)))
    if arguments.picture:
        draw(comparison, arguments.picture, curves)
    broken = {
        name: limit for name, limit in comparison.limits.items() if abs(mean(gaps(comparison, curves, name))) > limit
    }
    sys.exit(
        "\n".join(f"{name}: differs from {comparison.base} by more than {limit} %" for name, limit in broken.items())
        or 0
    )


def table(comparison: Comparison, curves: Curves) -> list[str]:
    """Return the lines of a Markdown table."""
    further, figure = comparison.figure
    lines = [
        f"| {comparison.heading} | loss, mean of {len(SEEDS)} seeds | lowest to highest "
        f"| difference to {comparison.base} | of each seed | {further} |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in curves.items():
        last = [run.last for run in runs]
        cells = [name, f"{mean(last):.4f}", f"{min(last):.4f} to {max(last):.4f}"]
        if name != comparison.base:
            found = gaps(comparison, curves, name)
            others = [percent(figure(a), figure(b)) for a, b in zip(runs, curves[comparison.base], strict=True)]
            cells += [f"{mean(found):+.2f} %", ", ".join(f"{gap:+.2f}" for gap in found), f"{mean(others):+.2f} %"]
        lines.append(f"| {' | '.join(cells + [''] * (6 - len(cells)))} |")
    return lines


def gaps(comparison: Comparison, curves: Curves, name: str) -> list[float]:
    """Return by how many percent the last loss of each run is above that of the base with the same seed."""
    return [percent(a.last, b.last) for a, b in zip(curves[name], curves[comparison.base], strict=True)]


def percent(loss: float, base: float) -> float:
    return 100 * (loss / base - 1)


def draw(comparison: Comparison, path: Path, curves: Curves) -> None:
    """Draw the mean loss on the validation set, and the difference to the base, mean and range of the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for number, (name, runs) in enumerate(curves.items()):
        steps = [step for step, _ in runs[0].held_out]
        losses = [[loss for _, loss in run.held_out] for run in runs]
        base = [[loss for _, loss in run.held_out] for run in curves[comparison.base]]
        above = [[percent(a, b) for a, b in zip(*pair, strict=True)] for pair in zip(losses, base, strict=True)]
        color = "black" if name == comparison.base else f"C{number - 1}"
        left.plot(steps, [mean(at_step) for at_step in zip(*losses, strict=True)], color=color, label=name)
        gap = list(zip(*above, strict=True))
        right.plot(steps, [mean(at_step) for at_step in gap], color=color)
        right.fill_between(steps, list(map(min, gap)), list(map(max, gap)), color=color, alpha=0.1, lw=0)
    left.set(xlabel="step", ylabel="loss on held-out documents, mean of the seeds")
    right.set(xlabel="step", ylabel=f"difference to {comparison.base} of the same seed, %")
    left.legend()
    figure.savefig(path, dpi=110)
