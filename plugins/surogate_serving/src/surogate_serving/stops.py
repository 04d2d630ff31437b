"""Check 3: what ends a trained answer ends a served one.

The token is forced by a bias, so that a model that would not write it is tested too.
"""

from __future__ import annotations

from collections.abc import Sequence

from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.chats import Chat
from surogate_core.api import Encoded

from .protocol import Server
from .result import Result


def trained_runs(encoded: Encoded) -> list[tuple[int, int]]:
    """Return (start, stop) of the runs of trained tokens."""
    flags = [False, *map(bool, encoded.trained), False]
    turns = [at for at in range(len(flags) - 1) if flags[at] != flags[at + 1]]
    return list(zip(turns[::2], turns[1::2], strict=True))


def trained_ends(chats: Sequence[Chat], tokenizer: RowTokenizer) -> dict[int, list[int]]:
    """Return {token that ends trained answers: the tokens in front of one}. White space may follow it."""
    found: dict[int, list[int]] = {}
    added = {*tokenizer.added_ids}
    for chat in chats:
        ids = list(chat.encoded.tokens)
        for start, stop in trained_runs(chat.encoded):
            while stop - 1 > start and ids[stop - 1] not in added and not tokenizer.decode([ids[stop - 1]]).strip():
                stop -= 1
            if stop > 1 and ids[stop - 1] in added:
                found.setdefault(ids[stop - 1], ids[: stop - 1])
    return found


def check_stops(server: Server, model: str, chats: Sequence[Chat], tokenizer: RowTokenizer) -> Result:
    """Have the server write each token that ends trained answers, and look whether it stops."""
    ends = trained_ends(chats, tokenizer)
    if not ends:
        return Result(
            "stops",
            False,
            "no trained answer ends with a special token",
            "missing end token",
            "Train with a chat template that ends answers with one: generation would not end.",
            numbers={"ends": []},
        )
    on = [end for end, before in ends.items() if not server.stops(model, before, end)]
    numbers = {"ends": [*ends], "goes_on_after": on}
    if not on:
        return Result("stops", True, f"the server stops at {_named([*ends], tokenizer)}", numbers=numbers)
    said = f"the server goes on after {_named(on, tokenizer)}, which ends trained answers"
    remedy = (
        f"Add {', '.join(map(str, on))} to eos_token_id of generation_config.json in the folder that is served; the "
        f"output's has it. {server.words.ends}"
    )
    return Result("stops", False, said, "missing end token", remedy, numbers=numbers)


def _named(ids: Sequence[int], tokenizer: RowTokenizer) -> str:
    return ", ".join(f"{tokenizer.decode([token])} ({token})" for token in ids)
