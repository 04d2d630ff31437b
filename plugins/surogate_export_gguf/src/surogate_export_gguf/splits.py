"""Pre-tokenizers of llama.cpp by name, found by what a tokenizer does to random texts.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`); the expressions are in llama.cpp. Its own converter finds
the name by a hash that published tokenizers have and own ones do not. Here a name is right if its expressions split
texts of all classes of characters as the tokenizer does.
"""

# ruff: noqa: RUF001  (characters that look alike are told apart here)

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import regex

CONTRACTED = r"'(?i:s|t|re|ve|m|ll|d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
NOT_LOWER, NOT_UPPER = r"(?=\p{L})[^a-z]", r"(?=\p{L})[^A-Z]"
ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"


def cased(upper: str, lower: str, contracted: str, digits: str) -> str:
    """Return the expression that splits words where their case changes."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}(?:{upper})*(?:{lower})+{contracted}|{lead}(?:{upper})+(?:{lower})*{contracted}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"


def llama3(digits: str, word: str = WORD, signs: str = SIGNS) -> str:
    """Return the expression of Llama 3 with another one for numbers, words or signs."""
    return f"{CONTRACTED}|{word}|{digits}|{signs}|{SPACES}"


@dataclass(frozen=True)
class Split:
    """A pre-tokenizer of llama.cpp.

    name           of `tokenizer.ggml.pre`
    expressions    each splits the pieces of the one before
    ignore_merges  a piece that is a token is taken without merging
    published      what the tokenizer does that llama.cpp means, where its own expressions only come near
    """

    name: str
    expressions: tuple[str, ...]
    ignore_merges: bool = False
    published: str = ""


SPLITS = (
    Split("qwen2", (llama3(r"\p{N}"),)),
    Split("llama-bpe", (llama3(r"\p{N}{1,3}"),), ignore_merges=True),
    Split("smaug-bpe", (llama3(r"\p{N}{1,3}"),)),
    Split("gpt-2", (GPT2,)),
    Split("smollm", (r"\p{N}", GPT2)),
    Split(
        "tekken",
        (cased(NOT_LOWER, NOT_UPPER, "", r"\p{N}"),),
        ignore_merges=True,
        published=cased(UPPER, LOWER, "", r"\p{N}"),
    ),
    Split(
        "gpt-4o",
        (cased(NOT_LOWER, NOT_UPPER, f"(?:{CONTRACTED})?", r"\p{N}{1,3}"),),
        published=cased(UPPER, LOWER, f"(?:{CONTRACTED})?", r"\p{N}{1,3}"),
    ),
    Split(
        "qwen35",
        (llama3(r"\p{N}", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),),
    ),
    Split(
        "deepseek-v3",
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            rf"{ASCII_SIGNS}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{SPACES}",
        ),
    ),
    Split("falcon", (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    Split("seed-coder", (llama3(r"\p{N}", signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
)

CHARACTERS = (
    *("a", "b", "A", "S", "T", "é", "Ö", "ß", "ǅ", "ʰ", "я", "Я"),  # cases in and outside of ASCII
    *("你", "あ", "カ", "क", "ि", "́", "1", "2", "٣", "²"),  # letters without a case, marks, numbers
    *(" ", "\u2003", "\u00a0", "\t", "\n", "\r\n"),
    *("'", "'s", "'LL", "’", ".", "/", "_", "-", "€", "🙂", "\u200d", "、", "<", "+"),
)
"""One or more of every class that a known expression tells apart."""


@cache
def random_texts(count: int = 4000) -> tuple[str, ...]:
    """Return short texts, the same at each call."""
    draw = random.Random(0)
    return tuple("".join(draw.choices(CHARACTERS, k=draw.randint(1, 12))) for _ in range(count))


def split(text: str, expressions: Sequence[str]) -> list[str]:
    """Return the pieces that expressions make, one after the other; what one does not match is a piece too."""
    parts = [text]
    for expression in expressions:
        parts = [piece for part in parts for piece in cut(part, expression)]
    return parts


def cut(text: str, expression: str) -> list[str]:
    """Return the matches of an expression and what is between them."""
    pieces, end = [], 0
    for match in compiled(expression).finditer(text):
        pieces += [text[end : match.start()], match[0]]
        end = match.end()
    return [piece for piece in (*pieces, text[end:]) if piece]


@cache
def compiled(expression: str) -> regex.Pattern[str]:
    """Return the compiled expression."""
    return regex.compile(expression)


@dataclass(frozen=True)
class Match:
    """The pre-tokenizer that is nearest to a tokenizer.

    name     of `tokenizer.ggml.pre`
    right    whether the tokenizer splits so, or as the one that it is named after
    differs  texts of `random_texts` that llama.cpp splits otherwise, the shortest first
    """

    name: str
    right: bool
    differs: tuple[str, ...]


def nearest(pieces: Callable[[str], Sequence[str]], *, ignore_merges: bool, either: bool = False) -> Match:
    """Return the pre-tokenizer that splits as `pieces` does, or the one that comes nearest.

    either: it makes no difference whether merges are ignored, as where they make every token of the vocabulary.
    """
    wanted = {text: list(pieces(text)) for text in random_texts()}
    ordered = sorted(SPLITS, key=lambda known: known.ignore_merges is not ignore_merges)
    able = [known for known in ordered if either or known.ignore_merges is ignore_merges]
    for known in able:
        if agrees(wanted, known.expressions):
            return Match(known.name, True, ())
    for known in able:
        if known.published and agrees(wanted, (known.published,)):
            return Match(known.name, True, differing(wanted, known.expressions))
    found = [Match(known.name, False, differing(wanted, known.expressions)) for known in ordered]
    return min(found, key=lambda match: len(match.differs))


def agrees(wanted: Mapping[str, list[str]], expressions: Sequence[str]) -> bool:
    """Whether expressions make the wanted pieces of every text."""
    return all(split(text, expressions) == pieces for text, pieces in wanted.items())


def differing(wanted: Mapping[str, list[str]], expressions: Sequence[str]) -> tuple[str, ...]:
    """Return the texts of which expressions make other pieces, the shortest first."""
    return tuple(sorted((t for t, pieces in wanted.items() if split(t, expressions) != pieces), key=len))
