"""The report of a run that stands still: which rank has not come, what the others wait for, and where it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..api.members import numbers
from .heartbeat import Heartbeat, Peer, RankAt

_MOST_HOSTS = 3
"""Ranks of which the report tells where they are."""


def stall_report(peers: Mapping[int, Peer], stall_seconds: float) -> str:
    """Return the report on processes that have all stood still for longer than their sections allow."""
    beats = {process: peer.beat for process, peer in peers.items() if peer.beat is not None}
    late, reason = _late_ranks(beats) or _late_processes(beats)
    seconds = min(peer.idle for peer in peers.values())
    beat = beats[late]
    remedy = f" If nothing is wrong, raise stall_seconds ({stall_seconds:g})." if beat.limit == stall_seconds else ""
    where, checkpoint = _place(beat, beats), last_checkpoint(beats)
    return f"{where}: {reason} since {seconds:.0f} s.{_state(beat)} {checkpoint} Stopping.{remedy}"


def last_checkpoint(beats: Mapping[int, Heartbeat]) -> str:
    saved = next((beat.checkpoint for beat in beats.values() if beat.checkpoint), "")
    return f"Last complete checkpoint: {saved}." if saved else "No checkpoint is known to be complete."


def described(process: int, beat: Heartbeat) -> str:
    """Return "process 1 (ranks 2, 3, pid 17 on host)"."""
    ranks = f"{numbered('rank', [rank.rank for rank in beat.ranks])}, " if beat.ranks else ""
    return f"process {process} ({ranks}pid {beat.pid} on {beat.host})"


def numbered(word: str, ints: Sequence[int]) -> str:
    """Return "rank 5" or "ranks 0-3, 7"."""
    plural = "es" if word.endswith("s") else "s"
    return f"{word}{plural if len(ints) > 1 else ''} {numbers(ints)}"


def _late_ranks(beats: Mapping[int, Heartbeat]) -> tuple[int, str] | None:
    """Return the process of a late rank, and what the late ranks do, if some ranks wait in a collective."""
    ranks = [(process, rank) for process, beat in beats.items() for rank in beat.ranks]
    inside = [rank for _, rank in ranks if rank.inside]
    if not inside:
        return None
    late = [(process, rank) for process, rank in ranks if not rank.inside]
    name = inside[0].name
    if not late:
        differ = {rank.name: rank for _, rank in ranks}
        if len(differ) == 1:
            return ranks[0][0], f"all ranks are in {name}, which does not end: look at what connects them,"
        return ranks[0][0], "; ".join(f"rank {rank.rank} is in {name}" for name, rank in differ.items())
    process, rank = late[0]
    where = f"{beats[process].host}, device {rank.device}"
    who = f"rank {rank.rank} ({where})" if len(late) == 1 else numbered("rank", [rank.rank for _, rank in late])
    has = "has" if len(late) == 1 else "have"
    wait = numbered("rank", [rank.rank for rank in inside])
    waiting = f"{wait} {'wait' if len(inside) > 1 else 'waits'} for it"
    return process, f"{who} {has} not entered {name}; {waiting}"


def _late_processes(beats: Mapping[int, Heartbeat]) -> tuple[int, str]:
    """Return a process that the others wait for, and what for."""
    waiting = [process for process, beat in beats.items() if beat.waits]
    late = [process for process in beats if process not in waiting]
    if not late or not waiting:
        places = "; ".join(f"process {process}: {_place(beat, {})}" for process, beat in beats.items())
        return (late or waiting)[0], f"no process has come further ({places})"
    who = described(late[0], beats[late[0]]) if len(late) == 1 else numbered("process", late)
    wait = f"process {waiting[0]} waits" if len(waiting) == 1 else f"{numbered('process', waiting)} wait"
    has = "has" if len(late) == 1 else "have"
    return late[0], f"{who} {has} not reached {beats[waiting[0]].waits}; {wait} for it"


def _place(beat: Heartbeat, beats: Mapping[int, Heartbeat]) -> str:
    """Return the step and the micro-step: of ranks that wait in a collective, else that of the process itself."""
    waiting = [rank.micro_step for other in beats.values() for rank in other.ranks if rank.micro_step and rank.inside]
    micro_step = waiting or [rank.micro_step for rank in beat.ranks if rank.micro_step]
    return f"{beat.at}, micro-step {micro_step[0]}" if micro_step and beat.at.startswith("step ") else beat.at


def _state(beat: Heartbeat) -> str:
    """Return where the late ranks of a process are: " Rank 5: in load (loader.py:12)."."""
    if beat.fate in ("gone", "stopped"):
        return f" Its process is {beat.fate}."
    late: list[RankAt] = [rank for rank in beat.ranks if rank.host and not rank.inside]
    return "".join(f" Rank {rank.rank}: in {rank.host}." for rank in late[:_MOST_HOSTS])
