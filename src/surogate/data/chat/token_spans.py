"""Tokenize a text of which some spans of characters are trained.

The tokens must be those of inference, where the prompt is tokenized alone and the model continues it token by token.

- A byte-level tokenizer gives these tokens if the text is cut where an answer begins or ends, and each piece is
  tokenized alone.
- A tokenizer of the SentencePiece kind does not, because it puts a space before every piece. Here the whole text is
  tokenized, and a token is trained if its first character is inside a span. With BPE and unigram models, if a token
  boundary is at the end of the prompt, the tokens before it are those of the prompt alone.
- A token that crosses the boundary ("▁A" if the prompt ends with the space) never occurs at inference: the model gets
  "▁" and must produce "A". Then the text is tokenized in two parts. A neutral character is put before the second part,
  and its token is dropped. The same is done for an added token that strips the white space at the start of an answer.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from surogate_core.api import Encoded
from surogate_core.errors import ConfigError

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

Span = tuple[int, int]
"""(start, stop) of a range of characters; stop is exclusive."""

# Characters to put before a text that continues another, until one does not form a common token with the text.
_NEUTRAL = ("\n", ".", "a", "0", "\t", "文")


def encode_spans(text: str, spans: Sequence[Span] | None, tokenizer: Tokenizer) -> Encoded:
    """Return the tokens of `text`, trained inside `spans` (sorted, disjoint); None: all of them are trained.

    Raises ConfigError if spans are given and all or no tokens are trained, if the text begins with two bos tokens, or
    if a token crosses the start of a span with every neutral character.
    """
    if spans is None:
        tokens = tokenizer.encode_ids(text)
        return _checked(Encoded(tokens, [True] * len(tokens)), tokenizer)
    encode = _by_pieces if tokenizer.reads_pieces_as_parts else _by_offsets
    result = _checked(encode(text, spans, tokenizer), tokenizer)
    if not any(result.trained) or all(result.trained):
        what = "every token is trained, including the prompt" if any(result.trained) else "no token is trained"
        raise ConfigError(f"{what}: {marked(result, tokenizer)}. Check the chat template.")
    return result


def _by_pieces(text: str, spans: Sequence[Span], tokenizer: Tokenizer) -> Encoded:
    cuts = [0, *(at for span in spans for at in span), len(text)]
    encoded = tokenizer.encode_batch([text[start:stop] for start, stop in itertools.pairwise(cuts)])
    tokens = [token for ids in encoded for token in ids]
    return Encoded(tokens, [bool(n % 2) for n, ids in enumerate(encoded) for _ in ids])


def _by_offsets(text: str, spans: Sequence[Span], tokenizer: Tokenizer) -> Encoded:
    starts = [start for start, _ in spans]
    if not tokenizer.is_byte_level:  # byte-level splitting of white space depends on the text after it: always cut
        _, offsets = tokenizer.encode_offsets(text)
        starts = [start for start in starts if any(first < start < after for first, after in offsets)]
    cuts = sorted({0, *starts, len(text)})
    tokens: list[int] = []
    trained: list[bool] = []
    for start, stop in itertools.pairwise(cuts):
        ids, offsets = _continued(text[start:stop], tokenizer) if start else tokenizer.encode_offsets(text[:stop])
        inside = [(first - start, after - start) for first, after in spans if start <= first < stop]
        tokens += ids
        trained += [any(first <= at < after for first, after in inside) for at, _ in offsets]
    return Encoded(tokens, trained)


def _continued(text: str, tokenizer: Tokenizer) -> tuple[list[int], list[Span]]:
    """Return the tokens of `text` and their characters, as they are when other text precedes it."""
    if tokenizer.is_byte_level and not tokenizer.puts_space_first:
        return tokenizer.encode_offsets(text)
    for before in _NEUTRAL:
        ids, offsets = tokenizer.encode_offsets(before + text)
        size = len(before)
        if not any(first < size < after for first, after in offsets):
            own = next((n for n, (first, _) in enumerate(offsets) if first >= size), len(ids))
            return ids[own:], [(first - size, after - size) for first, after in offsets[own:]]
    raise ConfigError(
        f"a token joins the answer {text[:30]!r} with the text before it, so the trained tokens cannot be determined. "
        "Use a tokenizer that splits there."
    )


def _checked(encoded: Encoded, tokenizer: Tokenizer) -> Encoded:
    bos = tokenizer.bos_id
    if bos is not None and list(encoded.tokens[:2]) == [bos, bos]:
        raise ConfigError(
            f"begins with two bos tokens: {marked(encoded, tokenizer)}. The chat template writes one itself: remove "
            "the other from the messages."
        )
    return encoded


def marked(encoded: Encoded, tokenizer: Tokenizer, chars: int = 400) -> str:
    """Return the document as text with trained parts in [[ ]]; of a long document, both ends."""
    parts = (f"[[{text}]]" if trained else text for text, trained in runs(encoded, tokenizer))
    shown = re.sub(r"\n", r"\\n", "".join(parts))
    return shown if len(shown) <= chars else f"{shown[: chars // 2]} ... {shown[-chars // 2 :]}"


def runs(encoded: Encoded, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """Return the document as text, cut where training starts or stops: (text, whether it is trained).

    The text of a part is what it adds to the text of all tokens before it. Decoded alone, a part would lose its first
    space with tokenizers of the SentencePiece kind.
    """
    cuts = [n for n in range(1, len(encoded.tokens)) if encoded.trained[n] != encoded.trained[n - 1]]
    found: list[tuple[str, bool]] = []
    before = ""
    for start, stop in itertools.pairwise([0, *cuts, len(encoded.tokens)]):
        text = tokenizer.decode(encoded.tokens[:stop])
        if not text.startswith(before):  # the bytes of a character are on both sides
            text = before + tokenizer.decode(encoded.tokens[start:stop])
        if stop > start:
            found.append((text[len(before) :], bool(encoded.trained[start])))
        before = text
    return found
