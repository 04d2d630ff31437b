"""Text that a model has written, as it may be printed: a terminal obeys control characters."""

from __future__ import annotations

import sys


def written_text(text: str) -> str:
    """Return a text with control characters escaped, if stdout is a terminal; line breaks and tabs stay."""
    if not sys.stdout.isatty():
        return text
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text
    )
