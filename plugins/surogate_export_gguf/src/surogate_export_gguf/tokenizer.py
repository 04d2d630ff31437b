"""The keys of a GGUF file that make llama.cpp's tokenizer of a tokenizer.json, proven on random texts."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from gguf import GGUFWriter
from tokenizers import Tokenizer, models

from surogate_core.api import ConfigError, ExportContext

from . import pieces, splits
from .vocabulary import Tokens, read_json, tokens_of

UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


def describe(writer: GGUFWriter, context: ExportContext, size: int) -> bool:
    """Add the tokenizer of a model with `size` tokens. Returns whether spaces after special tokens are dropped."""
    parsed = read_json(context.folder / "tokenizer.json")
    settings = read_json(context.folder / "tokenizer_config.json")
    whole = load(parsed)
    kind = (parsed.get("model") or {}).get("type")
    if kind != "BPE":
        raise ConfigError(
            f"tokenizer.json: llama.cpp's form of the type {kind} is not known, only that of BPE. Use --format hf."
        )
    tokens = tokens_of(parsed, size)
    writer.add_token_list(tokens.texts)
    writer.add_token_types([int(x) for x in tokens.types])
    if parsed["model"].get("byte_fallback"):
        describe_pieces(writer, parsed, tokens, context.notice)
    else:
        describe_bytes(writer, parsed, context.notice)
    describe_ends(writer, context, tokens)
    describe_added(writer, whole, settings)
    describe_template(writer, context.folder, settings)
    return strips(parsed)


def load(parsed: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer of a parsed tokenizer.json. Raises ConfigError if it is none."""
    try:
        return Tokenizer.from_str(json.dumps(parsed))
    except Exception as error:  # tokenizers raises no other class
        raise ConfigError(f"tokenizer.json is no tokenizer: {error}. Copy that of the base.") from None


# ------------------------------------------------------------------------------------------------ byte-level BPE


def describe_bytes(writer: GGUFWriter, parsed: Mapping[str, Any], notice: Callable[[str], None]) -> None:
    """Add merges and pre-tokenizer of a byte-level BPE. Raises ConfigError if llama.cpp has none that splits alike."""
    model = parsed["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix", "dropout"):
        if model.get(key):
            raise ConfigError(
                f"tokenizer.json: {key} is {model[key]!r}, which llama.cpp does not know. Use --format hf."
            )
    check_alphabet(model["vocab"])
    normalizers = steps(parsed.get("normalizer"), "normalizers")
    if others := [step["type"] for step in normalizers if step["type"] not in UNICODE_FORMS]:
        reason = f"llama.cpp has no normalizer {', '.join(others)}; it takes text as it is"
        raise ConfigError(f"tokenizer.json: {reason}. Use --format hf.")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_of(parsed, notice))
    writer.add_token_merges([" ".join(pair) for pair in merges_of(model)])
    notice_normalizer(normalizers, notice)


def pre_of(parsed: Mapping[str, Any], notice: Callable[[str], None]) -> str:
    """Return the name of the pre-tokenizer. Raises ConfigError with the nearest name and what differs."""
    match = nearest_of(json.dumps({**parsed, "normalizer": None, "post_processor": None}))
    share = f"{len(match.differs)} of {len(splits.random_texts())} random texts"
    if not match.right:
        how = f"splits {share} otherwise, the shortest is {match.differs[0]!r}" if match.differs else "merges otherwise"
        fix = "Train with the tokenizer of a published model, or serve the model with --format hf."
        raise ConfigError(
            f"tokenizer.json: llama.cpp has no pre-tokenizer like it. The nearest, {match.name}, {how}. {fix}"
        )
    if match.differs:
        notice(f"llama.cpp's {match.name} splits {share} otherwise than the tokenizer, such as {match.differs[0]!r}")
    return match.name


@lru_cache(maxsize=2)  # `check` and `write` ask for the same one
def nearest_of(serialized: str) -> splits.Match:
    """Return the pre-tokenizer that is nearest to that of a tokenizer.json."""
    whole, letters = Tokenizer.from_str(serialized), byte_letters()
    model = json.loads(serialized)["model"]

    def cut(text: str) -> list[str]:
        if whole.pre_tokenizer is None:
            return [text]
        found = whole.pre_tokenizer.pre_tokenize_str(text)
        exact = all(piece == "".join(letters[b] for b in text[a:z].encode()) for piece, (a, z) in found)
        return [text[a:z] for _, (a, z) in found] if exact else [piece for piece, _ in found]

    ignores = bool(model.get("ignore_merges"))
    return splits.nearest(cut, ignore_merges=ignores, either=merges_make_all(model))


def merges_make_all(model: Mapping[str, Any]) -> bool:
    """Whether merging makes each token of its own text: then it is the same whether whole tokens are taken unmerged."""
    merged = Tokenizer(models.BPE(vocab=dict(model["vocab"]), merges=merges_of(model)))
    texts = list(model["vocab"])
    return all([t.id for t in merged.model.tokenize(text)] == [model["vocab"][text]] for text in texts)


def check_alphabet(vocabulary: Mapping[str, int]) -> None:
    """Refuse a vocabulary that lacks a byte."""
    if lacks := [byte for byte, letter in enumerate(byte_letters()) if letter not in vocabulary]:
        byte = f"0x{lacks[0]:02X}"
        raise ConfigError(f"tokenizer.json has no token for the byte {byte}; llama.cpp needs all 256. Use --format hf.")


def byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level BPE."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


# ----------------------------------------------------------------------------------- BPE with bytes as a fallback


def describe_pieces(writer: GGUFWriter, parsed: dict[str, Any], tokens: Tokens, notice: Callable[[str], None]) -> None:
    """Add scores of pieces. Raises ConfigError if llama.cpp would make other tokens of them."""
    model = parsed["model"]
    vocabulary, merges = model["vocab"], merges_of(model)
    scores = pieces.scores_of(vocabulary, merges)
    if pair := pieces.missing_merge(vocabulary, merges):
        made = pair[0] + pair[1]
        reason = f"llama.cpp would join {pair[0]!r} and {pair[1]!r} to {made!r}, which is not a merge of the tokenizer"
        raise ConfigError(f"tokenizer.json: {reason}. Train with the tokenizer of a published model.")
    prefix = prove_pieces(parsed, scores)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores([scores.get(text, 0.0) for text in tokens.texts])
    writer.add_add_space_prefix(prefix == "always")
    if prefix == "first":
        notice("text without a special token before it gets no space in front, unlike in training; chats are equal")
    notice_normalizer(steps(parsed.get("normalizer"), "normalizers"), notice)


def prove_pieces(parsed: dict[str, Any], scores: Mapping[str, float]) -> str:
    """Return when a space is put in front of text: always, first or never. Raises ConfigError if tokens differ."""
    model = parsed["model"]
    bare = copy.deepcopy({**parsed, "post_processor": None, "added_tokens": []})
    kept = [s for s in steps(bare.get("normalizer"), "normalizers") if s["type"] not in UNICODE_FORMS]
    bare["normalizer"] = {"type": "Sequence", "normalizers": kept} if kept else None
    whole = Tokenizer.from_str(json.dumps(bare))
    unknown = model["vocab"].get(model.get("unk_token"), -1)
    found = json.dumps([parsed.get("normalizer"), parsed.get("pre_tokenizer")])
    first = '"prepend_scheme": "first"' in found
    prefixes = {"always" if not first else "first": pieces.SPACE, "never": ""}
    wrong: dict[str, list[str]] = {}
    for name, prefix in prefixes.items():
        differs = []
        for text in pieces.proof_texts():
            spaced = text.replace(" ", pieces.SPACE)
            lead = "" if first and spaced.startswith(pieces.SPACE) else prefix
            if whole.encode(text, add_special_tokens=False).ids != pieces.encode(
                lead + spaced, model["vocab"], scores, unknown
            ):
                differs.append(text)
        if not differs:
            return name
        wrong[name] = sorted(differs, key=len)
    shortest = min((texts[0] for texts in wrong.values()), key=len)
    least = min(len(texts) for texts in wrong.values())
    raise ConfigError(
        f"tokenizer.json: llama.cpp would make other tokens of {least} of {len(pieces.proof_texts())} texts, such as "
        f"{shortest!r}. Train with the tokenizer of a published model, or serve the model with --format hf."
    )


# ------------------------------------------------------------------------------------------------ what both have


def steps(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the parts of a normalizer or pre-tokenizer, one after the other."""
    if part is None:
        return []
    return [step for inner in part[key] for step in steps(inner, key)] if part["type"] == "Sequence" else [part]


def merges_of(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return merges, which older files hold as text."""
    pairs = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
    return [(left, right) for left, right in pairs]


def notice_normalizer(normalizers: Sequence[Mapping[str, Any]], notice: Callable[[str], None]) -> None:
    """Tell that text in another Unicode form has other tokens."""
    for step in normalizers:
        if step["type"] in UNICODE_FORMS:
            form = step["type"]
            notice(f"llama.cpp does not normalize text to {form}: a letter and an accent of two characters stay two")


def strips(parsed: Mapping[str, Any]) -> bool:
    """Whether spaces after a special token belong to it."""
    return any(token.get("rstrip") and token["special"] for token in parsed.get("added_tokens") or [])


def describe_ends(writer: GGUFWriter, context: ExportContext, tokens: Tokens) -> None:
    """Add the tokens at which llama.cpp stops: it has keys for three."""
    ends = list(dict.fromkeys((*context.turn_ends, *context.stops)))
    if not ends:
        raise ConfigError("eos_token_id: no token ends a turn. Name it in generation_config.json of the model.")
    if outside := [i for i in ends if not 0 <= i < len(tokens.texts)]:
        raise ConfigError(
            f"eos_token_id: the model has no token {outside[0]}, only {len(tokens.texts)}. Correct the ids."
        )
    for add, i in zip((writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id), ends, strict=False):
        add(i)
    if left := ends[3:]:
        texts = ", ".join(repr(tokens.texts[i]) for i in left)
        context.notice(f"a GGUF file names three end tokens: give {texts} to the server as stop texts")


def describe_added(writer: GGUFWriter, whole: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Add special tokens by their roles, and those that the tokenizer puts around text."""
    roles = {
        "bos_token": writer.add_bos_token_id,
        "unk_token": writer.add_unk_token_id,
        "pad_token": writer.add_pad_token_id,
    }
    plain, full = whole.encode("a", add_special_tokens=False).ids, whole.encode("a").ids
    at = next(i for i in range(len(full)) if full[i : i + len(plain)] == plain)
    before, after = full[:at], full[at + len(plain) :]
    for role, add in roles.items():
        text = settings.get(role)
        i = whole.token_to_id(text["content"] if isinstance(text, dict) else text) if text else None
        if role == "bos_token" and before:
            i = before[0]
        if i is not None:
            add(i)
    if len(before) > 1 or len(after) > 1:
        raise ConfigError(
            f"tokenizer.json puts {before} before and {after} after text; llama.cpp puts one at most. Use --format hf."
        )
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(after))


def describe_template(writer: GGUFWriter, folder: Path, settings: Mapping[str, Any]) -> None:
    """Add the chat templates."""
    named = {
        path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
    }
    given = settings.get("chat_template")
    if isinstance(given, list):
        named |= {entry["name"]: entry["template"] for entry in given}
    elif given:
        named["default"] = given
    if (default := folder / "chat_template.jinja").exists():
        named["default"] = default.read_text(encoding="utf-8")
    if named:
        writer.add_chat_template([{"name": name, "template": text} for name, text in named.items()])
