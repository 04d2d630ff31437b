"""Fine-tune a model on questions and answers with LoRA, and merge the adapter. Run pretrain.py before.

python examples/recipes/sft.py
"""

import surogate

RUN = {
    "model": "output/recipes/pretrain",  # or a name of the hub, such as Qwen/Qwen3-8B
    "model_dtype": "fp32",  # leave it out on a GPU
    "datasets": [
        {
            "path": "examples/data/gsm8k.jsonl",
            "type": "instruction",
            "instruction_field": "question",
            "output_field": "answer",
        }
    ],
    "validation_split_ratio": 0.1,
    "sequence_len": 256,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "max_steps": 20,
    "eval_samples": 8,
    "learning_rate": 2e-3,
    "lora_rank": 16,
    "output_dir": "output/recipes/sft",
    "overwrite_output_dir": True,
}

data = surogate.tokenize(RUN, mode="sft", documents=True)  # look before you train: what is a label, what is left out
print(f"{data.datasets[0].trained:,} of {data.datasets[0].tokens:,} tokens are trained")
print("first trained text:", next(piece.text for piece in data.documents[0].pieces if piece.trained)[:60])

result = surogate.sft(RUN)
surogate.merge(result.adapter_dir, "output/recipes/sft-merged", overwrite=True)
print(f"loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}: {result.adapter_dir}, output/recipes/sft-merged")
