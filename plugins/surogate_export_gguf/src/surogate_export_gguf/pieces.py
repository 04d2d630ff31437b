"""BPE with bytes as a fallback, as converters make it of SentencePiece models and llama.cpp computes it (type `llama`).

llama.cpp joins the two neighbours whose piece has the highest score; the file of Hugging Face has merges in an order.
A score of minus the rank of the first merge that makes a piece says the same, if merges are ordered by what they make
and no pair that makes a piece is missing. That it does is proven on random texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

from .splits import random_texts

SPACE = "▁"
Merges = Sequence[tuple[str, str]]


def scores_of(vocabulary: Mapping[str, int], merges: Merges) -> dict[str, float]:
    """Return the score of each piece: the earlier merges make it, the higher."""
    ranks: dict[str, int] = {}
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    return {piece: -float(ranks.get(piece, len(ranks))) for piece in vocabulary}


def missing_merge(vocabulary: Mapping[str, int], merges: Merges) -> tuple[str, str] | None:
    """Return two pieces that make a piece and are no merge, which llama.cpp would join; None if there are none."""
    known = set(merges)
    for piece in {left + right for left, right in merges}:
        for i in range(1, len(piece)):
            pair = piece[:i], piece[i:]
            if pair[0] in vocabulary and pair[1] in vocabulary and pair not in known:
                return pair
    return None


def encode(text: str, vocabulary: Mapping[str, int], scores: Mapping[str, float], unknown: int) -> list[int]:
    """Return the ids that llama.cpp's type `llama` gives to text without special tokens, slowly and plainly."""
    parts = list(text)
    while True:
        joined = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [token for part in parts for token in ids_of(part, vocabulary, unknown)]


def ids_of(part: str, vocabulary: Mapping[str, int], unknown: int) -> list[int]:
    """Return the id of a piece, or those of its bytes."""
    if part in vocabulary:
        return [vocabulary[part]]
    return [vocabulary.get(f"<0x{byte:02X}>", unknown) for byte in part.encode()]


@cache
def proof_texts() -> tuple[str, ...]:
    """Return random texts and some of words."""
    words = (
        "the model",
        "It's 42, isn't it?",
        "naïve café",
        "def f(x):\n    return x",
        "  two  spaces ",
        "a\tb",
        "你好 world",
    )
    return *words, *random_texts()[:500]
