"""Right and wrong answers to GSM8K's questions as pairs: the data set's answer, and one that a model sampled.

    python examples/gsm8k-preferences/pairs.py prepare work
    python examples/gsm8k-preferences/pairs.py sample work --model work/sft
    python examples/gsm8k-preferences/pairs.py picture work/dpo --out dpo.png

`prepare` divides the questions into `train.jsonl` and `heldout.jsonl` (every tenth), and writes a small Qwen3 to train
from scratch with a tokenizer of these texts, `model/`. `sample` asks a model, any chat model of transformers, each
question, and writes `train-pairs.jsonl` and `heldout-pairs.jsonl`. An answer is wrong if the number after `####` is not
that of the data set. Answers without a number, which are easily told from others, are counted and left out. `picture`
draws margins and accuracies of a run that was trained on the pairs.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1]
HELD_OUT = 10
"""Every tenth question is held out, from the model that answers too."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("prepare")
    command.add_argument("folder", type=Path)
    command.add_argument("--questions", type=Path, default=EXAMPLES / "data/gsm8k.jsonl", help="JSON lines of GSM8K")
    command.add_argument("--calculations", type=int, default=2, help="leave out questions with more (default: 2)")
    command.add_argument("--characters", type=int, default=280, help="leave out longer ones (default: 280)")
    command.add_argument("--vocabulary", type=int, default=1024, help="tokens of the tokenizer (default: 1024)")
    command = commands.add_parser("sample")
    command.add_argument("folder", type=Path)
    command.add_argument("--model", required=True, help="folder or hub id of the model that answers")
    command.add_argument("--samples", type=int, default=2, help="answers to each question (default: 2)")
    command.add_argument("--temperature", type=float, default=0.8)
    command.add_argument("--tokens", type=int, default=160, help="most tokens of an answer (default: 160)")
    command.add_argument("--batch", type=int, default=64, help="answers at the same time (default: 64)")
    command.add_argument("--seed", type=int, default=1)
    command = commands.add_parser("picture")
    command.add_argument("folder", type=Path, help="output_dir of the run")
    command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    {"prepare": prepare, "sample": sample, "picture": picture}[arguments.command](arguments)


def prepare(arguments: argparse.Namespace) -> None:
    sys.path.insert(0, str(EXAMPLES))
    from make_tokenizer import END_OF_TEXT, train_tokenizer

    rows = [row for row in read(arguments.questions) if row["answer"].count("<<") <= arguments.calculations]
    rows = [row for row in rows if len(row["question"] + row["answer"]) <= arguments.characters]
    if len(rows) < HELD_OUT:
        raise SystemExit(f"{arguments.questions}: {len(rows)} questions are left, {HELD_OUT} are needed.")
    folder: Path = arguments.folder
    (folder / "model").mkdir(parents=True, exist_ok=True)
    train = [row for number, row in enumerate(rows, 1) if number % HELD_OUT]
    heldout = rows[HELD_OUT - 1 :: HELD_OUT]
    write(folder / "train.jsonl", train)
    write(folder / "heldout.jsonl", heldout)
    small = EXAMPLES / "tiny-qwen3"
    text = "\n".join(f"### user\n{row['question']}\n### assistant\n{row['answer']}" for row in train)
    train_tokenizer(text, arguments.vocabulary).save(str(folder / "model/tokenizer.json"))
    config = json.loads((small / "config.json").read_text()) | {"vocab_size": arguments.vocabulary}
    (folder / "model/config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(small / name, folder / "model")
    print(f"{len(train)} questions to train on, {len(heldout)} held out; documents end with {END_OF_TEXT}")


def sample(arguments: argparse.Namespace) -> None:
    model, tokenizer = load(arguments.model)
    for name in ("train", "heldout"):
        rows = [row for row in read(arguments.folder / f"{name}.jsonl") for _ in range(arguments.samples)]
        pairs, counts = [], Counter[str]()
        for row, answer in zip(rows, answers(model, tokenizer, rows, arguments), strict=True):
            judged = judge(answer, row["answer"])
            counts[judged] += 1
            if judged == "wrong":
                pairs.append({"prompt": row["question"], "chosen": row["answer"], "rejected": answer})
        write(arguments.folder / f"{name}-pairs.jsonl", pairs)
        print(f"{name}: {', '.join(f'{counts[kind]} {kind}' for kind in ('right', 'wrong', 'without a number'))}")


def load(model: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    answering: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    return answering.to(device).eval(), tokenizer


def answers(model: Any, tokenizer: Any, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> Iterator[str]:
    """Yield an answer to the question of each row. Batches are of questions of about the same length."""
    import torch
    from transformers import set_seed

    set_seed(arguments.seed)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], add_generation_prompt=True, tokenize=False
        )
        for row in rows
    ]
    found = [""] * len(rows)
    order = sorted(range(len(rows)), key=lambda i: len(asked[i]))
    for start in range(0, len(order), arguments.batch):
        chosen = order[start : start + arguments.batch]
        texts = [asked[i] for i in chosen]
        inputs = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt").to(model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=arguments.tokens,
                do_sample=True,
                temperature=arguments.temperature,
                top_k=0,
                top_p=1.0,
                pad_token_id=tokenizer.pad_token_id,
            )
        texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for i, text in zip(chosen, texts, strict=True):
            found[i] = text.strip()
    yield from found


def picture(arguments: argparse.Namespace) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read(arguments.folder / "metrics.jsonl")
    figure = Figure(figsize=(9, 3.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, name in zip(figure.subplots(1, 2), ("rewards/margins", "rewards/accuracies"), strict=True):
        for log, label, style in (("step", "training", "-"), ("eval", "held-out questions", "o-")):
            points = [(r["step"], r["metrics"][name]) for r in records if r["log"] == log]
            axes.plot(*zip(*points, strict=True), style, markersize=4, linewidth=1.2, label=label)
        axes.set_xlabel("step")
        axes.set_title(name, loc="left")
        axes.grid(axis="y", color="#e8eaed")
        axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(arguments.out)


def judge(answer: str, correct: str) -> str:
    """Return right, wrong or "without a number", by the last line."""
    given, wanted = number(answer), number(correct)
    if given is None:
        return "without a number"
    return "right" if given == wanted else "wrong"


def number(answer: str) -> float | None:
    """Return the number in the last line, after `####`."""
    found = re.search(r"####\s*\$?(-?[\d,]*\.?\d+)\s*$", answer)
    return float(found[1].replace(",", "")) if found else None


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
