"""A search over learning rates. The plan prices all runs before the first one starts.

python examples/recipes/search.py
"""

import surogate

RATES = [1e-3, 4e-3, 1.6e-2]
RUN = {
    "model": "examples/tiny-qwen3",
    "from_scratch": True,
    "model_dtype": "fp32",
    "datasets": [{"path": "examples/data/tinyshakespeare.txt", "type": "text"}],
    "validation_split_ratio": 0.05,
    "eval_samples": 8,
    "sequence_len": 64,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_steps": 15,
    "warmup_steps": 3,
    "save_steps": 0,
    "overwrite_output_dir": True,
    "verify_outputs": False,
}

report = surogate.plan(RUN, mode="pt").report
seconds = len(RATES) * RUN["max_steps"] * report.step.seconds
print(f"{len(RATES)} runs of {report.device_bytes['total'] / 2**30:.2f} GiB, about {seconds:.0f} s of steps")
if not report.fits:
    raise SystemExit("they do not fit: see surogate plan --fit auto")


def diverges(step):  # after each step, and each evaluation
    return step.step > 5 and not step.loss < 9


losses = {}
for rate in RATES:
    folder = f"output/recipes/search/{rate:g}"
    done = surogate.pt(RUN, learning_rate=rate, output_dir=folder, callback=diverges, notice=lambda line: None)
    losses[rate] = done.evaluations[-1][1]
    print(f"learning_rate {rate:g}: held out loss {losses[rate]:.3f} after {done.steps} steps")
print(f"best: {min(losses, key=losses.get):g}")
