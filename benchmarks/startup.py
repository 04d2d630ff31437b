"""Measure whole commands on this machine from the start of their process, by phase.

    python benchmarks/startup.py quickstart
    python benchmarks/startup.py lora --model Qwen/Qwen3-0.6B --data examples/data/tinyshakespeare.txt
    python benchmarks/startup.py scratch --model examples/qwen3-8b

Each is `surogate train` with SUROGATE_TIMING=1 in a separate process. It runs `--rounds` times after one run that fills
the caches (tokens, bytecode, autotuned algorithms). PYTHONDONTWRITEBYTECODE is ignored: without bytecode, each run
compiles two thousand modules anew. The script prints the table of every round, then the medians:

    quickstart   the whole command of examples/quickstart.yaml
    lora         until the first step of LoRA is reported, with cached tokens
    scratch      the phase "weights" of a model from scratch: drawn on the host, copied to the GPU
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
PHASE = re.compile(r"^ +([\d.]+) +([\d.]+) +([\d.]+)  (.+)$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["quickstart", "lora", "scratch"])
    parser.add_argument("--model", help="directory or hub id, for lora and scratch")
    parser.add_argument("--data", default=str(ROOT / "examples/data/tinyshakespeare.txt"), help="a text file")
    parser.add_argument("--steps", type=int, default=40, help="of lora")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.what != "quickstart" and arguments.model is None:
        parser.error(f"{arguments.what} needs --model")
    with tempfile.TemporaryDirectory(prefix="surogate-startup-") as name:
        config = write_config(arguments, Path(name))
        rounds = [measure(arguments, config, Path(name) / "output") for _ in range(arguments.rounds + 1)][1:]
    told = {"quickstart": "whole command", "lora": "process start to first step", "scratch": "weights from scratch"}
    print(f"\n{told[arguments.what]}: median {statistics.median(rounds):.2f} s of {[round(r, 2) for r in rounds]}")


def write_config(arguments: argparse.Namespace, folder: Path) -> Path:
    """Write the YAML file of the run and return its path."""
    if arguments.what == "quickstart":
        return ROOT / "examples/quickstart.yaml"
    keys = {
        "model": arguments.model,
        "overwrite_output_dir": True,
        "datasets": [{"path": str(Path(arguments.data).resolve()), "type": "text"}],
        "sequence_len": 512,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "warmup_steps": 0,
        "eval_steps": 0,
        "save_steps": 0,
        "validation_split_ratio": 0,
        "logging_steps": 1,
    }
    if arguments.what == "lora":
        keys |= {"lora": True, "max_steps": arguments.steps}
    else:
        states = {"optimizer": "adamw", "optimizer_state_dtype": "bf16", "param_grad_dtype": "bf16"}
        keys |= {"from_scratch": True, "model_dtype": "bf16", "max_steps": 1, "verify_outputs": False, **states}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(keys))
    return path


def measure(arguments: argparse.Namespace, config: Path, output: Path) -> float:
    """Run one round and return its seconds, as described at the top of this file."""
    overrides = [f"output_dir={output}", *arguments.set]
    command = [sys.executable, "-m", "surogate.cli", "train", str(config)]
    command += [part for override in overrides for part in ("--set", override)]
    environ = os.environ | {"SUROGATE_TIMING": "1", "PYTHONDONTWRITEBYTECODE": ""}
    started = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    whole = time.perf_counter() - started
    print(done.stderr, f"whole command {whole:.2f} s", sep="\n", flush=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}")
    phases = {name: (float(wall), float(at)) for wall, _, at, name in PHASE.findall(done.stderr)}
    if arguments.what == "quickstart":
        return whole
    return phases["first step"][1] if arguments.what == "lora" else phases["weights"][0]


if __name__ == "__main__":
    main()
