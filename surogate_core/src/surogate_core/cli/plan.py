"""`surogate plan`: what a run will hold and cost, from the model's config.json alone."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import run
from ..config.keys import ADAPTER_FLAG
from ..config.load import LoadedConfig, Mode
from ..errors import SurogateError
from ..machine.local_device import local_device
from ..memory.devices import GIB
from ..planning.missing_kernels import idle_kernels, idle_modules
from ..planning.plan import Plan
from ..planning.resolve import KernelTable
from ..planning.run import Run
from ..planning.suggestions import suggest
from ..plugins.registry import REFERENCE
from ..program.show import listing as program_listing
from ..reporting.text import devices_text, parameters_text
from .render import output_width, paint, paragraph


def plan_command(
    config: Path, overrides: list[str], device: str | None, as_json: bool, listing: bool, mode: Mode = "train"
) -> int:
    """Print the plan of what the verb `mode` does: as text, with the op lists too if `listing`, or as JSON.

    Returns 0 also when it does not fit.
    """
    with _without_collections():
        return _plan(config, overrides, device, as_json, listing, mode)


@contextmanager
def _without_collections() -> Iterator[None]:
    """A plan is a million objects, nearly all of which stay: looking for garbage is a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _plan(config: Path, overrides: list[str], device: str | None, as_json: bool, listing: bool, mode: Mode) -> int:
    loaded = run.load(config, overrides, mode)
    here = None if device else local_device()
    opened = run.open_run(loaded)
    plan = run.plan(opened, here or device)
    chosen = here.chosen if here else f"--device {device}"
    problem = here.idle or _idle(plan) if here else ""
    if as_json:
        print(json.dumps(to_json(plan, loaded.mode, chosen, problem), indent=2))
        return 0
    if problem:
        print(f"{paint('problem:', 'red')} {problem}")
    if listing:
        print(_passes(plan))
        for program in plan.assembly.programs.values():
            print(f"\n{program_listing(program)}")
        print()
    print("\n".join(_text(opened, plan, chosen, _defaults(loaded, config, overrides))))
    return 0


def _defaults(loaded: LoadedConfig, config: Path, overrides: list[str]) -> str:
    """Whose defaults are planned, where `surogate sft` would train something else; else ""."""
    other: Mode = "train" if loaded.mode == "sft" else "sft"
    try:
        differs = run.load(config, overrides, other).config != loaded.config
    except SurogateError:  # the config is for one of the verbs alone
        return ""
    if not differs:
        return ""
    if loaded.mode == "sft":
        return f"defaults of surogate sft: {ADAPTER_FLAG.title} (--pt: those of surogate pt, all weights)"
    return f"defaults of surogate {loaded.mode}: all weights (--sft: those of surogate sft, {ADAPTER_FLAG.title})"


def _idle(plan: Plan) -> str:
    idle = idle_modules(plan.kernels)
    return idle_kernels(plan.target.device, idle) if idle else ""


def to_json(plan: Plan, mode: Mode, chosen: str, problem: str = "") -> dict[str, Any]:
    """The plan as data: the contract of `surogate plan --json`. chosen: why this device.

    problem: why a GPU that is here would not be trained on; empty where nothing is wrong.
    """
    report = plan.report
    device = report.device
    return {
        "fits": report.fits,
        "defaults": mode,
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
        "kernels": dict(plan.kernels.providers),
        "refusals": {kind: list(reasons) for kind, reasons in plan.kernels.refusals.items()},
        "notices": list(plan.kernels.notices),
    }


def _text(opened: Run, plan: Plan, chosen: str, defaults: str) -> Iterator[str]:
    report, given, config = plan.report, plan.inputs, opened.config
    parameters, trained = parameters_text(plan.n_params), parameters_text(plan.n_trainable)
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
    if defaults:
        yield defaults
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
    for same in report.largest[:5]:
        name = same.name if same.count == 1 else f"{same.name}, each of {same.count}"
        yield f"  {name:<40}{_size(same.nbytes)}   {same.dtype} {list(same.shape)}"
    yield ""
    step = report.step
    yield (
        f"a step: {report.tokens:,} tokens, {_flops(step.flops)}, {step.bytes / 1e9:,.1f} GB moved, "
        f"{_duration(step.seconds)}"
    )
    if step.comm_seconds:
        sent = sum(given.ops[op.kind].link(op) for p in plan.assembly.programs.values() for op in p.ops)
        yield (
            f"gpus:   each sends {sent / 1e9:,.2f} GB of gradients in {_duration(step.comm_seconds)}, "
            f"{_duration(step.waiting_seconds)} not hidden"
        )
    yield f"speed:  {report.tokens_per_second:,.0f} tokens/s (roofline; rates: {report.device.source})"
    yield from _kernels(plan.kernels, config.kernels)
    for notice in plan.kernels.notices:
        yield paragraph(notice, output_width() or 80)
    if not report.fits:
        yield ""
        yield from _suggestions(opened, plan)


def _suggestions(opened: Run, plan: Plan) -> Iterator[str]:
    suggestions = suggest(opened, plan)
    if suggestions:
        yield "cheapest ways to make room"
    for suggestion in suggestions:
        cost = f"{suggestion.costs / plan.report.step.seconds:+.0%} time"
        enough = "enough alone" if len(suggestion.changes) == 1 else "enough together"
        missing = f"still {_size(suggestion.missing).strip()} too much"
        yield from (f"  {change}" for change in suggestion.changes)
        yield f"      saves {_size(suggestion.saves).strip()}, {cost}, {missing if suggestion.missing else enough}"
    if all(suggestion.missing for suggestion in suggestions):
        yield "Nothing makes it fit: use a smaller model, or a GPU with more memory."


def _by_label(labels: Mapping[str, int], most: int = 8) -> Iterator[str]:
    rows = list(labels.items())
    for label, nbytes in rows[:most]:
        yield f"  {label:<14}{_size(nbytes)}"
    if len(rows) > most:
        yield f"  {'others':<14}{_size(sum(nbytes for _, nbytes in rows[most:]))}"


def _kernels(kernels: KernelTable, allowed: str) -> Iterator[str]:
    by_provider: dict[str, list[str]] = {}
    for kind, provider in kernels.providers.items():
        by_provider.setdefault(provider, []).append(kind)
    for provider, kinds in by_provider.items():
        if provider != REFERENCE:
            yield paragraph(f"kernels of {provider}: {', '.join(kinds)}", output_width() or 80)
        elif kernels.target is None or kernels.target.device.sm is None:
            yield f"kernels: all {len(kinds)} kinds of ops run as torch references on a CPU"
        else:
            yield from _without_kernel(kernels, kinds, allowed)


def _without_kernel(kernels: KernelTable, kinds: list[str], allowed: str) -> Iterator[str]:
    """Ops that a GPU runs by plain torch, or not at all, under the reasons that the kernels give."""
    width = output_width() or 80
    if allowed == "allow_reference":
        yield "without a compiled kernel; run by plain torch, slowly (kernels: allow_reference)"
    else:
        yield "without a compiled kernel, so this GPU cannot run it"
    by_reasons: dict[tuple[str, ...], list[str]] = {}
    for kind in kinds:
        by_reasons.setdefault(
            kernels.refusals.get(kind, ()) or ("no installed package has a kernel for it",), []
        ).append(kind)
    for reasons, alike in by_reasons.items():
        more = f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        yield _indented(paragraph(f"{', '.join(alike)}: {'; '.join(reasons[:2])}{more}", width - 2))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _passes(plan: Plan) -> str:
    rows = [f"  {p.name:<16}{p.program:<14}{p.ops_before:>6} -> {p.ops_after}" for p in plan.assembly.passes]
    return "\n".join(["passes, each verified:", *rows])


def _size(nbytes: int) -> str:
    """Right-aligned in a column of 13: GiB, or MiB below one."""
    return f"{nbytes / GIB:>9,.2f} GiB" if nbytes >= GIB else f"{nbytes / (GIB >> 10):>9,.2f} MiB"


def _flops(n: int) -> str:
    return f"{n / 1e12:,.1f} TFLOP" if n >= 1e12 else f"{n / 1e9:,.1f} GFLOP"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
