"""Generate text with a trained checkpoint: `python examples/generate.py OUTPUT_DIR [--prompt TEXT ...]`.

Nothing of Surogate is imported: a run saves an ordinary Hugging Face checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

TEMPERATURE = 0.8
TOP_K = 50


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Print lines that a trained checkpoint writes.")
    parser.add_argument("output_dir", type=Path, help="the output_dir of a run, or one of its step_* directories")
    parser.add_argument("--prompt", action="append", help="how the text begins; may be repeated (default: ROMEO:)")
    parser.add_argument("--tokens", type=int, default=120, help="tokens to write for each prompt (default: 120)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed writes the same text (default: 1)")
    args = parser.parse_args(argv)
    if args.tokens < 1:
        parser.error(f"--tokens: {args.tokens} is not at least 1")
    problem = find_problem(args.output_dir)
    if problem:
        print(problem, file=sys.stderr)
        return 2
    for text in generate(args.output_dir, args.prompt or ["ROMEO:"], args.tokens, args.seed):
        print(text.strip("\n"), end="\n\n")
    return 0


def find_problem(directory: Path) -> str | None:
    """Return why `directory` cannot be loaded and a remedy, or None if it can."""
    if not directory.is_dir():
        return f"{directory} is no directory. Give the output_dir of a run that has saved a checkpoint."
    missing = [name for name in ("config.json", "tokenizer.json") if not (directory / name).is_file()]
    if not any(directory.glob("*.safetensors")):
        missing.append("*.safetensors")
    if not missing:
        return None
    steps = sorted(path.name for path in directory.glob("step_*") if (path / "config.json").is_file())
    remedy = (
        f"Give a checkpoint of the run: {directory / steps[-1]}" if steps else "Train first: surogate train RUN.yaml"
    )
    for folder in (directory, directory / "adapter"):
        if (folder / "adapter_config.json").is_file():
            remedy = f"Merge its adapter, and give the folder of that: surogate merge {folder} merged"
    return f"{directory} holds no checkpoint: {', '.join(missing)} not found. {remedy}"


def generate(directory: Path, prompts: Sequence[str], tokens: int, seed: int) -> list[str]:
    """Return each prompt with up to `tokens` sampled tokens after it (fewer if the model ends its text)."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, use_safetensors=True).eval()
    texts = []
    for prompt in prompts:
        torch.manual_seed(seed)
        output = model.generate(
            **tokenizer(prompt, return_tensors="pt", return_token_type_ids=False),
            max_new_tokens=tokens,
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            top_p=1.0,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
        texts.append(str(tokenizer.decode(output[0], skip_special_tokens=True)))
    return texts


if __name__ == "__main__":
    sys.exit(main())
