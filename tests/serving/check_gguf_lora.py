"""Adapters as GGUF files in llama.cpp, added to the file of their base. A part of `make test-serving`.

Compares the log probabilities with those of PEFT in fp32. Ends with status 1 if one is above the bound of
`check_gguf.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.check_gguf import F32_BOUND, GELU_BOUND, HERE, case_of, largest, load, log_probs, node_folder
from serving.contexts import context_of
from serving.tiny_models import write_model

from surogate_export_gguf import lora, writer

LINEAR = r".*(self_attn|mlp)\.\w+_proj"
MODELS = ("llama3", "mistral", "smollm3", "qwen3", "qwen2.5", "phi3", "gemma2", "gemma3", "olmo2", "ministral3")
SETTINGS = {
    "r": 8,
    "lora_alpha": 1.5,
    "use_rslora": True,
    "rank_pattern": {"v_proj": 4},
    "alpha_pattern": {"down_proj": 0.7},
}


def main() -> int:
    """Run all, and return the exit status."""
    torch.set_num_threads(1)
    work, jobs, cases = Path("build/serving").resolve(), [], {}
    node = node_folder(work)
    for name in MODELS:
        folder = write_model(name, work / "models" / name)
        torch.manual_seed(1)
        get_peft_model(
            load(folder), LoraConfig(init_lora_weights=False, target_modules=LINEAR, **SETTINGS)
        ).save_pretrained(work / f"{name}-adapter")
        base = case_of(folder, load(folder))
        model = PeftModel.from_pretrained(load(folder), str(work / f"{name}-adapter"))
        cases[name] = base, log_probs(model, base.ids)
        writer.write_model(context_of(folder, "f32"), work / f"{name}.f32.gguf")
        adapter = context_of(folder, "f32", adapter=work / f"{name}-adapter")
        writer.write(adapter, lora.prepare(adapter, work / f"{name}.lora.gguf"))
        paths = {
            "gguf": f"{work}/{name}.f32.gguf",
            "lora": f"{work}/{name}.lora.gguf",
            "out": f"{work}/{name}.lora.json",
        }
        jobs.append({**paths, "texts": [], "ids": base.ids, "vocabulary": base.logs.shape[1]})
    (work / "jobs.json").write_text(json.dumps(jobs))
    command = ["node", str(HERE / "llama.mjs"), str(work / "jobs.json")]
    subprocess.run(command, cwd=node, check=True, stdout=subprocess.DEVNULL)
    wrong = 0
    print("| adapter of | llama.cpp against PEFT | against the base |\n|---|---|---|")
    for job, (name, (base, logs)) in zip(jobs, cases.items(), strict=True):
        if "error" in (result := json.loads(Path(job["out"]).read_text())):
            print(f"| {name} | {result['error']} | |")
            wrong += 1
            continue
        found = np.fromfile(f"{job['out']}.f32", np.float32).reshape(logs.shape).astype(np.float64)
        differs, changed = largest(found, logs, base.ids), largest(found, base.logs, base.ids)
        wrong += not differs <= (GELU_BOUND if name.startswith("gemma") else F32_BOUND)
        print(f"| {name} | {differs:.1e} | {changed:.1e} |")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
