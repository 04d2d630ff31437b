"""Compare plans for several GPUs with what was measured: the table of docs/scaling.md. Needs no GPU.

    python benchmarks/published_scaling.py

Every run is planned as data parallel, on the GPUs on which a run like it was measured. "Scaling" is the speed of a GPU
among those of the run over that of a GPU among the first number of GPUs. A figure with ~ is computed from rounded ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from surogate import run
from surogate_core.planning.report import Report

MODELS = Path(__file__).parent / "models"
HEADINGS = ("measured by", "run", "GPUs", "scaling", "planned", "tokens/s of a GPU", "planned")
OURS = {
    "sequence_len": 2048,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": "adamw",
}
SCALING = {
    **{"sequence_len": 2048, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "model_dtype": "bf16"},
    **{"master_dtype": "bf16", "param_grad_dtype": "bf16", "optimizer": "adamw", "optimizer_state_dtype": "bf16"},
}
"""As `scaling.py a` measures all weights."""
LLMQ = {"sequence_len": 1024, "param_grad_dtype": "bf16", "optimizer": "adamw", "optimizer_state_dtype": "bf16"}
TORCHTITAN = {"sequence_len": 8192, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
LORA = {"lora": True, "qlora_bnb": True, "sequence_len": 4096, "per_device_train_batch_size": 1}
FP8 = {"recipe": "fp8-hybrid"}


@dataclass(frozen=True)
class Measured:
    """A run that was measured, and the keys of one like it.

    scaling        as measured; "" if it was not
    speed          tokens/s of each GPU, as measured; "" if they were not, or in another setting
    after, before  (GPUs, machines) of the run, and of the one that its speed is compared with
    """

    by: str
    model: str
    keys: Mapping[str, object]
    scaling: str
    speed: str = ""
    after: tuple[int, int] = (8, 1)
    before: tuple[int, int] = (1, 1)
    device: str = "h100"
    note: str = ""


def llmq(
    model: str, batch: int, steps: int, scaling: str, more: Mapping[str, object] | None = None, speed: str = ""
) -> Measured:
    batches = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": steps}
    return Measured("llmq", model, {**LLMQ, **batches, **(more or {})}, scaling, speed)


def two(level: int, scaling: str, speed: str, model: str = "qwen3-8b", **more: object) -> Measured:
    keys = {**SCALING, "zero_level": level, **more}
    return Measured("Surogate", model, keys, scaling, speed, (2, 1), device="h200", note=f", level {level}")


def torchtitan(scaling: str, more: Mapping[str, object] | None = None) -> Measured:
    keys = {**TORCHTITAN, **(more or {})}
    return Measured("torchtitan", "llama-3.1-8b", keys, scaling, "", (128, 16), (8, 1), note=", FSDP")


RUNS: Sequence[Measured] = (
    Measured("Surogate", "qwen3-0.6b", OURS, "95.8, 96.8 %", "99,650", (2, 1), device="h200"),
    Measured("Surogate", "qwen3-1.7b", OURS, "96.1 %", "45,650", (2, 1), device="h200"),
    two(1, "99.1 %", "159,986", "qwen2.5-0.5b", per_device_train_batch_size=32, sequence_len=1024),
    two(1, "98.9 %", "11,885"),
    two(2, "96.5 %", "11,602"),
    two(3, "94.4 %", "11,347"),
    llmq("qwen2.5-0.5b", 32, 16, "~98.6 %"),
    llmq("qwen2.5-1.5b", 32, 8, "~97 %"),
    llmq("qwen2.5-7b", 8, 16, "~100 %", speed="~14,000"),
    llmq("qwen2.5-0.5b", 32, 16, "~99 %", FP8),
    llmq("qwen2.5-1.5b", 32, 8, "~97 %", FP8),
    torchtitan("97.7 %"),
    torchtitan("98.2 %", FP8),
    Measured("Megatron-Bridge", "llama-3.1-70b", {**LORA, **FP8}, "", "2,643", note=", LoRA, TP 2 x PP 4"),
)


def planned(measured: Measured, machines: tuple[int, int]) -> Report:
    keys = {key: value for key, value in measured.keys.items() if key != "zero_level" or machines != (1, 1)}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.yaml"
        config.write_text(yaml.safe_dump({"model": str(MODELS / measured.model), **keys}))
        return run.plan(run.load(config), measured.device, *machines).report


def row(measured: Measured) -> tuple[str, ...]:
    before, after = (planned(measured, machines) for machines in (measured.before, measured.after))
    speeds = [report.tokens_per_second / report.devices for report in (before, after)]
    machines = f" on {after.nodes} machines" if after.nodes > 1 else ""
    return (
        measured.by,
        f"{measured.model}, {'FP8' if measured.keys.items() >= FP8.items() else 'bf16'}{measured.note}",
        f"{before.devices} to {after.devices} {measured.device.upper()}{machines}",
        measured.scaling or "-",
        f"{speeds[1] / speeds[0]:.1%}".replace("%", " %"),
        measured.speed or "-",
        f"{speeds[1]:,.0f}",
    )


def lines(runs: Sequence[Measured]) -> Iterator[str]:
    """Yield the table as lines of Markdown."""
    for cells in (HEADINGS, ["---"] * len(HEADINGS), *map(row, runs)):
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(*lines(RUNS), sep="\n", flush=True)
