"""The profile as text: a table by kind of op, and one of the ops that take longest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from surogate_core.program.op import Op
from surogate_core.program.value import Value

from .step_profile import Group, StepProfile

WIDTH = 92
"""Columns of every line but those of the model, the recipe and the device, which may be longer."""

_COLUMN = 8
_FIRST = WIDTH - 8 * _COLUMN


def lines(profile: StepProfile, top: int) -> Iterator[str]:
    """The profile's lines, with the `top` groups of ops that take longest."""
    (bytes_unit, _), (flops_unit, _) = _units(profile)
    headings = ("calls", "ms", "share", bytes_unit, flops_unit, "bandw.", "peak", "plan ms")
    yield from _heading(profile)
    yield ""
    yield _row("kind of op", headings)
    for group in profile.by_kind():
        yield _row(group.kind, _cells(group, profile))
    yield _row("all ops", _cells(profile.total, profile))
    yield _row("between ops", ("", _ms(profile.gaps), _percent(profile.gaps, profile.seconds)))
    yield _row("step", ("", _ms(profile.seconds), "", "", "", "", "", _ms(profile.planned_seconds)))
    groups = profile.alike()[:top]
    if groups:
        yield ""
        yield _row("longest ops", headings)
    for group in groups:
        yield _row(f"{group.kind}{_blocks(group)}", _cells(group, profile))
        yield _cut(f"    {group.ops[0].op.phase}: {_signature(group.ops[0].op)}")
    yield ""
    yield "bandw., peak: shares of the device table's rates. plan ms: the plan's estimate."
    yield "Work is counted for documents of full length, and for a label on every token."
    if profile.device.sm is None:
        yield "On a CPU the device table is a rule of thumb: shares may pass 100%."


def _heading(profile: StepProfile) -> Iterator[str]:
    device = profile.device
    yield f"model     {profile.model}"
    yield f"recipe    {profile.recipe}"
    yield f"device    {device.title} (rates: {device.source})"
    yield f"weights   {profile.weights}"
    yield f"tokens    {profile.batches}"
    events = f"; an event takes {1e6 * profile.event_seconds:.2f} us, subtracted" if profile.event_seconds else ""
    yield f"timing    {profile.method}{events}"
    count = len(profile.steps)
    spread = f", from {_ms(min(profile.steps))} to {_ms(max(profile.steps))}" if count > 1 else ""
    rate = f"{profile.tokens / profile.seconds:,.0f} tokens/s"
    yield f"step      {_ms(profile.seconds)} ms, mean of {count}{spread}; {rate}"
    programs = (f"{group.ops[0].program} {_ms(group.seconds)}" for group in profile.by_program())
    yield _cut(f"programs  {', '.join(programs)} ms")


def _row(first: str, cells: Sequence[str]) -> str:
    name = first if len(first) < _FIRST else f"{first[: _FIRST - 2]}\u2026"
    return (f"{name:<{_FIRST}}" + "".join(f"{cell:>{_COLUMN}}" for cell in cells)).rstrip()


def _units(profile: StepProfile) -> tuple[tuple[str, float], tuple[str, float]]:
    """(unit, its size) of bytes and of FLOPs: the same for all rows of a profile."""
    total = profile.total
    return ("GB", 1e9) if total.bytes >= 10e9 else ("MB", 1e6), (
        ("TFLOP", 1e12) if total.flops >= 10e12 else ("GFLOP", 1e9)
    )


def _cells(group: Group, profile: StepProfile) -> list[str]:
    (_, nbytes), (_, flops) = _units(profile)
    return [
        f"{group.calls:.0f}" if group.calls == int(group.calls) else f"{group.calls:.1f}",
        _ms(group.seconds),
        _percent(group.seconds, profile.seconds),
        _figure(group.bytes / nbytes),
        _figure(group.flops / flops),
        f"{group.bandwidth_share:.0%}",
        f"{group.peak_share:.0%}",
        _ms(group.planned_seconds),
    ]


def _blocks(group: Group) -> str:
    """The first and the last block that the ops belong to."""
    blocks = sorted({timed.op.block for timed in group.ops if timed.op.block >= 0})
    if not blocks:
        return ""
    return f" b{blocks[0]}" + (f"-{blocks[-1]}" if len(blocks) > 1 else "")


def _signature(op: Op) -> str:
    """The first output and the first two inputs; an ellipsis stands for the others."""
    outs = " ".join(map(_value, op.outs[:1])) + (" .." if len(op.outs) > 1 else "")
    ins = " ".join(map(_value, op.ins[:2])) + (" .." if len(op.ins) > 2 else "")
    return f"{outs} {'+=' if op.accumulate else '='} {ins}"


def _value(value: Value) -> str:
    """The label of an activation, or the end of the name of another value; then dtype and shape."""
    parts = [part for part in value.name.split(".") if not part.isdigit()]
    name = value.label if value.role == "act" else ".".join(parts[-2:])
    return f"{name}:{value.dtype}[{','.join(map(str, value.shape))}]"


def _ms(seconds: float) -> str:
    return _figure(1000 * seconds)


def _figure(value: float) -> str:
    """Return three digits or more."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole > 0 else ""


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}\u2026"
