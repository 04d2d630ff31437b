"""States of a weight format that are loaded whole in the place of their staged weight, of which ranks keep parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import ProgramError
from ..memory.alignment import align
from ..program.value import Value
from .arena import view_of


def wholes_in(memory: Tensor, states: Sequence[Value], held: Callable[[Value], Tensor]) -> Iterator[Tensor]:
    """Yield a view of each state: in `memory`, one after another, of those that ranks divide, `held` of others.

    Raises ProgramError if they do not fit.
    """
    at = 0
    for state in states:
        if state.shard is None:
            yield held(state)
            continue
        whole = replace(state, shape=state.shard.shape, shard=None)
        if at + whole.nbytes > memory.numel():
            raise ProgramError(f"{whole!r} has more bytes than its weight, in whose place it is loaded")
        yield view_of(memory, at, whole)
        at += align(whole.nbytes)


def copy_part(part: Tensor, whole: Tensor, rank: int) -> None:
    """Copy the part of a rank from a whole state. Zeros follow its end."""
    own = part.view(-1).view(torch.uint8)
    given = whole.view(-1).view(torch.uint8)[rank * own.numel() :][: own.numel()]
    own[: given.numel()].copy_(given)
    own[given.numel() :].zero_()
