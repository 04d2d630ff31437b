"""Places in a text where it may be cut: the tokens of the parts, one after the other, are those of the whole.

A cut lies between a line break and a letter or digit. That no token lies across it is known from tokenizer.json:

- the model is BPE, and no token of its vocabulary has a line break before a letter or digit, so no merge makes one;
- no added token has a line break inside it, nor takes the white space before a letter or digit into itself;
- nothing is put before a text, and every normalizer works on single characters or never looks across a line break.

What is left is how the patterns that split a text into words see the end of a part. `Tokenizer.pieces` compares the
tokens around each cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

LINE_CUT = re.compile(r"(?<=\S)\r?\n(?=[^\W_])")
"""A line break between two words: a text may be cut after it."""

_ACROSS = re.compile(r"(?:\n|<0x0A>)(?:[^\W_]|<0x)")
# Each character is a byte: "Ċ" is the line break, and those from "Â" start a letter that is not ASCII.
_ACROSS_BYTES = re.compile("\u010a[0-9A-Za-z\u00c2-\u00ff]")
_NORMALIZERS = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Replace")
_SPLITTERS = ("ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit")


def has_line_cuts(spec: Mapping[str, Any]) -> bool:
    """Return whether texts may be cut where LINE_CUT matches, by the content of tokenizer.json."""
    splitters = list(_steps(spec.get("pre_tokenizer"), "pretokenizers"))
    return (
        all(map(_keeps_lines, _steps(spec.get("normalizer"), "normalizers")))
        and all(step["type"] in _SPLITTERS and not step.get("add_prefix_space") for step in splitters)
        and not any(map(_joins_lines, spec.get("added_tokens") or ()))
        and _never_merges_lines(spec["model"], any(step["type"] == "ByteLevel" for step in splitters))
    )


def _steps(part: Mapping[str, Any] | None, name: str) -> Iterator[Mapping[str, Any]]:
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for step in part[name]:
        yield from _steps(step, name)


def _keeps_lines(normalizer: Mapping[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and "\n" not in pattern and "\r" not in pattern
    return normalizer["type"] in _NORMALIZERS


def _joins_lines(added: Mapping[str, Any]) -> bool:
    content = added["content"]
    inside = "\n" in (content if added.get("single_word") else content[:-1])
    return inside or (bool(added.get("lstrip")) and content[:1].isalnum())


def _never_merges_lines(model: Mapping[str, Any], bytes_only: bool) -> bool:
    if model.get("type") != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    ):
        return False
    across = _ACROSS_BYTES if bytes_only else _ACROSS
    return not any(map(across.search, model["vocab"]))
