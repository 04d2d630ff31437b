"""The tokens that end what is trained: at inference the model writes them, and generation must stop there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from surogate_core.errors import ConfigError

from ..hub.generation_config import GENERATION_CONFIG, stop_ids
from .cache import Int64s, TokenDataset
from .chat.answer_span import RenderedChat, Untrainable
from .tokenizer import HIGHEST_ID, Tokenizer

_AT_ONCE = 1 << 24
"""Tokens that are looked at together."""
_ENOUGH = 1 << 16
"""Documents that are looked at where every token is trained: those end alike, and there may be billions."""

_CHAT = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})


def trained_ends(datasets: Iterable[TokenDataset], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the added tokens with which trained parts end: <|im_end|>, eos. White space may follow them."""
    added, found = set(tokenizer.added_ids), set[int]()
    for dataset in datasets:
        for stops in _stops(dataset):
            last, before = dataset.tokens_at(stops - 1), dataset.tokens_at(np.maximum(stops - 2, 0))
            spaces = [token for token in np.unique(last).tolist() if not tokenizer.decode([token]).strip()]
            of_spaces = np.isin(last, [token for token in spaces if token not in added])
            found |= {*np.unique(last[~of_spaces]).tolist(), *np.unique(before[of_spaces]).tolist()}
    return tuple(sorted(found & added))


def _stops(dataset: TokenDataset) -> Iterator[Int64s]:
    """Yield the positions after the last token of each trained part, of the dataset's documents in order."""
    ends = dataset.offsets[1:]
    if dataset.n_trained == dataset.n_tokens:
        yield ends[:_ENOUGH]
        return
    yield ends[dataset.trained_at(ends - 1)]
    for start in range(0, dataset.n_tokens, _AT_ONCE):
        stop = min(start + _AT_ONCE + 1, dataset.n_tokens)
        bits = np.unpackbits(dataset.mask[start // 8 : -(-stop // 8)], bitorder="little")[: stop - start]
        yield start + 1 + np.flatnonzero(bits[:-1] > bits[1:])


def template_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token with which the chat template ends an answer; none if there is no such token or template."""
    template = tokenizer.chat_template
    if template is None:
        return ()
    try:
        text = template.render(_CHAT)
        _, end = RenderedChat(_CHAT, None, template, tokenizer.added_texts, tokenizer.special_texts, text).answer(1)
    except (ConfigError, Untrainable):
        return ()
    return tuple(tokenizer.encode_ids(end))


def unknown_ends(ends: Sequence[int], tokenizer: Tokenizer, model_dir: Path) -> str | None:
    """Return a line if generation does not stop at a token that ends what is trained; None if it does at each.

    None as well if the model's files name no token at which it stops.
    """
    stops = stop_ids(model_dir)
    new = [token for token in ends if token not in stops]
    if not new or not stops:
        return None
    named, known = (", ".join(_named(token, tokenizer) for token in tokens) for tokens in (new, stops))
    return (
        f"model: trained turns end with {named}, and the model stops at {known} ({model_dir / GENERATION_CONFIG}). The "
        f"output's {GENERATION_CONFIG} has both, for transformers and vLLM. A server that reads another file, as of an "
        f"adapter's base or a GGUF, needs {named} as a stop token."
    )


def _named(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token, or its id if the tokenizer has no such token."""
    return (tokenizer.decode([token]) if 0 <= token <= HIGHEST_ID else "") or f"token {token}"
