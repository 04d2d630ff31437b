"""Tokenizers of a thousand tokens, as the families that servers load have them."""

# ruff: noqa: RUF001  (texts of six scripts)

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{TAIL}"
LLAMA3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{TAIL}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLES = (
    "Le garçon naïf mangeait des crêpes à Noël, où l'été s'achève. Ünïcödé Größe straße ÆØÅ łódź İstanbul ",
    "def f(x):\n    return [i ** 2 for i in range(10) if i % 3 == 0]\n\n",
    "私は学生です。今日は天気がいいですね。 你好世界，机器学习 한국어 문장 🙂🎉👩‍👩‍👧 🚀 ",
    "The answer is 42, 1234567890 and 3.14159. It's what they've said; I'd say we'll see. ",
)

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
PHI = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


@cache
def corpus() -> tuple[str, ...]:
    """Return texts with code, numbers and six scripts."""
    code = Path(transformers.__file__).with_name("modeling_utils.py").read_text(encoding="utf-8")
    return (code[:150_000], *SAMPLES * 60)


def special(text: str, **rules: bool) -> AddedToken:
    """Return a special token."""
    return AddedToken(text, special=True, normalized=False, **rules)


def with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    """Put a token before every text."""
    pair = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(f"{bos} $A", f"{bos} $A {bos} $B", special_tokens=pair)
    return tokenizer


def byte_level(pre: Any, added: tuple[str, ...], *, normalizer: Any = None, ignore_merges: bool = False) -> Tokenizer:
    """Return a BPE on bytes. `pre`: an expression, or a pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if isinstance(pre, str):
        pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pre), "isolated"), level])
    tokenizer.pre_tokenizer = pre
    tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, show_progress=False, max_token_length=16)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens([special(text) for text in added])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_pieces(style: str, first: tuple[str, ...], added: tuple[AddedToken, ...]) -> Tokenizer:
    """Return a BPE with bytes as a fallback, with the merges that converters make of a SentencePiece model.

    style: `legacy` (a space before every text), `first` (before the first text alone), `gemma` (none).
    """
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never" if style == "gemma" else "always")
    trainer = trainers.BpeTrainer(vocab_size=900, limit_alphabet=260, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(corpus(), trainer)
    ranked = sorted(json.loads(made.to_str())["model"]["vocab"].items(), key=lambda item: item[1])
    pieces = [piece for piece, _ in ranked if piece != "<unk>"]
    merged, letters = [p for p in pieces if len(p) > 1], [p for p in pieces if len(p) == 1]
    order = [*first, *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    vocabulary = {piece: i for i, piece in enumerate(order)}
    merges = [(p[:i], p[i:]) for p in merged for i in range(1, len(p)) if p[:i] in vocabulary and p[i:] in vocabulary]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer, space = Tokenizer(model), normalizers.Replace(" ", "▁")
    match style:
        case "legacy":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
        case "first":
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        case "gemma":
            tokenizer.normalizer = space
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.add_special_tokens([*(special(text) for text in first), *added])
    strip = [] if style == "gemma" else [decoders.Strip(" ", 1, 0)]
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


@cache
def tokenizer_of(kind: str) -> tuple[Tokenizer, dict[str, str]]:
    """Return a tokenizer and its special tokens by role."""
    match kind:
        case "qwen":
            tokens = byte_level(QWEN, CHATML, normalizer=normalizers.NFC())
            return tokens, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        case "llama3":
            tokens = with_bos(byte_level(LLAMA3, LLAMA, ignore_merges=True), LLAMA[0])
            return tokens, {"bos_token": LLAMA[0], "eos_token": "<|eot_id|>"}
        case "smollm3":
            return byte_level(LLAMA3, (*LLAMA[:2], *CHATML[1:]), ignore_merges=True), {"eos_token": "<|im_end|>"}
        case "olmo":
            roles = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
            return byte_level(LLAMA3, (*CHATML, "<|pad|>")), roles
        case "olmoe":
            tokens = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), CHATML, normalizer=normalizers.NFC())
            return tokens, {"eos_token": "<|endoftext|>"}
        case "tekken":
            tokens = byte_level(TEKKEN, ("<s>", "</s>", "[INST]", "[/INST]"), ignore_merges=True)
            return with_bos(tokens, "<s>"), {"bos_token": "<s>", "eos_token": "</s>"}
        case "mistral":
            added = (special("[INST]"), special("[/INST]"))
            tokens = with_bos(sentence_pieces("first", ("<unk>", "<s>", "</s>"), added), "<s>")
            return tokens, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        case "phi3":
            added = (special(PHI[0]), *(special(text, rstrip=True) for text in PHI[1:]))
            tokens = with_bos(sentence_pieces("legacy", ("<unk>", "<s>", "</s>"), added), "<s>")
            return tokens, {"bos_token": "<s>", "eos_token": "<|end|>", "unk_token": "<unk>"}
        case "gemma":
            added = (special("<start_of_turn>"), special("<end_of_turn>"))
            tokens = with_bos(sentence_pieces("gemma", ("<pad>", "<eos>", "<bos>", "<unk>"), added), "<bos>")
            roles = {"bos_token": "<bos>", "eos_token": "<end_of_turn>", "unk_token": "<unk>", "pad_token": "<pad>"}
            return tokens, roles
    raise ValueError(kind)
