"""Distil a teacher into a student with the same tokenizer. Run pretrain.py before, which makes the teacher.

python examples/recipes/distill.py
"""

from pathlib import Path

import surogate

lines = Path("examples/data/tinyshakespeare.txt").read_text().split("\n\n")
result = surogate.pt(
    {
        "model": "examples/tiny-qwen3",  # the student: any model with the tokenizer of the teacher
        "from_scratch": True,  # leave it out for a student with weights
        "model_dtype": "fp32",
        "loss": "distillation",
        "distillation_teacher": "output/recipes/pretrain",
        "distillation_temperature": 2.0,
        "datasets": [{"path": ({"text": line} for line in lines), "type": "text", "samples": 400}],
        "validation_split_ratio": 0.1,
        "sequence_len": 128,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 20,
        "eval_samples": 8,
        "learning_rate": 4e-3,
        "output_dir": "output/recipes/student",
        "overwrite_output_dir": True,
    }
)
print(f"divergence from the teacher {result.evaluation_metrics['divergence']:.4f}: {result.output_dir}")
