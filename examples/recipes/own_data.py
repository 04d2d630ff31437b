"""Data of your own in memory, from two sources, and a callback that stops the run when it no longer improves.

python examples/recipes/own_data.py
"""

from collections.abc import Iterator
from pathlib import Path

import surogate

TEXT = Path("examples/data/tinyshakespeare.txt").read_text()


def speeches() -> Iterator[dict[str, str]]:  # a generator, from a database for example: it is read once, before the run
    for speech in TEXT.split("\n\n"):
        yield {"text": speech}


tables = [{"text": f"{a} times {b} is {a * b}."} for a in range(30) for b in range(30)]
best = float("inf")


@surogate.every(5)
def stop_when_it_no_longer_improves(run: surogate.ActiveRun) -> None:
    global best
    loss = run.evaluate().loss
    table = run.weights()["model.embed_tokens.weight"]
    run.log(held_out=loss, norm_of_embedding=table.norm())
    if loss > best - 0.05:
        run.stop(f"the loss of held out rows is {loss:.2f}, and was {best:.2f}")
    best = min(best, loss)


result = surogate.pt(
    {
        "model": "examples/tiny-qwen3",
        "from_scratch": True,
        "model_dtype": "fp32",
        "datasets": [
            {"path": speeches(), "type": "text", "samples": 2000},
            {"path": tables, "type": "text", "weight": 0.5},  # half of them, others in each epoch
        ],
        "validation_split_ratio": 0.05,
        "eval_samples": 8,
        "sequence_len": 64,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "max_steps": 40,
        "learning_rate": 4e-3,
        "output_dir": "output/recipes/own-data",
        "overwrite_output_dir": True,
        "verify_outputs": False,
    },
    callback=stop_when_it_no_longer_improves,
)
print(f"{result.steps} steps of {result.total_steps}; {result.stop_reason or 'all'}: {result.output_dir}")
