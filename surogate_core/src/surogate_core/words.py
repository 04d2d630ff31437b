"""Names that users write: compared without case and dashes, and corrected if they are misspelt."""

from __future__ import annotations

from collections.abc import Iterable

LONGEST_WORD = 64


def fold(word: str) -> str:
    """Return the form in which names are compared: lower case, `_` for `-`."""
    return word.strip().lower().replace("-", "_")


def nearest(word: str, legal: Iterable[str]) -> str | None:
    """Return the legal word that `word` misspells by one edit, or two from 8 letters on; None if there is none.

    An edit is a letter too many, missing, replaced, or swapped with the next one. More edits suggest words that mean
    something else: `max_samples` is not `max_steps`.
    """
    folded = fold(word)
    if not 2 < len(folded) <= LONGEST_WORD:
        return None
    most = 1 if len(folded) < 8 else 2
    close = [name for name in legal if abs(len(name) - len(folded)) <= most]
    distance, found = min(((_edits(folded, fold(name)), name) for name in close), default=(most + 1, None))
    return found if distance <= most else None


def _edits(a: str, b: str) -> int:
    """Return the number of edits from `a` to `b`: the restricted Damerau-Levenshtein distance."""
    before, row = list[int](), list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        two_before, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], two_before[j - 2] + 1)
    return row[-1]
