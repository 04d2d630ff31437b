"""Check 4: an adapter that a server has by name changes what its base computes.

Check 2 compares the adapter with the merged model. This one says whether the server applies it at all.
"""

from __future__ import annotations

from typing import Final

from .log_probs import Served, rms
from .protocol import Words
from .result import Result

_REPEATED: Final = 1e-5
"""Log probabilities of one model that are asked for twice may be off by this."""


def check_adapter(words: Words, adapter: str, base: str, served: Served, of_base: Served) -> Result:
    """Compare what a server computes with an adapter and without it."""
    distance = rms(served.of_tokens, of_base.of_tokens)
    gain = (sum(served.of_tokens) - sum(of_base.of_tokens)) / len(served.of_tokens)
    numbers = {"base": base, "rms": distance, "loss_below_base": gain}
    said = f"{adapter} is {distance:.1e} (rms) from {base} as served; its loss is {gain:.5f} lower"
    if distance > _REPEATED:
        return Result("adapter", True, said, numbers=numbers)
    said = f"{adapter} and {base} have the same log probabilities"
    remedy = f"The server answers {adapter} with its base. {words.adapter.format(name=adapter)}"
    return Result("adapter", False, said, "the adapter is not applied", remedy, numbers=numbers)
