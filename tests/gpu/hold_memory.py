"""A training run that prints its phases, for a process that measures its GPU memory (test_memory.py).

    python tests/gpu/hold_memory.py '{"model": "benchmarks/models/qwen3-0.6b", ...}'

The argument is a config as JSON. Prints `plan <bytes>`, then `phase construction`, `loading`, `capture`, `steps` and
`done`, each when it begins.
"""

from __future__ import annotations

import json
import sys

import torch

from surogate import run
from surogate.config.load import load_config
from surogate.runs.plan import plan_run
from surogate.runs.run import Run, open_run
from surogate_core.planning.plan import Plan
from surogate_core.plugins.discovery import load_registry
from surogate_core.runtime.device import training_device
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.worker import Worker
from surogate_profile.batches import random_batch

STEPS = 20


def main() -> None:
    registry = load_registry()
    config = load_config(json.loads(sys.argv[1]), registry=registry, source="hold_memory.py")
    opened = open_run(config, registry)
    plan = plan_run(opened, training_device())
    print("plan", plan.report.device_bytes["total"], flush=True)
    begin("construction")
    worker = run.make_worker(opened, plan)
    begin("loading")
    if opened.config.from_scratch:
        fill_quickly(plan, worker)
    else:
        run.fill_weights(opened, plan.assembly, worker)
    begin("capture")
    worker.start()
    worker.settle()
    begin("steps")
    train(opened, plan, worker)
    begin("done")


def begin(phase: str) -> None:
    print("phase", phase, flush=True)


def fill_quickly(plan: Plan, worker: Worker) -> None:
    """Fill the weights like `run.fill_weights`, but repeat 16M random numbers, because billions would take minutes."""
    noise = (0.02 * torch.randn(1 << 24)).to(next(iter(worker.params().values())).dtype)
    matrices = {v for v in plan.assembly.declared if v.role == "param" and v.init and v.init.kind == "normal"}
    view = worker.buffers.persistent
    initialize((v for v in plan.assembly.declared if v.init and v not in matrices), view, seed=1)
    for value in matrices:
        for part in view(value).view(-1).split(noise.numel()):
            part.copy_(noise[: part.numel()])


def train(opened: Run, plan: Plan, worker: Worker) -> None:
    """Run optimizer steps with one micro-step (every fifth with two) and an evaluation, so that every program runs."""
    documents = 4 if opened.config.sample_packing else 1
    batch = random_batch(plan.inputs, documents=documents, labelled=1.0)
    for step in range(1, STEPS + 1):
        micro_steps = 2 if step % 5 == 0 else 1
        for i in range(micro_steps):
            worker.micro_step(batch, first=i == 0, loss_scale=1 / (micro_steps * batch.n_valid), index=2 * step + i)
        loss, _ = worker.update(lr=1e-5, step=step).values()
        assert loss == loss, f"step {step}: the loss is NaN"
    worker.evaluate(batch)


if __name__ == "__main__":
    main()
