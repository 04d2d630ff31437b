"""Loss curves of recipes on the same data in the same order: a Qwen3 of 98M parameters from scratch, and LoRA on it.

    python benchmarks/convergence.py prepare work --text docs.jsonl --chat gsm8k.jsonl
    python benchmarks/convergence.py train work full bf16 --rounding-seed 2
    python benchmarks/convergence.py train work full fp8-hybrid
    python benchmarks/convergence.py train work full bf16 --name adamw --set optimizer=adamw
    python benchmarks/convergence.py compare work full --picture full.png

`prepare` trains a tokenizer of 8,192 tokens on the text ({"text": ...} a line) and sets every 20th document aside for
evaluation. `train` trains one run, with the seed of stochastic rounding apart from that of the data: runs of one recipe
that differ in it show how far rounding alone moves a curve. LoRA trains on the model of the run full bf16, on questions
and answers ({"question": ..., "answer": ...} a line). `compare` prints for every run the loss at the start and the end,
and the gap of its smoothed curve (mean of 50 steps) to the mean of the bf16 runs: in the end, and the largest after a
quarter of the steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
END = "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOOTHED = 50
EVERY = 20
"""One document of so many is set aside."""

FULL = {
    "from_scratch": True,
    "sequence_len": 1024,
    "per_device_train_batch_size": 16,
    "max_steps": 480,
    "learning_rate": 1e-3,
    "warmup_steps": 40,
}
LORA = {
    "lora": True,
    "lora_rank": 16,
    "lora_alpha": 32,
    "sequence_len": 512,
    "per_device_train_batch_size": 16,
    "max_steps": 420,
    "learning_rate": 4e-3,
    "warmup_steps": 20,
}
COMMON = {
    "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "cosine",
    "final_lr_fraction": 0.1,
    "eval_steps": 60,
    "save_steps": 0,
    "logging_steps": 60,
    "overwrite_output_dir": True,
    "verify_outputs": False,
}


def main() -> None:
    arguments = parse(sys.argv[1:])
    {"prepare": prepare, "train": train, "compare": compare}[arguments.command](arguments)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("prepare", "train", "compare"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path)
        if name != "prepare":
            command.add_argument("mode", choices=["full", "lora"])
        if name == "prepare":
            command.add_argument("--text", type=Path, required=True)
            command.add_argument("--chat", type=Path, required=True)
        if name == "train":
            command.add_argument("recipe")
            command.add_argument("--rounding-seed", type=int, default=1)
            command.add_argument("--name", help="of the run, if --set makes it another one than the recipe's")
            command.add_argument("--steps", type=int)
            command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
        if name == "compare":
            command.add_argument("--picture", type=Path)
    return parser.parse_args(words)


def prepare(arguments: argparse.Namespace) -> None:
    folder: Path = arguments.folder
    (folder / "model").mkdir(parents=True, exist_ok=True)
    lines = arguments.text.read_text(encoding="utf-8").rstrip("\n").split("\n")
    aside = lines[::EVERY]
    kept = [line for index, line in enumerate(lines) if index % EVERY]
    (folder / "train.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    (folder / "validation.jsonl").write_text("\n".join(aside) + "\n", encoding="utf-8")
    (folder / "chat.jsonl").write_bytes(arguments.chat.read_bytes())
    (folder / "model/config.json").write_text(json.dumps(CONFIG, indent=2))
    write_tokenizer(folder / "model", [json.loads(line)["text"] for line in kept])


def write_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """A byte-level BPE of the size of the model's vocabulary, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[END, "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def train(arguments: argparse.Namespace) -> None:
    from surogate import run
    from surogate.config.load import load_config
    from surogate_core.errors import SurogateError
    from surogate_core.plugins.discovery import load_registry
    from surogate_core.runtime.worker import Worker

    folder: Path = arguments.folder.resolve()
    name = f"{arguments.mode}-{arguments.name or arguments.recipe}-{arguments.rounding_seed}"
    raw: dict[str, Any] = {**COMMON, "recipe": arguments.recipe, "output_dir": str(folder / name)}
    if arguments.mode == "full":
        raw |= {**FULL, "model": str(folder / "model")}
        raw["datasets"] = [{"path": str(folder / "train.jsonl"), "type": "text"}]
        raw["validation_datasets"] = [{"path": str(folder / "validation.jsonl"), "type": "text"}]
    else:
        raw |= {**LORA, "model": str(folder / "full-bf16-1")}
        fields = {"instruction_field": "question", "output_field": "answer"}
        raw["datasets"] = [{"path": str(folder / "chat.jsonl"), "type": "instruction", **fields}]
        raw["validation_split_ratio"] = 0.05
    if arguments.steps:
        raw["max_steps"] = arguments.steps
    raw |= dict(item.split("=", 1) for item in arguments.set)

    def on_device(make: Any, assembly: Any, context: Any, seed: int, **options: Any) -> Worker:
        worker: Worker = make(assembly, context, arguments.rounding_seed, **options)
        return worker

    for maker in ("on_gpu", "on_cpu"):  # which seeds the rounding alone: weights and order of the data have their own
        setattr(Worker, maker, partial(on_device, getattr(Worker, maker)))
    try:
        run.train(load_config(raw, registry=load_registry(), source=name))
    except SurogateError as error:
        sys.exit(f"convergence.py: {error}")


def compare(arguments: argparse.Namespace) -> None:
    curves = {
        path.parent.name: read(path) for path in sorted(arguments.folder.glob(f"{arguments.mode}-*/metrics.jsonl"))
    }
    smooth = {name: smoothed(steps) for name, (steps, _) in curves.items()}
    bf16 = [curve for name, curve in smooth.items() if "-bf16-" in name]
    if not bf16:
        sys.exit("convergence.py: no run in bf16 to compare with")
    mean = [sum(values) / len(values) for values in zip(*bf16, strict=True)]
    print(f"{'run':<26}{'first':>8}{'last':>8}{'held out':>10}{'gap':>9}{'largest':>9}")
    for name, (steps, evaluations) in curves.items():
        gaps = [(a - b) / b for a, b in zip(smooth[name], mean, strict=True)]
        late = max(gaps[len(gaps) // 4 :], key=abs)
        print(
            f"{name:<26}{steps[0]:>8.4f}{smooth[name][-1]:>8.4f}{evaluations[-1][1]:>10.4f}{gaps[-1]:>9.2%}{late:>9.2%}"
        )
    if arguments.picture:
        draw(arguments.picture, smooth, {name: evaluations for name, (_, evaluations) in curves.items()}, mean)


def read(path: Path) -> tuple[list[float], list[tuple[int, float]]]:
    """Return the loss of every step, and (step, loss) of every evaluation."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record["loss"] for record in records if record["log"] == "step"]
    return steps, [(record["step"], record["loss"]) for record in records if record["log"] == "eval"]


def smoothed(steps: Sequence[float]) -> list[float]:
    return [sum(steps[i : i + SMOOTHED]) / SMOOTHED for i in range(len(steps) - SMOOTHED + 1)]


def draw(
    path: Path, smooth: dict[str, list[float]], evaluations: dict[str, list[tuple[int, float]]], mean: list[float]
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name, curve in smooth.items():
        fp8 = "fp8" in name
        style = {"color": "tab:orange" if fp8 else "tab:blue", "alpha": 1.0 if fp8 else 0.5, "lw": 1.5 if fp8 else 1}
        at = range(SMOOTHED, SMOOTHED + len(curve))
        left.plot(at, curve, label=name.split("-", 1)[1], **style)
        left.plot(*zip(*evaluations[name], strict=True), ls="", marker="x", **style)
        right.plot(at, [100 * (a / b - 1) for a, b in zip(curve, mean, strict=True)], **style)
    left.set(xlabel="step", ylabel="loss, mean of 50 steps; x: held-out documents")
    right.set(xlabel="step", ylabel="gap to the mean of bf16, %")
    right.axhline(0.5, color="gray", ls=":")
    right.axhline(-0.5, color="gray", ls=":")
    left.legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
