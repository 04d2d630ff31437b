"""Compare LoRA steps with those of PEFT on this machine's GPU in one run: time, memory, ratios.

    python benchmarks/lora_step.py --model benchmarks/models/qwen3-0.6b --seq-len 2048 --batch 8

Random weights are written to a temporary folder once, because an adapter needs a model that can be loaded. Both train
rank 16 on every linear projection: bf16 with adapters in fp32, AdamW, clipping, no recomputation, random tokens. PEFT
uses transformers' SDPA attention under autocast. Each runs in a separate process. Results are medians of 12 steps after
4 warm-up steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP, STEPS = 4, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder with a config.json")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--peft", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peft:
        print(json.dumps(peft_step(arguments.model, arguments.batch, arguments.seq_len)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_weights(arguments.model, folder)
        sizes = ["--model", folder, "--seq-len", str(arguments.seq_len), "--batch", str(arguments.batch)]
        step = str(Path(__file__).with_name("step.py"))
        ours = run(step, *sizes, "--steps", str(STEPS), "--set", "from_scratch=false", "--set", "lora=true")
        theirs = run(__file__, *sizes, "--peft")
    print(f"model         {Path(arguments.model).name}, {arguments.batch} x {arguments.seq_len}, {ours['gpu']}")
    print(f"surogate      {ours['graph_ms']:.1f} ms, {ours['held_bytes'] / 2**30:.1f} GiB")
    print(f"PEFT          {theirs['ms']:.1f} ms, {theirs['bytes'] / 2**30:.1f} GiB ({theirs['versions']})")
    print(f"PEFT / ours   {theirs['ms'] / ours['graph_ms']:.2f}, {theirs['bytes'] / ours['held_bytes']:.2f}")


def run(script: str, *arguments: str) -> dict:
    """Run a script and return the last line of its output, parsed as JSON."""
    done = subprocess.run([sys.executable, script, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def write_weights(model: str, folder: str) -> None:
    import torch
    import transformers

    with torch.device("cuda"):
        config = transformers.AutoConfig.from_pretrained(model)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)


def peft_step(model: str, batch: int, seq_len: int) -> dict:
    import peft
    import torch
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, attn_implementation="sdpa", device_map="cuda"
    )
    config = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(base, config)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    for p in trained:
        p.data = p.data.float()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(0, base.config.vocab_size, (batch, seq_len), device="cuda")
    times = []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = adapted(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began))
    return {
        "ms": statistics.median(times[WARM_UP:]),
        "bytes": torch.cuda.max_memory_reserved(),
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}",
    }


if __name__ == "__main__":
    main()
