"""Pre-train a small model from random weights on a folder of texts. The other recipes begin with what it writes.

python examples/recipes/pretrain.py
"""

import surogate

result = surogate.pt(
    {
        "model": "examples/tiny-qwen3",  # config.json and tokenizer; weights are drawn
        "from_scratch": True,
        "model_dtype": "fp32",  # bf16 on a GPU
        "datasets": [{"path": "examples/data/*.txt", "type": "text"}],  # or a folder, or a URL such as s3://texts
        "validation_split_ratio": 0.1,
        "eval_samples": 16,  # rows; leave it out to read all
        "sequence_len": 128,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 40,
        "learning_rate": 4e-3,
        "warmup_steps": 6,
        "output_dir": "output/recipes/pretrain",
        "overwrite_output_dir": True,
    }
)
step, loss, labels = result.evaluations[-1]
print(f"{result.tokens:,} tokens, loss of {labels:,} held out ones {loss:.2f}: {result.output_dir}")
