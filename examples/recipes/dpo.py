"""Train a model to prefer one answer to another by DPO, on pairs made here. Run pretrain.py before.

python examples/recipes/dpo.py
"""

import json
from itertools import pairwise
from pathlib import Path

import surogate

questions = [json.loads(line) for line in Path("examples/data/gsm8k.jsonl").read_text().splitlines()[:120]]
pairs = [
    {"prompt": one["question"], "chosen": one["answer"], "rejected": other["answer"]}  # the answer to another question
    for one, other in pairwise(questions)
]

result = surogate.sft(
    {
        "model": "output/recipes/pretrain",  # or a name of the hub; the reference is this model without the adapter
        "model_dtype": "fp32",  # leave it out on a GPU
        "loss": "dpo",
        "dpo_beta": 0.1,
        "datasets": [{"path": pairs, "type": "preference"}],
        "validation_split_ratio": 0.1,
        "eval_samples": 4,
        "sequence_len": 512,  # of both answers of a pair
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 10,
        "learning_rate": 2e-3,
        "output_dir": "output/recipes/dpo",
        "overwrite_output_dir": True,
    }
)
found = result.evaluation_metrics
print(f"of held out pairs {found['rewards/accuracies']:.0%} are preferred as they should be: {result.adapter_dir}")
