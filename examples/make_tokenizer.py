"""Train the tokenizer of the quickstart: byte-level BPE over the bundled Shakespeare. Deterministic.

    python examples/make_tokenizer.py [--text examples/data/tinyshakespeare.txt] [--out examples/tiny-qwen3]

Writes `tokenizer.json` and `tokenizer_config.json`, which `transformers.AutoTokenizer` loads. The words are split by
the pattern of the Qwen family (runs of line breaks are one piece); `<|endoftext|>` ends and pads documents.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

HERE = Path(__file__).resolve().parent
END_OF_TEXT = "<|endoftext|>"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(text: str, vocab_size: int) -> Tokenizer:
    """Train byte-level BPE with exactly `vocab_size` tokens. Id 0 is `<|endoftext|>`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(
            f"the text yields {tokenizer.get_vocab_size()} tokens, not {vocab_size}: give a smaller --vocab"
        )
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the quickstart's tokenizer.")
    parser.add_argument("--text", type=Path, default=HERE / "data" / "tinyshakespeare.txt")
    parser.add_argument("--out", type=Path, default=HERE / "tiny-qwen3")
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument("--model-max-length", type=int, default=4096)
    args = parser.parse_args()

    tokenizer = train_tokenizer(args.text.read_text(encoding="utf-8"), args.vocab)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(args.out / "tokenizer.json"), pretty=True)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": args.model_max_length,
    }
    (args.out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
