"""The engine without config, files or command line: a model from arrays of tokens. Needs surogate-core alone.

python examples/recipes/engine.py
"""

import json
from pathlib import Path

import numpy as np

from surogate_core import Definitions, train_from
from surogate_core.api import PrecisionRequest

CONFIG = json.loads(Path("examples/tiny-qwen3/config.json").read_text())  # its architecture names the model
TEXT = np.frombuffer(Path("examples/data/tinyshakespeare.txt").read_bytes(), np.uint8)  # a token is a byte


def batches(steps, draw):
    for _ in range(steps):
        starts = draw.integers(0, len(TEXT) - 64, (2, 4))  # two micro-steps of four rows
        yield TEXT[starts[..., None] + np.arange(64)]


trained = train_from(
    Definitions(
        model=CONFIG,
        recipe="bf16",
        optimizer="adamw",
        precision=PrecisionRequest(model_dtype="fp32"),
        max_grad_norm=1.0,
    ),
    batches(20, np.random.default_rng(0)),
    lambda step: 3e-3 * min(step / 5, 1),
    report=lambda step: print(f"step {step.step}: loss {step.loss:.2f}"),
)
planned = trained.plan.report.device_bytes["total"] / 2**20
print(f"{trained.progress.tokens:,} tokens, {len(trained.weights)} weights, {planned:.0f} MiB planned")
