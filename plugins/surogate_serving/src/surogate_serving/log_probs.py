"""Check 2: the server's log probabilities of trained tokens are those of the model that was written.

The bound is measured: it is a multiple of the distance to the same model with random errors in its weights, of the size
that the dtype and the format of the server bring. So it fits the model and its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt

from surogate.data.chats import Chat

from .protocol import Server
from .reference import Reference, kl
from .result import Result
from .rounding import FACTOR, FLOOR, NAMES

Progress = Callable[[int], None]
Asked = Sequence[tuple[Chat, list[int], list[int]]]
"""Conversations, their tokens, and the positions of trained tokens."""


def asked_of(chats: Sequence[Chat]) -> Asked:
    """Return the tokens that are compared."""
    found = []
    for chat in chats:
        ids = list(chat.encoded.tokens)
        if wanted := [at for at in range(1, len(ids)) if chat.encoded.trained[at]]:
            found.append((chat, ids, wanted))
    return found


@dataclass(frozen=True)
class Served:
    """Log probabilities of a server. listed: of each position, of its token and the likeliest ones."""

    of_tokens: list[float]
    listed: list[Mapping[int, float]]


def ask(server: Server, model: str, asked: Asked, progress: Progress) -> Served:
    """Ask a server for log probabilities of all conversations."""
    served = Served([], [])
    for done, (_, ids, wanted) in enumerate(asked):
        progress(done)
        found = server.log_probs(model, ids, wanted)
        served.of_tokens.extend(found[at][ids[at]] for at in wanted)
        served.listed.extend(found[at] for at in wanted)
    return served


@dataclass(frozen=True)
class Compared:
    """The model in process.

    of_tokens  log probabilities of trained tokens
    kl         mean KL of the server from it; None if the server lists no others than the tokens
    same_best  share of positions at which both hold the same token for the likeliest; None likewise
    """

    of_tokens: list[float]
    kl: float | None
    same_best: float | None


def compute(reference: Reference, asked: Asked, served: Served, progress: Progress) -> Compared:
    """Compute the log probabilities that were asked for."""
    ours: list[float] = []
    divergences: list[float] = []
    same = 0
    for done, (_, ids, wanted) in enumerate(asked):
        progress(done)
        rows = reference.log_probs(ids, wanted)
        for row, at in zip(rows, wanted, strict=True):
            listed = served.listed[len(ours)]
            ours.append(float(row[ids[at]]))
            if len(listed) > 1:
                divergences.append(kl(row, listed))
                same += max(listed, key=listed.__getitem__) == int(row.argmax())
    if not divergences:
        return Compared(ours, None, None)
    return Compared(ours, sum(divergences) / len(divergences), same / len(divergences))


def rms(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rms of the differences; inf if one is not finite."""
    squares = [(a - b) ** 2 for a, b in zip(one, other, strict=True)]
    total = sum(squares)
    return sqrt(total / len(squares)) if isfinite(total) else inf


def check_log_probs(
    asked: Asked,
    served: Served,
    reference: Reference,
    error: float,
    of_base: Served | None,
    progress: Progress,
) -> Result:
    """Compare log probabilities. The reference is changed.

    error: of the format, relative to weights. of_base: log probabilities of the base that the server has beside an
    adapter.
    """
    compared = compute(reference, asked, served, progress)
    ours, theirs = compared.of_tokens, served.of_tokens
    distance, loss, loss_served = rms(ours, theirs), *(-sum(values) / len(values) for values in (ours, theirs))
    reference.disturb(error)
    noise = rms(ours, _all(reference, asked))
    bound = FACTOR * noise + FLOOR
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    largest = max(range(len(gaps)), key=lambda at: gaps[at] if isfinite(gaps[at]) else inf)
    numbers = {
        "tokens": len(ours),
        "dtype": reference.dtype,
        "rms": distance,
        "bound": bound,
        "largest": gaps[largest],
        "loss_trained": loss,
        "loss_served": loss_served,
        "kl": compared.kl,
        "same_best": compared.same_best,
    }
    said = (
        f"{len(ours):,} trained tokens: rms difference {distance:.1e} (bound {bound:.1e}), largest "
        f"{gaps[largest]:.1e}; loss {loss:.5f} as trained, {loss_served:.5f} as served"
    )
    if compared.kl is not None:
        said += f"; KL {compared.kl:.1e}, {compared.same_best:.1%} with the same likeliest token"
    if distance <= bound:
        return Result("log_probs", True, said, numbers=numbers)
    failed = partial(Result, "log_probs", False, said, shown=_where(asked, largest), numbers=numbers)
    if of_base is not None and rms(of_base.of_tokens, theirs) <= bound:
        return failed(
            fault="the adapter is not applied",
            remedy="The server answers with its base. Start vLLM with --enable-lora and the adapter's folder.",
        )
    for dtype, short in NAMES.items():
        if dtype != reference.dtype and _rounds_to(dtype, reference, asked, theirs, distance):
            remedy = (
                f"Start the server with --dtype {reference.dtype}, or accept the rounding with --format {short} here."
            )
            return failed(fault=f"rounded to {dtype}", remedy=remedy)
    remedy = (
        "Serve the folder that the run, `surogate merge` or `surogate export` has written, and none that was changed "
        "since. If it is served in a format such as fp8-channel, name that with --format."
    )
    return failed(fault="other weights" if of_base is None else "another adapter, or another base", remedy=remedy)


def _rounds_to(dtype: str, reference: Reference, asked: Asked, theirs: Sequence[float], distance: float) -> bool:
    """Return whether a server computes in another dtype.

    It is then within the bound of that dtype, and nearer to it than to the dtype of the files, because both round the
    same weights. A fault of the same size is not nearer.
    """
    other = reference.in_dtype(dtype)
    ours = _all(other, asked)
    other.disturb(0.0)
    return rms(ours, theirs) <= min(0.9 * distance, FACTOR * rms(ours, _all(other, asked)))


def _all(reference: Reference, asked: Asked) -> list[float]:
    return [value for _, ids, wanted in asked for value in reference.of_tokens(ids, wanted)]


def _where(asked: Asked, index: int) -> tuple[str, ...]:
    """Return the place of a compared token, counted over all conversations."""
    for chat, _, wanted in asked:
        if index < len(wanted):
            return (f"the largest difference is at token {wanted[index]} of {chat.where}",)
        index -= len(wanted)
    return ()
