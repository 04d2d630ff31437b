"""The names of the token caches of a checkpoint, whose tokens a run goes on with. A plan needs no more than these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEY = "resume_with_saved_tokens"


@dataclass(frozen=True, kw_only=True)
class SavedTokens:
    """Names the token caches of a checkpoint.

    caches: of each of `datasets`. hash: those of 0.1.0 and 0.2.0 have no names, but a hash of them (`caches_hash`).
    remedy: what to do if a cache is gone.
    """

    checkpoint: str
    remedy: str
    caches: Sequence[str] = ()
    hash: str = ""
