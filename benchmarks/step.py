"""Measure time and memory of training steps on this machine's GPU, eager and captured, and compare with the plan.

    python benchmarks/step.py --model benchmarks/models/qwen3-0.6b --seq-len 2048 --batch 2 --batch 8 --out step.jsonl

Tokens and weights are random. `--documents` is the number of documents of equal length per row, `--labelled` the share
of tokens with a label. The script prints one line of JSON per batch size: the median of the timed optimizer steps (one
micro-step each) after a warm-up, and the bytes that the process holds on the first device in addition to an empty
context, by cudaMemGetInfo. `--gpus 2` trains on two GPUs, each with the given batch size.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from surogate_core import run
from surogate_core.api import Comm, Topology
from surogate_core.config.load import load_config
from surogate_core.data.loader import MicroBatch
from surogate_core.planning.plan import Plan, plan_run
from surogate_core.planning.run import Run, open_run
from surogate_core.plugins.discovery import load_registry
from surogate_core.runtime.device import training_device
from surogate_core.runtime.launch import run_local
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, action="append", required=True)
    parser.add_argument("--documents", type=int, default=1, help="a row")
    parser.add_argument("--labelled", type=float, default=1.0, help="share of the tokens")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--eager", action="store_true", help="time the eager launches too")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    for batch in arguments.batch:
        line = json.dumps(measure(arguments, batch))
        print(line, flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(line + "\n")


def measure(arguments: argparse.Namespace, batch_size: int) -> dict[str, Any]:
    """Plan and run one configuration, and return its results."""
    torch.cuda.init()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    opened, planned = plan(arguments, batch_size)
    topology = Topology(devices=arguments.gpus)
    result = run_local(lambda comms: measure_worker(arguments, opened, planned, comms, before), topology)
    gc.collect()
    torch.cuda.empty_cache()
    return result


def measure_worker(
    arguments: argparse.Namespace, opened: Run, plan: Plan, comms: Sequence[Comm], before: int
) -> dict[str, Any]:
    """Measure a worker or a team. `before`: bytes free on the first device in an empty process."""
    worker = run.make_worker(opened, plan, comms, lambda line: print(line, file=sys.stderr))
    run.fill_weights(opened, plan.assembly, worker)
    batch = random_batch(plan, arguments.documents, arguments.labelled)
    batch_size = plan.inputs.batch_size
    result: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "batch": batch_size,
        "seq_len": arguments.seq_len,
        "documents": arguments.documents,
        "labelled": arguments.labelled,
        "settings": arguments.set,
        "gpus": worker.width,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    tokens = batch_size * arguments.seq_len * worker.width
    if arguments.eager:
        worker.start(graphs=False)
        result["eager_ms"] = median_ms(worker, batch, arguments.steps)
    worker.start(graphs=True)
    result["graph_ms"] = median_ms(worker, batch, arguments.steps)
    result["tokens_per_second"] = round(tokens / result["graph_ms"] * 1000)
    result["planned_ms"] = round(plan.report.step.seconds * 1000, 2)
    torch.cuda.synchronize()
    held = before - torch.cuda.mem_get_info()[0]
    planned = plan.report.device_bytes
    first = worker._workers[0] if isinstance(worker, Team) else worker
    result |= {
        "held_bytes": held,
        "planned_buffers": planned["total"] - planned["runtime"],
        "held_beyond_buffers": held - (planned["total"] - planned["runtime"]),
        "captured": list(first.executor.captured),
        "loss": worker.update(lr=0.0, step=1).values()[0],
    }
    worker.close()
    return result


def plan(arguments: argparse.Namespace, batch_size: int) -> tuple[Run, Plan]:
    raw: dict[str, Any] = {
        "model": arguments.model,
        "from_scratch": True,
        "sequence_len": arguments.seq_len,
        "per_device_train_batch_size": batch_size,
        "gradient_accumulation_steps": 1,
        "sample_packing": arguments.documents > 1,
    }
    raw |= dict(item.split("=", 1) for item in arguments.set)
    registry = load_registry()
    loaded = load_config(raw, registry=registry, source="benchmark")
    opened = open_run(loaded, registry)
    return opened, plan_run(opened, training_device(), arguments.gpus)


def random_batch(plan: Plan, documents: int, labelled: float) -> MicroBatch:
    """Make rows of `documents` documents of equal length. The first `labelled` share of each document has labels."""
    given, assembly = plan.inputs, plan.assembly
    total = given.batch_size * given.seq_len
    length = given.seq_len // documents
    tokens = np.random.default_rng(1).integers(0, given.dims.vocab_size, total, dtype=np.int32)
    starts = np.arange(0, total, length, dtype=np.int32)
    offsets = np.full(assembly.batch.cu_seqlens.shape, total, np.int32)
    offsets[: len(starts)] = starts
    positions = np.tile(np.arange(length, dtype=np.int32), len(starts))
    targets = np.where(positions < int(labelled * length) - 1, np.roll(tokens, -1), -100).astype(np.int32)
    return MicroBatch(tokens, targets, positions, offsets, total, int((targets >= 0).sum()))


def median_ms(worker: Worker | Team, batch: MicroBatch, steps: int) -> float:
    times = []
    for step in range(1, steps + 6):
        began = time.perf_counter()
        scale = 1 / batch.n_valid / worker.width
        worker.micro_step(*[batch] * worker.width, first=True, last=True, loss_scale=scale, index=step * worker.width)
        worker.update(lr=1e-5, step=step).values()
        times.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(times[5:]), 3)


if __name__ == "__main__":
    main()
