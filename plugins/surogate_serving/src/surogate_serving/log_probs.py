"""Check 2: the server's log probabilities of trained tokens are those of the model that was written.

The bound is measured: it is a multiple of the distance to the same model with random errors in its weights, of the size
that the dtype and the format of the server bring. So it fits the model and its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt

from surogate.data.chats import Chat

from .picture import drawn
from .protocol import Server
from .reference import Reference, kl
from .result import Result
from .rounding import FACTOR, FLOOR, FORMATS, NAMES, Errors

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
    """Log probabilities of a server.

    asked     the positions of which it has given some
    of_tokens of each position, of its token
    listed    of each position, of its token and the likeliest ones
    left_out  number of positions of which it has given none
    """

    asked: list[tuple[Chat, list[int], list[int]]]
    of_tokens: list[float]
    listed: list[Mapping[int, float]]
    left_out: int


def ask(server: Server, model: str, asked: Asked, progress: Progress) -> Served:
    """Ask a server for log probabilities of all conversations."""
    given: list[tuple[Chat, list[int], list[int]]] = []
    listed: list[Mapping[int, float]] = []
    for done, (chat, ids, wanted) in enumerate(asked):
        progress(done)
        found = server.log_probs(model, ids, wanted)
        if at := [position for position in wanted if position in found]:
            given.append((chat, ids, at))
            listed.extend(found[position] for position in at)
    own = (ids[at] for _, ids, wanted in given for at in wanted)
    of_tokens = [row[token] for row, token in zip(listed, own, strict=True)]
    return Served(given, of_tokens, listed, sum(len(wanted) for _, _, wanted in asked) - len(listed))


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


def compute(reference: Reference, served: Served, least: float, progress: Progress) -> Compared:
    """Compute the log probabilities that were asked for. least: the smallest one that the server can give."""
    ours: list[float] = []
    divergences: list[float] = []
    same = 0
    for done, (_, ids, wanted) in enumerate(served.asked):
        progress(done)
        rows = reference.log_probs(ids, wanted)
        for row, at in zip(rows, wanted, strict=True):
            listed = served.listed[len(ours)]
            ours.append(max(least, float(row[ids[at]])))
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
    server: Server,
    served: Served,
    reference: Reference,
    errors: Errors,
    of_base: Served | None,
    progress: Progress,
) -> Result:
    """Compare log probabilities. The reference is changed.

    errors: of the format. of_base: log probabilities of the base that the server has beside an
    adapter.
    """
    asked, lacks = served.asked, f"{served.left_out} tokens were not compared"
    if not asked:
        return Result("log_probs", None, f"{lacks}: {server.program} gives no log probability of any")
    compared = compute(reference, served, server.least, progress)
    ours, theirs = compared.of_tokens, served.of_tokens
    distance, loss, loss_served = rms(ours, theirs), *(-sum(values) / len(values) for values in (ours, theirs))
    reference.disturb(errors, server.own_error)
    bound = FACTOR * rms(ours, _all(reference, asked)) + FLOOR
    gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    largest = max(range(len(gaps)), key=lambda at: gaps[at] if isfinite(gaps[at]) else inf)
    numbers = {
        "tokens": len(ours),
        "not_compared": served.left_out,
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
    if served.left_out:
        said += f"; {lacks}: {server.program} gives no log probability of those that {server.left_out}"
    picture = drawn(gaps, bound)
    if distance <= bound:
        return Result("log_probs", True, said, picture=picture, numbers=numbers)
    if of_base is not None and rms(of_base.of_tokens, theirs) <= bound:
        fault = "the adapter is not applied"
        remedy = f"The server answers with its base. {server.words.adapter.format(name='NAME')}"
    elif rounded := _rounding(server, reference, asked, theirs, distance):
        fault, remedy = rounded
    else:
        fault = "other weights" if of_base is None else "another adapter, or another base"
        remedy = (
            "Serve the folder that the run, `surogate merge` or `surogate export` has written, and none that was "
            "changed since. If it is served in a format such as fp8-channel or gguf:q8_0, name that with --format."
        )
    where = _where(asked, largest)
    return Result("log_probs", False, said, fault, remedy, where, picture, numbers)


def _rounding(
    server: Server, reference: Reference, asked: Asked, theirs: Sequence[float], distance: float
) -> tuple[str, str] | None:
    """Return the fault and the remedy if the server's weights are those of the model, in another format or dtype.

    A dtype is guessed only of a server that does not say what it has: another fault of that size can look like it.
    """
    said = server.form()
    if said is not None and said in FORMATS:
        if not _has_form(server, said, reference, asked, theirs):
            return None
        remedy = f"Serve a file of the output's dtype, or accept the rounding with --format {said} here."
        return f"rounded to {said}, as the server says", remedy
    for dtype, short in NAMES.items():
        if dtype != reference.dtype and _rounds_to(dtype, reference, asked, theirs, distance):
            kept = server.words.dtype.format(dtype=reference.dtype)
            return f"rounded to {dtype}", f"{kept}, or accept the rounding with --format {short} here."
    return None


def _has_form(server: Server, form: str, reference: Reference, asked: Asked, theirs: Sequence[float]) -> bool:
    """Return whether a server is within the bound of a format."""
    right = reference.in_dtype(reference.dtype)
    ours = _all(right, asked)
    right.disturb(FORMATS[form], server.own_error)
    return rms(ours, theirs) <= FACTOR * rms(ours, _all(right, asked)) + FLOOR


def _rounds_to(dtype: str, reference: Reference, asked: Asked, theirs: Sequence[float], distance: float) -> bool:
    """Return whether a server computes in another dtype.

    It is then within the bound of that dtype, and nearer to it than to the dtype of the files, because both round the
    same weights. A fault of the same size is not nearer.
    """
    other = reference.in_dtype(dtype)
    ours = _all(other, asked)
    other.disturb(Errors(), 0.0)
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
