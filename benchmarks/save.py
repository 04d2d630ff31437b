"""Measure what a checkpoint costs training: the same run without saves, with background and with foreground saves.

    python benchmarks/save.py examples/quickstart.yaml --steps 60 --save-steps 10
    python benchmarks/save.py examples/quickstart.yaml --model benchmarks/models/qwen3-0.6b --steps 60 \\
        --save-steps 20 --set model_dtype=bf16 --set sequence_len=2048 --set per_device_train_batch_size=8

`--model` is a folder with a config.json to train from random weights, with the tokenizer of the example. The script
prints one line of JSON per variant: how long each save blocked the loop, seconds from the report of the fifth step to
the end of the last save, and the seconds that a save adds to the run without saves. TMPDIR selects the disk.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from surogate import run
from surogate.checkpoints import writer
from surogate.reporting.metrics import read_metrics

WARM_UP_STEPS = 5
WAYS = {
    "none": ["save_steps=0"],
    "background": ["save_in_background=true"],
    "foreground": ["save_in_background=false"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, float] = {}
    for way, keys in WAYS.items():
        line = measure(arguments, keys)
        seconds[way] = line["steps_s"]
        added = (seconds[way] - seconds["none"]) / line["saves"] if line["saves"] else 0.0
        text = json.dumps({"way": way, **line, "added_s_a_save": round(added, 4)})
        print(text, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(text + "\n")


def measure(arguments: argparse.Namespace, keys: list[str]) -> dict[str, Any]:
    """Measure one run in a temporary folder, without the final model, which is always saved in the foreground."""
    with tempfile.TemporaryDirectory() as name:
        folder, told = Path(name), list[tuple[float, str]]()
        if arguments.model:
            shutil.copytree("examples/tiny-qwen3", folder / "model")
            shutil.copy(arguments.model / "config.json", folder / "model/config.json")
            keys = [*keys, f"model={folder / 'model'}"]
        keys = [
            f"save_steps={arguments.save_steps}",
            *keys,
            *(f"output_dir={folder / 'out'}", f"max_steps={arguments.steps + 1}", "eval_steps=0"),
            *(f"logging_steps={arguments.steps}", "validation_split_ratio=0", "save_total_limit=2", *arguments.set),
        ]
        held = list[float]()
        timed(writer.BackgroundWriter, held)
        timed(writer.ForegroundWriter, held)
        run.train(run.load(arguments.config, keys), lambda line: told.append((time.time(), line)))
        steps = [record for record in read_metrics(folder / "out/metrics.jsonl") if record["log"] == "step"]
        saves = [(at, line) for at, line in told if line.startswith("saved step_")]
        nbytes = sum(p.stat().st_size for p in max(folder.glob("out/step_*"), default=folder).rglob("*") if saves)
    return {
        "steps": len(steps) - WARM_UP_STEPS,
        "step_median_s": round(sorted(s["duration_ms"] for s in steps)[len(steps) // 2] / 1000, 4),
        "steps_s": round(max([steps[-1]["time"], *(at for at, _ in saves)]) - steps[WARM_UP_STEPS - 1]["time"], 4),
        "saves": len(saves),
        "held_s": [round(seconds, 4) for seconds in held],
        "checkpoint_bytes": nbytes,
        "said": [line for _, line in told if "sav" in line],
    }


def timed(saves: Any, held: list[float]) -> None:
    """Make `saves.save` append its duration in seconds to `held`."""
    save = getattr(saves.save, "untimed", saves.save)

    def measured(self: Any, step: int, progress: Any) -> None:
        began = time.perf_counter()
        save(self, step, progress)
        held.append(time.perf_counter() - began)

    measured.untimed = save  # type: ignore[attr-defined]
    saves.save = measured


if __name__ == "__main__":
    main()
