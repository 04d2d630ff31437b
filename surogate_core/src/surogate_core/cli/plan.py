"""`surogate plan`: what a run will hold and cost, from the model's config.json alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import run
from ..idle_kernels import idle_kernels, idle_modules
from ..knobs import cheapest_knobs
from ..local_device import local_device
from ..memory.devices import GIB
from ..prepare import Prepared
from ..program.show import listing as program_listing
from ..registry import REFERENCE
from ..summary import devices_text, parameters_text
from .render import output_width, paint, paragraph


def plan_command(config: Path, overrides: list[str], device: str | None, as_json: bool, listing: bool) -> int:
    """Print the plan: as text, with the op lists too if `listing`, or as JSON. Returns 0 also when it does not fit."""
    loaded = run.load(config, overrides)
    here = None if device else local_device()
    prepared = run.plan(loaded, here or device)
    chosen = here.chosen if here else f"--device {device}"
    problem = here.idle or _idle(prepared) if here else ""
    if as_json:
        print(json.dumps(to_json(prepared, chosen, problem), indent=2))
        return 0
    if problem:
        print(f"{paint('problem:', 'red')} {problem}")
    if listing:
        print(_passes(prepared))
        for program in prepared.assembly.programs.values():
            print(f"\n{program_listing(program)}")
        print()
    print("\n".join(_text(prepared, chosen)))
    return 0


def _idle(prepared: Prepared) -> str:
    idle = idle_modules(prepared)
    return idle_kernels(prepared.target.device, idle) if idle else ""


def to_json(prepared: Prepared, chosen: str, problem: str = "") -> dict[str, Any]:
    """The plan as data: the contract of `surogate plan --json`. chosen: why this device.

    problem: why a GPU that is here would not be trained on; empty where nothing is wrong.
    """
    report = prepared.report
    device = report.device
    return {
        "fits": report.fits,
        "device": {
            "name": device.name,
            "title": device.title,
            "bytes": device.memory_bytes,
            "count": report.world_size,
            "chosen": chosen,
            "problem": problem,
        },
        "device_bytes": dict(report.device_bytes),
        "host_bytes": dict(report.host_bytes),
        "step": {
            "seconds": report.step.seconds,
            "tokens": report.tokens,
            "tokens_per_second": report.tokens_per_second,
            "flops": report.step.flops,
            "bytes": report.step.bytes,
            "collective_seconds": report.step.comm_seconds,
            "waiting_seconds": report.step.waiting_seconds,
        },
        "kernels": dict(prepared.kernels),
        "notices": list(prepared.notices),
    }


def _text(prepared: Prepared, chosen: str) -> Iterator[str]:
    report, given = prepared.report, prepared.ingredients
    config = prepared.loaded.config
    parameters, trained = parameters_text(prepared.n_params), parameters_text(prepared.n_trainable)
    yield f"{config.model}: {given.model.name}, {parameters} parameters, {trained} trained"
    yield (
        f"recipe {config.recipe}, model {given.precision.model}, products {given.precision.matmul}, "
        f"optimizer {config.optimizer}" + "".join(f", adapter {adapter.name}" for adapter, _ in given.adapters)
    )
    yield (
        f"{given.batch_size} x {given.seq_len} tokens a micro-step, "
        f"{config.gradient_accumulation_steps} micro-step{'s' * (config.gradient_accumulation_steps > 1)} a step"
        + (f", on each of {report.world_size} GPUs" if report.world_size > 1 else "")
    )
    yield ""
    each = ", on each" if report.world_size > 1 else ""
    device = f"{devices_text(report)}, {_size(report.device.memory_bytes).strip()}{each}"
    yield paragraph(f"{device} ({chosen})", output_width() or 80)
    for name, nbytes in report.device_bytes.items():
        if name != "total":
            yield f"  {name:<14}{_size(nbytes)}"
    total = report.device_bytes["total"]
    room = report.device.memory_bytes - total
    verdict = paint("fits", "green") if report.fits else paint("does not fit", "red")
    rest = f"{_size(abs(room)).strip()} {'to spare' if report.fits else 'too much'}"
    yield f"  {'total':<14}{_size(total)}   {verdict}, {rest}"
    yield ""
    yield f"peak at {report.peak}; live there:"
    yield from _by_label(report.activations_by_label)
    yield ""
    yield "largest values"
    for value in report.largest[:5]:
        yield f"  {value.name:<34}{_size(value.nbytes)}   {value.dtype} {list(value.shape)}"
    yield ""
    step = report.step
    yield (
        f"a step: {report.tokens:,} tokens, {_flops(step.flops)}, {step.bytes / 1e9:,.1f} GB moved, "
        f"{_duration(step.seconds)}"
    )
    if step.comm_seconds:
        sent = sum(given.ops[op.kind].link(op) for p in prepared.assembly.programs.values() for op in p.ops)
        yield (
            f"gpus:   each sends {sent / 1e9:,.2f} GB of gradients in {_duration(step.comm_seconds)}, "
            f"{_duration(step.waiting_seconds)} not hidden"
        )
    yield f"speed:  {report.tokens_per_second:,.0f} tokens/s (roofline; rates: {report.device.source})"
    yield from _kernels(prepared)
    for notice in prepared.notices:
        yield paragraph(notice, output_width() or 80)
    if not report.fits:
        yield ""
        yield "cheapest ways to make room"
        for knob in cheapest_knobs(prepared):
            cost = f"{knob.costs / report.step.seconds:+.0%} time"
            yield f"  {knob.change}"
            yield f"      saves {_size(knob.saves).strip()}, {cost}{', enough alone' if knob.enough else ''}"


def _by_label(labels: Mapping[str, int], most: int = 8) -> Iterator[str]:
    rows = list(labels.items())
    for label, nbytes in rows[:most]:
        yield f"  {label:<14}{_size(nbytes)}"
    if len(rows) > most:
        yield f"  {'others':<14}{_size(sum(nbytes for _, nbytes in rows[most:]))}"


def _kernels(prepared: Prepared) -> Iterator[str]:
    by_provider: dict[str, list[str]] = {}
    for kind, provider in prepared.kernels.items():
        by_provider.setdefault(provider, []).append(kind)
    for provider, kinds in by_provider.items():
        if provider != REFERENCE:
            yield paragraph(f"kernels of {provider}: {', '.join(kinds)}", output_width() or 80)
        elif prepared.report.device.sm is None:
            yield f"kernels: all {len(kinds)} kinds of ops run as torch references on a CPU"
        else:
            told = f"no compiled kernel yet, so a GPU cannot run this: {', '.join(kinds)}"
            yield paragraph(told, output_width() or 80)


def _passes(prepared: Prepared) -> str:
    rows = [f"  {p.name:<16}{p.program:<14}{p.ops_before:>6} -> {p.ops_after}" for p in prepared.assembly.passes]
    return "\n".join(["passes, each verified:", *rows])


def _size(nbytes: int) -> str:
    """Right-aligned in a column of 13: GiB, or MiB below one."""
    return f"{nbytes / GIB:>9,.2f} GiB" if nbytes >= GIB else f"{nbytes / (GIB >> 10):>9,.2f} MiB"


def _flops(n: int) -> str:
    return f"{n / 1e12:,.1f} TFLOP" if n >= 1e12 else f"{n / 1e9:,.1f} GFLOP"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
