"""Preference training (DPO, LoRA) beside TRL: pairs/s, memory of the first GPU, and what TRL pads.

    python benchmarks/preference.py work --model DIR --pairs pairs.jsonl --trl ENVIRONMENT/bin/python
    python benchmarks/preference.py work --model DIR --pairs pairs.jsonl --set qlora_bnb=true --set recompute=true
    python benchmarks/preference.py work --model DIR --pairs pairs.jsonl --trl ENVIRONMENT/bin/python --gpus 2

DIR is a checkpoint with its tokenizer, pairs.jsonl has "prompt", "chosen" and "rejected", texts of up to 1,024 tokens.
ENVIRONMENT has TRL with PEFT. Each side trains one epoch as its users do, in a process of its own: ours packs pairs in
rows of 2,048 tokens; TRL pads the pairs of a batch, with SDPA. Of TRL, all batches of --batches are measured, with
gradient checkpointing if they do not fit without, and the fastest counts. The reference is on both sides the model
without its adapter.

A step's time is a median without the first steps. pairs/s of ours are the pairs of the epoch over its steps.
GiB is the most device memory that a side had while it ran.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from card import reader, sampling

RANK, ALPHA, LR, BETA = 16, 32, 1e-5, 0.1
LONGEST = 1024
PAIRS_A_STEP = 16
"""Of TRL, on each GPU."""
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--pairs", type=Path, required=True)
    parser.add_argument("--trl", help="the interpreter of an environment with TRL; without it, ours alone")
    parser.add_argument("--batches", type=int, nargs="+", default=[2, 4, 8], help="pairs of a batch of TRL")
    parser.add_argument("--gpus", type=int, default=1, help="each takes as many pairs; TRL a process for each")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key of our side")
    parser.add_argument("--theirs", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.theirs:
        found = theirs(arguments, **arguments.theirs)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found))
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    sides = [ours(arguments)]
    print(line("surogate", sides[0]), flush=True)
    for batch in arguments.batches if arguments.trl else ():
        for checkpointing in (False, True):
            sides.append(measure_theirs(arguments, {"batch": batch, "checkpointing": checkpointing}))
            name = f"TRL, {batch} pairs{', checkpointing' if checkpointing else ''}"
            print(line(name, sides[-1]), flush=True)
            if "error" not in sides[-1]:
                break
    measured = [side for side in sides[1:] if "error" not in side]
    if measured and "error" not in sides[0]:
        best = max(measured, key=lambda side: float(side["pairs_per_second"]))
        print(f"ratio to the fastest of TRL: {sides[0]['pairs_per_second'] / best['pairs_per_second']:.2f} in pairs/s,")
        print(f"which pads {best['padded']:.2f} times the real tokens")
    return int(any("error" in side for side in sides[:1]))


def run(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a side to its end. Returns its output, and the most memory of the GPU in use less that before it, in GiB."""
    with sampling(reader()) as samples:
        done = subprocess.run(command, capture_output=True, text=True)
    used = [sample.used_bytes for sample in samples.taken]
    return done, (max(used) - used[0]) / 2**30 if used else math.nan


def line(name: str, side: dict[str, Any]) -> str:
    if "error" in side:
        return f"{name:<28} {side['error'][-200:]}"
    return (
        f"{name:<28}{side['pairs_per_second']:8.2f} pairs/s{side['step'] * 1e3:9.0f} ms a step{side['gib']:7.1f} GiB"
        f"{side['real_tokens_per_second']:9.0f} real tokens/s  {side['note']}"
    )


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    output = arguments.folder / "surogate"
    shutil.rmtree(output, ignore_errors=True)
    keys: dict[str, Any] = {
        **{"model": str(arguments.model.resolve()), "model_dtype": "bf16", "output_dir": str(output)},
        **{"loss": "dpo", "dpo_beta": BETA, "lora": True, "lora_rank": RANK, "lora_alpha": ALPHA, "lora_dropout": 0},
        "datasets": [{"path": str(arguments.pairs.resolve()), "type": "preference"}],
        **{"sequence_len": 2 * LONGEST, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        **{"num_epochs": 1, "learning_rate": LR, "warmup_steps": 0, "logging_steps": 1},
        **{"eval_steps": 0, "save_steps": 0, "verify_outputs": False},
    }
    config = arguments.folder / "dpo.yaml"
    config.write_text(json.dumps(keys))  # JSON is YAML
    settings = [f"gpus={arguments.gpus}", *arguments.set]
    command = ["surogate", "train", str(config), *(word for text in settings for word in ("--set", text))]
    done, gib = run(command)
    if done.returncode:
        return {"error": done.stdout[-2000:] + done.stderr[-2000:]}
    records = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    planned = next(record for record in records if record["log"] == "run")["planned"]
    steps = [record for record in records if record["log"] == "step"]
    step = statistics.median(record["duration_ms"] for record in steps[2:]) / 1e3
    pairs = sum(1 for text in arguments.pairs.read_text().splitlines() if text)
    tokens = statistics.mean(record["tokens"] for record in steps[2:-1])
    return {
        "pairs_per_second": pairs / len(steps) / step,
        "step": step,
        "real_tokens_per_second": tokens / step,
        "gib": gib,
        "note": f"{pairs} pairs in {len(steps)} steps; planned {json.dumps(planned)}",
    }


def measure_theirs(arguments: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    words = [str(arguments.folder), "--model", str(arguments.model), "--pairs", str(arguments.pairs)]
    words += ["--gpus", str(arguments.gpus), "--theirs", json.dumps(settings)]
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.gpus}"]
    done, gib = run([arguments.trl, *(several if arguments.gpus > 1 else []), __file__, *words])
    if done.returncode:
        reasons = [text for text in done.stderr.splitlines() if "Error" in text and "ChildFailedError" not in text]
        return {"error": (reasons or [done.stderr])[-1]}
    return {**json.loads(done.stdout.splitlines()[-1]), "gib": gib}


def theirs(arguments: argparse.Namespace, batch: int, checkpointing: bool) -> dict[str, Any]:
    """Train with TRL. Everything of TRL is imported here, in an environment that need not have Surogate."""
    import torch
    import transformers
    import trl  # type: ignore[import-not-found]
    from datasets import load_dataset
    from peft import LoraConfig

    accumulate = max(1, PAIRS_A_STEP // batch)
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    config = trl.DPOConfig(
        output_dir=str(arguments.folder / "trl"),
        **{"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulate, "max_steps": 5},
        **{"learning_rate": LR, "lr_scheduler_type": "constant", "beta": BETA, "max_length": LONGEST, "bf16": True},
        **{"gradient_checkpointing": checkpointing, "report_to": [], "save_strategy": "no", "logging_steps": 100},
        **{"disable_tqdm": True, "optim": "adamw_torch_fused", "dataloader_num_workers": 2},
        use_cpu=not torch.cuda.is_available(),
        model_init_kwargs={"dtype": torch.bfloat16, "attn_implementation": "sdpa"},
    )
    times: list[float] = []
    tokens: list[tuple[int, int]] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

    trainer = trl.DPOTrainer(
        model=str(arguments.model),
        args=config,
        train_dataset=load_dataset("json", data_files=str(arguments.pairs), split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=TARGETS, task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )
    compute = trainer.compute_loss

    def counted(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        mask = inputs["attention_mask"]
        tokens.append((mask.numel(), int(mask.sum())))
        return compute(model, inputs, *rest, **named)

    trainer.compute_loss = counted
    trainer.train()
    step = statistics.median(b - a for a, b in pairwise(times[1:]))
    padded, real = (sum(column) for column in zip(*tokens, strict=True))
    return {
        "pairs_per_second": batch * accumulate * arguments.gpus / step,
        "step": step,
        "real_tokens_per_second": real * arguments.gpus / len(times) / step,
        "padded": padded / real,
        "note": f"{padded / real:.2f} tokens padded for a real one; TRL {trl.__version__}, torch {torch.__version__}",
    }


if __name__ == "__main__":
    sys.exit(main())
