"""Tokens of a text in which some spans of characters are trained.

The prompt and the answer must be the tokens that they are at inference: there the prompt is tokenized alone, and the
model continues it token by token. With a byte-level tokenizer, a text whose pieces end where an answer begins gives
these tokens. With a tokenizer of the SentencePiece kind it does not, because such a tokenizer puts a space before
every piece. There the whole text is tokenized, and a token is trained where its first character is. In BPE and unigram
models, a whole text with a token border at the end of the prompt has the tokens of the prompt before it.

A token that spans the border ("▁A" where the prompt ends with the space) is not what inference sees: it gives the
model "▁" and has to get "A". The text is then tokenized in two parts, the second with a neutral character before it,
whose token is dropped again. The same holds for an added token that strips the white space of an answer's beginning.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..api import Encoded
from ..errors import ConfigError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

Span = tuple[int, int]
"""Characters from the first to after the last."""

# Put before a text that continues another: with one of them, no token joins it with the text.
_NEUTRAL = ("\n", ".", "a", "0", "\t", "文")


def encode_spans(text: str, spans: Sequence[Span] | None, tokenizer: Tokenizer) -> Encoded:
    """Tokens of `text`, trained inside `spans` (in order, not overlapping); None: all are.

    Raises ConfigError when everything or nothing is trained, when the text begins with two bos tokens, and when a
    token spans the beginning of a span whatever is put before it.
    """
    if spans is None:
        tokens = tokenizer.encode_ids(text)
        return _checked(Encoded(tokens, [True] * len(tokens)), tokenizer)
    encode = _by_pieces if tokenizer.reads_pieces_as_parts else _by_offsets
    result = _checked(encode(text, spans, tokenizer), tokenizer)
    if not any(result.trained) or all(result.trained):
        what = "every token is trained, the prompt too" if any(result.trained) else "no token is trained"
        raise ConfigError(f"{what}: {marked(result, tokenizer)}. Check the chat template.")
    return result


def _by_pieces(text: str, spans: Sequence[Span], tokenizer: Tokenizer) -> Encoded:
    cuts = [0, *(at for span in spans for at in span), len(text)]
    encoded = tokenizer.encode_batch([text[start:stop] for start, stop in itertools.pairwise(cuts)])
    tokens = [token for ids in encoded for token in ids]
    return Encoded(tokens, [bool(n % 2) for n, ids in enumerate(encoded) for _ in ids])


def _by_offsets(text: str, spans: Sequence[Span], tokenizer: Tokenizer) -> Encoded:
    starts = [start for start, _ in spans]
    if not tokenizer.is_byte_level:  # how a byte-level one splits white space depends on what follows: always cut
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
    """Tokens of `text` and their characters, as they are after other text."""
    if tokenizer.is_byte_level and not tokenizer.puts_space_first:
        return tokenizer.encode_offsets(text)
    for before in _NEUTRAL:
        ids, offsets = tokenizer.encode_offsets(before + text)
        size = len(before)
        if not any(first < size < after for first, after in offsets):
            own = next((n for n, (first, _) in enumerate(offsets) if first >= size), len(ids))
            return ids[own:], [(first - size, after - size) for first, after in offsets[own:]]
    raise ConfigError(
        f"a token joins the answer {text[:30]!r} with whatever stands before it, so that what is trained cannot be "
        "told. Use a tokenizer that splits there."
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
    """The document as text, trained parts in [[ ]], of long ones both ends."""
    parts = (f"[[{text}]]" if trained else text for text, trained in runs(encoded, tokenizer))
    shown = re.sub(r"\n", r"\\n", "".join(parts))
    return shown if len(shown) <= chars else f"{shown[: chars // 2]} ... {shown[-chars // 2 :]}"


def runs(encoded: Encoded, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """The document as text, cut where training begins or ends: (text, whether it is trained).

    Each part is what it adds to the text of the tokens before it: decoded alone, a part loses its first space with
    tokenizers of the SentencePiece kind.
    """
    cuts = [n for n in range(1, len(encoded.tokens)) if encoded.trained[n] != encoded.trained[n - 1]]
    found: list[tuple[str, bool]] = []
    before = ""
    for start, stop in itertools.pairwise([0, *cuts, len(encoded.tokens)]):
        text = tokenizer.decode(encoded.tokens[:stop])
        if not text.startswith(before):  # a character whose bytes are on both sides
            text = before + tokenizer.decode(encoded.tokens[start:stop])
        if stop > start:
            found.append((text[len(before) :], bool(encoded.trained[start])))
        before = text
    return found
