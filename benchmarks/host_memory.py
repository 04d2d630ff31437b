"""Rates of the link to host memory, and what `use_zero_copy` changes.

    python benchmarks/host_memory.py
    python benchmarks/host_memory.py --layers 36

Three tables: copies by the copy engines from and to pinned memory; the update with its
states on the device, copied from the host, and read over the link; LoRA steps whose weights are streamed
from there. The model is qwen3-8b with `--layers` blocks; tokens and weights are random. Times are medians, next
to the planned ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import step as steps
import torch
from torch import Tensor

from surogate import run
from surogate.runs.run import Run
from surogate_core.machine.devices import GIB
from surogate_core.memory.cost import OpCosts, program_cost
from surogate_core.planning.plan import Plan
from surogate_core.runtime.host_memory import allocate, pin, unpin
from surogate_core.train import optimizer_step
from surogate_profile.batches import fill, random_batch, step_of

HERE = Path(__file__).parent
REPEATS = 5
BF16 = ("model_dtype=bf16", "param_grad_dtype=bf16", "deterministic=true")
OPTIMIZERS = {
    "adamw, bf16": ("optimizer=adamw", "optimizer_state_dtype=bf16"),
    "adamw_8bit": ("optimizer=adamw_8bit",),
}
STATES = {
    "on the device": (),
    "copied": ("offload_optimizer=true",),
    "zero copy": ("offload_optimizer=true", "use_zero_copy=true"),
    "zero copy but for blocks": ("offload_optimizer=true", "use_zero_copy=auto"),
}
WEIGHTS = {
    "on the device": (),
    "streamed": ("offload_weights=true",),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print_link_rates()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        config = json.loads((HERE / "models" / "qwen3-8b" / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": arguments.layers}))
        print(f"\nupdate of qwen3-8b with {arguments.layers} blocks, ms   measured   planned   GiB on the device")
        for optimizer, keys in OPTIMIZERS.items():
            for states, more in STATES.items():
                print_row(f"{optimizer}, states {states}", [*BF16, *keys, *more], model, update_only=True)
        print(f"\nLoRA step of 2,048 tokens, {arguments.layers} blocks, ms   measured   planned   GiB on the device")
        for weights, more in WEIGHTS.items():
            print_row(f"weights {weights}", [*BF16[:1], *BF16[2:], *more, "lora=true"], model, update_only=False)


def print_link_rates() -> None:
    nbytes, device = 1 << 30, torch.device("cuda:0")
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    pinned = allocate(nbytes)
    pin(pinned, device)
    print("copies of 1 GiB, GB/s     to the device   to the host   both at once, each")
    there = gigabytes_per_second(nbytes, lambda: on_device.copy_(pinned, non_blocking=True))
    back = gigabytes_per_second(nbytes, lambda: pinned.copy_(on_device, non_blocking=True))
    both = gigabytes_per_second(nbytes // 2, lambda: copy_both_ways(on_device, pinned))
    print(f"{'pinned':<24}{there:>15.1f}{back:>14.1f}{both:>21.1f}", flush=True)
    unpin(pinned)


def copy_both_ways(on_device: Tensor, memory: Tensor) -> None:
    """Copy one half to the device and the other to the host at the same time."""
    half, main, side = memory.numel() // 2, torch.cuda.current_stream(), _side()
    side.wait_stream(main)
    on_device[:half].copy_(memory[:half], non_blocking=True)
    with torch.cuda.stream(side):
        memory[half:].copy_(on_device[half:], non_blocking=True)
    main.wait_stream(side)


@cache
def _side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def gigabytes_per_second(nbytes: int, copy: Callable[[], object]) -> float:
    """Return the rate of the median of some copies. The first one does not count."""
    times = []
    for _ in range(REPEATS + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        copy()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return nbytes / statistics.median(times[1:]) / 1e6


def print_row(name: str, keys: list[str], model: Path, *, update_only: bool) -> None:
    words = ["--model", str(model), "--batch", "1", "--seq-len", "256" if update_only else "2048"]
    words += [word for key in keys if key != "lora=true" for word in ("--set", key)]
    opened, plan = steps.plan(steps.parse([*words, *(["--lora"] if "lora=true" in keys else [])]), 1)
    took = milliseconds(opened, plan, update_only)
    gc.collect()
    torch.cuda.empty_cache()
    update, target = plan.assembly.only("update"), plan.target.device
    costs = OpCosts(plan.inputs.ops, target, plan.kernels.kernel)
    cost = program_cost(update, costs) if update_only else plan.report.step
    gib = plan.report.device_bytes["total"] / GIB
    print(f"  {name:<46}{took:>9.1f}{cost.seconds * 1e3:>10.1f}{gib:>12.2f}", flush=True)


def milliseconds(opened: Run, plan: Plan, update_only: bool) -> float:
    """Return the time of the median step, or of its update alone. The first two do not count."""
    worker = run.make_worker(opened, plan, notice=lambda line: None)
    fill(opened, plan.assembly, worker, random=True)
    batch = step_of([random_batch(plan.inputs)])
    worker.start(graphs=True)
    optimizer_step(worker, batch, 1, lr=1e-5).values()
    times = []
    for number in range(2, REPEATS + 4):
        began = time.perf_counter()
        if update_only:
            worker.update(lr=1e-5, step=number).values()
        else:
            optimizer_step(worker, batch, number, lr=1e-5).values()
        times.append((time.perf_counter() - began) * 1e3)
    worker.close()
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
