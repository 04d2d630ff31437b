"""Time and memory of our training steps on this machine, compared with the plan.

    python benchmarks/step.py --model benchmarks/models/qwen3-0.6b --seq-len 2048 --batch 2 --batch 8 --out step.jsonl
    python benchmarks/step.py --model benchmarks/models/qwen3-8b --lora --batch 2 --accumulate 4 --set model_dtype=bf16
    python benchmarks/step.py --model benchmarks/models/gpt-oss-20b --lora --batch 2 --accumulate 4 \\
        --set qlora_mxfp4=true --set optimizer=adamw_8bit \\
        --set "lora_target_parameters=[mlp.experts.gate_up_proj, mlp.experts.down_proj]"

Random tokens, random weights, those of a weight format drawn and encoded on the device block by block; `--documents` a
row of equal length, `--labelled` of the tokens with a label. A line of JSON per batch size: median of the timed
optimizer steps after `--warm-up`, and the bytes that the process holds on the first device beyond an empty context's,
by cudaMemGetInfo. `--seconds` ends the timing early. `--gpus 2` trains on two, each with the batch size given.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from math import inf
from pathlib import Path
from typing import Any

import torch
from timing import timed

from surogate import run
from surogate.config.load import load_config
from surogate.config.yaml import apply_overrides
from surogate.runs.plan import plan_run
from surogate.runs.run import Run, open_run
from surogate.world.connect import connected
from surogate.world.processes import Processes
from surogate_core.api import Comm, DeviceInfo, World
from surogate_core.planning.plan import Plan
from surogate_core.plugins.discovery import load_registry
from surogate_core.runtime.device import training_device
from surogate_core.runtime.team import Team
from surogate_core.train import optimizer_step
from surogate_profile.batches import fill, random_batch, step_of

DISTINCT_BATCHES = 4


def main() -> None:
    arguments = parse(sys.argv[1:])
    for batch in arguments.batch:
        line = json.dumps(measure(arguments, batch))
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(line + "\n")


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, action="append", required=True)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-steps of an optimizer step")
    parser.add_argument("--lora", action="store_true", help="rank 16 on every linear layer; else full training")
    parser.add_argument("--documents", type=int, default=1, help="a row")
    parser.add_argument("--labelled", type=float, default=1.0, help="share of the tokens")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=4, help="steps before those that are timed")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timed steps, at most; three are timed anyway")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--eager", action="store_true", help="time the eager launches too")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def measure(arguments: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    """One configuration: plan, run, compare."""
    before = free_bytes()
    opened, planned = plan(arguments, batch_size)
    if not planned.report.fits:
        sys.exit(f"step.py: does not fit {arguments.gpus} x {planned.target.device.title}: {needs(planned)}")
    gpus = range(arguments.gpus)
    processes = Processes(World(size=len(gpus), ranks=gpus, devices=gpus), inf)
    with processes.ending(), connected(processes, "auto", torch.cuda.is_available()) as comms:
        result = measure_worker(arguments, opened, planned, comms, before)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def measure_worker(
    arguments: argparse.Namespace, opened: Run, plan: Plan, comms: Sequence[Comm], before: int
) -> dict[str, Any]:
    """Times and bytes of a worker, or of a team; `before`: bytes free on the first device in an empty process."""
    worker = run.make_worker(opened, plan, comms, lambda line: print(line, file=sys.stderr))
    fill(opened, plan.assembly, worker, random=True)
    distinct = [
        random_batch(plan.inputs, arguments.documents, arguments.labelled, seed=1 + i) for i in range(DISTINCT_BATCHES)
    ]
    micro = [distinct[i % len(distinct)] for i in range(arguments.accumulate) for _ in range(worker.width)]
    batch = step_of(micro)
    on_gpu = torch.cuda.is_available()
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "batch": plan.inputs.batch_size,
        "seq_len": arguments.seq_len,
        "accumulate": arguments.accumulate,
        "lora": arguments.lora,
        "documents": arguments.documents,
        "labelled": arguments.labelled,
        "settings": arguments.set,
        "gpus": worker.width,
        "gpu": torch.cuda.get_device_name() if on_gpu else plan.target.device.title,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "date": time.strftime("%Y-%m-%d"),
    }

    def step(number: int) -> None:
        optimizer_step(worker, batch, number, lr=1e-5).values()

    if arguments.eager:
        worker.start(graphs=False)
        result["eager_ms"] = timed(step, arguments.warm_up, arguments)["step_ms"]
    worker.start(graphs=plan.gains_by_graphs)
    result |= timed(step, arguments.warm_up, arguments)
    tokens = plan.inputs.batch_size * arguments.seq_len * arguments.accumulate * worker.width
    result["tokens_per_second"] = round(tokens / result["step_ms"] * 1000)
    result["planned_ms"] = round(plan.report.step.seconds * 1000, 2)
    held = before - free_bytes()
    planned = plan.report.device_bytes
    first = worker._workers[0] if isinstance(worker, Team) else worker
    result |= {
        "planned_bytes": planned["total"],
        "held_bytes": held,
        "planned_buffers": planned["total"] - planned["runtime"],
        "held_beyond_buffers": held - (planned["total"] - planned["runtime"]),
        "captured": list(getattr(first.executor, "captured", ())),
        "loss": worker.update(lr=0.0, step=1).values()[0],
    }
    worker.close()
    return result


def needs(plan: Plan) -> str:
    """What a run that does not fit needs of each device, in words."""
    needed, there = plan.report.device_bytes["total"] / 2**30, plan.target.device.memory_bytes / 2**30
    return f"{needed:.1f} GiB planned on each, which has {there:.1f}"


def free_bytes() -> int:
    """Bytes free on the first GPU, once a context exists; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def plan(arguments: argparse.Namespace, batch_size: int, card: DeviceInfo | None = None) -> tuple[Run, Plan]:
    """The run of the arguments and its plan, for this machine or for `card`."""
    raw: dict[str, Any] = {
        "model": arguments.model,
        "from_scratch": not arguments.lora,
        "lora": arguments.lora,
        "sequence_len": arguments.seq_len,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": arguments.accumulate,
        "sample_packing": arguments.documents > 1,
        "recompute": False,
    }
    registry = load_registry()
    loaded = load_config(apply_overrides(raw, arguments.set), registry=registry, source="benchmark")
    opened = open_run(loaded, registry)
    return opened, plan_run(opened, card or training_device(), arguments.gpus)


if __name__ == "__main__":
    main()
