"""Planned against measured memory and time: chosen configurations, and others drawn at random.

    python benchmarks/promise.py --random 8 --seed 1 --out promise.jsonl
    CUDA_VISIBLE_DEVICES=1 python benchmarks/promise.py --part 1/2 --out promise.1.jsonl
    python benchmarks/promise.py --only "qwen3-8b lora 2x2048x4 fp8 offload_quants=6"

Each configuration runs in a process of its own (`step.py`). Its memory is what cudaMemGetInfo lacks while it runs, so
it contains the CUDA context and all libraries. Random configurations are drawn from the seed, which is printed, and
from plans alone: those that do not fit the device, or take too long, are drawn again. `--part` i/n runs every n-th.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import step as steps
import torch

from surogate_core.errors import SurogateError
from surogate_core.machine.devices import GIB

HERE = Path(__file__).parent
BF16 = ("model_dtype=bf16", "master_dtype=bf16", "param_grad_dtype=bf16")
FULL = (*BF16, "optimizer=adamw", "optimizer_state_dtype=bf16")
EIGHT = (*BF16, "optimizer=adamw_8bit")
LORA = ("model_dtype=bf16", "optimizer=adamw", "lora_dropout=0")
FP8 = "recipe=fp8-hybrid"
_EIGHT_BIT = EIGHT[-1]
_SHORT = {FP8: "fp8", "recompute=auto": "auto", _EIGHT_BIT: "adamw_8bit"}
BLOCK = "recompute_block=true"
POLL_SECONDS = 0.01
LONGEST_STEP = 3.0
MOST_HOST_BYTES = 90 * GIB


@dataclass(frozen=True)
class Configuration:
    """layers: in place of the model's number of blocks."""

    model: str
    batch: int
    seq_len: int
    settings: tuple[str, ...]
    lora: bool = False
    accumulate: int = 1
    layers: int | None = None

    @property
    def name(self) -> str:
        kept = [s.removesuffix("=true") for s in self.settings if s not in (*FULL, *LORA)]
        depth = f"/{self.layers}" if self.layers else ""
        size = f"{self.batch}x{self.seq_len}x{self.accumulate}"
        return " ".join((self.model + depth, "lora" if self.lora else "full", size, *(_SHORT.get(s, s) for s in kept)))

    @classmethod
    def named(cls, name: str) -> Configuration:
        """Return the configuration whose `name` this is."""
        model, kind, size, *words = name.split()
        model, _, depth = model.partition("/")
        batch, seq_len, accumulate = map(int, size.split("x"))
        long = {short: setting for setting, short in _SHORT.items()}
        settings = [long.get(word, word if "=" in word else f"{word}=true") for word in words]
        dtypes = LORA if kind == "lora" else BF16 if _EIGHT_BIT in settings else FULL
        layers = int(depth) if depth else None
        return cls(model, batch, seq_len, (*dtypes, *settings), kind == "lora", accumulate, layers)

    def words(self, folder: Path) -> list[str]:
        """Return the arguments of `step.py`. `folder` is for a config.json with another number of blocks."""
        model = HERE / "models" / self.model
        if self.layers:
            config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": self.layers}
            model = folder
            (model / "config.json").write_text(json.dumps(config))
        sizes = ("--batch", str(self.batch), "--seq-len", str(self.seq_len), "--accumulate", str(self.accumulate))
        keys = [word for setting in (*self.settings, "deterministic=false") for word in ("--set", setting)]
        return ["--model", str(model), *sizes, *keys, *(["--lora"] if self.lora else [])]


CHOSEN = (
    Configuration("qwen2.5-0.5b", 32, 1024, FULL),
    Configuration("qwen3-0.6b", 8, 4096, (*FULL, "recompute=auto", "device_memory_limit=24GiB")),
    Configuration("qwen3-1.7b", 8, 2048, (*FULL, FP8), accumulate=2),
    Configuration("llama-3.2-1b", 16, 2048, EIGHT),
    Configuration("qwen2.5-1.5b", 8, 2048, (*LORA, "recompute_rmsnorm=true", "recompute_swiglu=true"), lora=True),
    Configuration("qwen3-4b", 16, 4096, (*LORA, "recompute=auto", "device_memory_limit=48GiB"), lora=True),
    Configuration("qwen2.5-7b", 8, 1024, (*EIGHT, "recompute=auto", "device_memory_limit=60GiB")),
    Configuration(
        "qwen3-8b",
        1,
        4096,
        (*FULL, "recompute=auto", "device_memory_limit=80GiB", "offload_residual=true"),
        accumulate=8,
    ),
    Configuration("qwen3-8b", 2, 4096, FULL, accumulate=4),
    Configuration(
        "qwen3-8b",
        1,
        4096,
        (*FULL, "recompute=auto", "device_memory_limit=48GiB", "offload_optimizer=true"),
        accumulate=8,
    ),
    Configuration("qwen3-8b", 4, 2048, (*FULL, FP8), accumulate=2),
    Configuration("qwen3-8b", 2, 2048, (*LORA, FP8, "offload_quants=6"), lora=True, accumulate=4),
    Configuration(
        "qwen3-8b",
        2,
        2048,
        (
            *LORA,
            "recompute=auto",
            "device_memory_limit=18.7GiB",
            "offload_residual=true",
            "offload_weights=9",
        ),
        lora=True,
        accumulate=4,
    ),
    Configuration("qwen3-8b", 1, 32768, (*LORA, "recompute=auto"), lora=True),
    Configuration("qwen3-14b", 1, 4096, (*FULL, BLOCK, "offload_residual=true", "offload_optimizer=true")),
    *(
        Configuration("qwen3-4b", 2, 4096, (*LORA, BLOCK, "offload_residual=true"), lora=True, layers=layers)
        for layers in (8, 16, 32)
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="configurations, as printed")
    parser.add_argument("--random", type=int, default=0, help="configurations to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only-random", action="store_true")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=4.0, help="of timed steps")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    every = [] if arguments.only_random else list(map(Configuration.named, arguments.only)) or list(CHOSEN)
    every += drawn(Random(arguments.seed), arguments.random)
    part, parts = map(int, arguments.part.split("/"))
    for configuration in every[part::parts]:
        found = observe(configuration, arguments.seconds)
        print(row(found), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(found) + "\n")


def row(found: dict[str, Any]) -> str:
    if "error" in found:
        return f"{found['name']}: {found['error']}"
    memory, time_ = found["held"] / found["planned_bytes"] - 1, found["step_ms"] / found["planned_ms"] - 1
    return (
        f"{found['name']}: {found['planned_bytes'] / GIB:.2f} GiB planned, {found['held'] / GIB:.2f} held "
        f"({memory:+.2%}); {found['planned_ms']:.1f} ms planned, {found['step_ms']:.1f} measured ({time_:+.1%}); "
        f"{found['tokens_per_second']} tokens/s"
    )


def observe(configuration: Configuration, seconds: float) -> dict[str, Any]:
    """Run a configuration in a process. Return the line of `step.py`, and the most memory that the process held."""
    torch.cuda.synchronize()
    empty = most = torch.cuda.mem_get_info()[0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        words = [*configuration.words(Path(folder)), "--seconds", str(seconds), "--out", str(out)]
        child = subprocess.Popen(
            [sys.executable, str(HERE / "step.py"), *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        while child.poll() is None:
            most = min(most, torch.cuda.mem_get_info()[0])
            time.sleep(POLL_SECONDS)
        if child.returncode:
            text = child.stdout.read() if child.stdout else ""
            return {"name": configuration.name, "error": " ".join(text.splitlines()[-3:])}
        return {"name": configuration.name, "held": empty - most, **json.loads(out.read_text())}


def drawn(random: Random, count: int) -> Iterator[Configuration]:
    """Yield `count` random configurations that fit this device."""
    models = sorted(folder.name for folder in (HERE / "models").iterdir())
    while count:
        candidate = _draw(random, models)
        if candidate is not None and (fitting := _fitting(candidate, random)) is not None:
            count -= 1
            yield fitting


def _draw(random: Random, models: Sequence[str]) -> Configuration | None:
    lora, fp8, eight = random.random() < 0.4, random.random() < 0.35, random.random() < 0.4
    settings = [*(LORA if lora else EIGHT if eight else FULL), *([FP8] if fp8 else [])]
    settings += [f"recompute_{part}=true" for part in ("rmsnorm", "swiglu", "att", "block") if random.random() < 0.3]
    offloads = ("residual=true", "weights=4", "quants=4") if lora else ("residual=true", "optimizer=true")
    settings += [f"offload_{key}" for key in offloads if random.random() < 0.3]
    seq_len = random.choice((512, 1024, 2048, 4096, 8192))
    batch = random.choice((4096, 8192, 16384, 32768)) // seq_len
    if not batch:
        return None
    accumulate = random.choice((1, 2, 4))
    return Configuration(random.choice(models), batch, seq_len, tuple(settings), lora=lora, accumulate=accumulate)


def _fitting(candidate: Configuration, random: Random) -> Configuration | None:
    """Return the configuration, sometimes with a limit that requires recomputation; None if it is refused."""
    report = planned(candidate)
    if report is None:
        return None
    if random.random() < 0.5:
        limit = f"device_memory_limit={report.device_bytes['total'] * random.uniform(0.5, 0.95) / GIB:.1f}GiB"
        candidate = replace(candidate, settings=(*candidate.settings, "recompute=auto", limit))
        report = planned(candidate)
    fits = report is not None and report.fits and report.step.seconds < LONGEST_STEP
    return candidate if fits and report.host_bytes["total"] < MOST_HOST_BYTES else None  # type: ignore[union-attr]


def planned(candidate: Configuration) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        arguments = steps.parse(candidate.words(Path(folder)))
        try:
            return steps.plan(arguments, candidate.batch)[1].report
        except SurogateError:
            return None


if __name__ == "__main__":
    main()
