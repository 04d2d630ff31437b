"""Into how many chunks the LM head divides the tokens of a micro-step."""

from __future__ import annotations

from ..dtypes import DTYPES
from ..errors import ConfigError

LOGITS_BYTES = 512 << 20
"""`lmhead_chunks: auto` keeps the logits of a chunk at or below this size."""


def lm_head_chunks(asked: int | None, tokens: int, vocab_size: int, dtype: str) -> int:
    """Return the number of chunks: `asked`, or for None as many as `auto_lmhead_chunks` chooses.

    Raises ConfigError if `asked` does not divide the tokens of a micro-step.
    """
    chunks = asked or auto_lmhead_chunks(tokens, vocab_size, dtype)
    if tokens % chunks:
        raise ConfigError(
            f"lmhead_chunks: {chunks} does not divide per_device_train_batch_size x sequence_len = {tokens} tokens. "
            "Use a divisor, or auto."
        )
    return chunks


def auto_lmhead_chunks(tokens: int, vocab_size: int, dtype: str) -> int:
    """Return the smallest number of equal chunks whose logits stay within LOGITS_BYTES each."""
    row = DTYPES[dtype].nbytes(vocab_size)
    return min(c for c in _divisors(tokens) if tokens // c * row <= LOGITS_BYTES or c == tokens)


def _divisors(n: int) -> list[int]:
    """Return all divisors of `n`, from its prime factors: counting up to a large prime `n` would hang."""
    divisors, rest, factor = [1], n, 2
    while rest > 1:
        factor = factor if factor * factor <= rest else rest
        power = 1
        found = divisors
        while rest % factor == 0:
            rest //= factor
            power *= factor
            divisors = divisors + [d * power for d in found]
        factor += 1
    return divisors
