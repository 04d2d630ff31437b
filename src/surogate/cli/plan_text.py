"""The plan of a run as text, at most 80 columns wide unless the terminal is wider."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from surogate_core.api.members import numbers
from surogate_core.assembly.resolve import KernelTable
from surogate_core.machine.devices import GIB
from surogate_core.planning.plan import Plan
from surogate_core.planning.report import Report, SameValues, largest_values, memory_is_the_hosts
from surogate_core.plugins.registry import REFERENCE

from ..config.schema import TrainConfig
from ..fitting.proposals import faster_settings, suggest
from ..reporting.text import counted, devices_text, parameters_text
from ..runs.disk import disk_use
from ..runs.published_form import reading_line
from ..runs.run import Run
from ..training.cadence import steps_of
from .render import output_width, paint, paragraph
from .unquantized import unquantized_blocks, unquantized_matrices

_LARGEST = 5
"""Number of the largest values that are shown."""

_LEAST_SHARE = 0.05
"""Share of a run that evaluations take before it is shown."""


def plan_text(run: Run, plan: Plan, chosen: str, defaults: str) -> Iterator[str]:
    """Yield the lines of a plan.

    chosen    why the run is planned for this device
    defaults  whose defaults the run takes, or "" if another command would train the same
    """
    yield from _run(run, plan)
    if defaults:
        yield defaults
    yield ""
    limit = ", by device_memory_limit" if run.config.device_memory_limit else ""
    yield from _memory(plan, f"{chosen}{limit}")
    yield ""
    yield from _speed(plan, run.config)
    yield from _disk(run, plan)
    yield from _kernels(plan.kernels, run.config.allows_references)
    for notice in (*plan.overridden, *plan.kernels.notices):
        yield _wrapped(notice)
    if not plan.report.fits:
        yield ""
        yield from _suggestions(run, plan)
    elif faster := faster_settings(run, plan):
        after = faster.plan.report
        yield _wrapped(
            f"faster, and fits: {', '.join(faster.lines)}: {after.tokens_per_second:,.0f} tokens/s, "
            f"{_size(after.device_bytes['total']).strip()}"
        )


def _run(run: Run, plan: Plan) -> Iterator[str]:
    inputs, config, report = plan.inputs, run.config, plan.report
    parameters, trained = parameters_text(plan.assembly.n_params), parameters_text(plan.assembly.n_trainable)
    yield f"{config.model}: {inputs.model.name}, {parameters} parameters, {trained} trained"
    yield (
        f"recipe {config.recipe}, model {inputs.precision.model}, products {inputs.precision.matmul}, "
        f"optimizer {config.optimizer}" + "".join(f", adapter {adapter.name}" for adapter, _ in inputs.adapters)
    )
    if plain := unquantized_blocks(plan):
        yield f"products of block{'s' * (len(plain) > 1)} {numbers(plain, ' to ')} in {inputs.precision.model}"
    if wide := unquantized_matrices(plan):
        yield _wrapped(f"{', '.join(wide)} in {inputs.precision.model}, which {config.recipe} does not quantize")
    if run.form:
        yield _wrapped(reading_line(run.form, inputs.precision.model))
    if inputs.weight_format:
        yield f"frozen weights of blocks in {inputs.weight_format[0].name} ({inputs.weight_format[0].key})"
    steps = config.gradient_accumulation_steps
    yield (
        f"{inputs.batch_size} x {inputs.seq_len} tokens per micro-step, "
        f"{counted(steps, 'micro-step')} per step"
        + (f", on each of {report.world_size} {'GPUs' if report.ranks_per_device == 1 else 'ranks'}")
        * (report.world_size > 1)
    )
    if report.ranks_per_device > 1:
        yield f"{report.ranks_per_device} ranks share each device: they take turns, each with buffers of its own"


def _memory(plan: Plan, chosen: str) -> Iterator[str]:
    report = plan.report
    each = ", on each" if report.devices > 1 else ""
    devices = devices_text(report.device, report.devices, report.nodes)
    memory = _size(report.device.memory_bytes).strip()
    yield _wrapped(f"{devices}, {memory}{each} ({chosen})")
    for name, nbytes in report.device_bytes.items():
        if name != "total":
            yield f"  {name:<14}{_size(nbytes)}"
    total = report.device_bytes["total"]
    fits = report.missing_bytes <= 0
    verdict = paint("fits", "green") if fits else paint("does not fit", "red")
    rest = f"{_size(abs(report.missing_bytes)).strip()} {'to spare' if fits else 'too much'}"
    yield f"  {'total':<14}{_size(total)}   {verdict}, {rest}"
    on_host = {name: nbytes for name, nbytes in report.host_bytes.items() if name not in ("total", "batches")}
    for name, nbytes in on_host.items():
        pinned = "" if name in report.beside else "pinned "
        yield f"  {name:<14}{_size(nbytes)}   in {pinned}memory of {'each' if report.nodes > 1 else 'the'} host"
    if on_host:
        yield f"  {'host total':<14}{_size(_on_host(report))}   {_host_verdict(report)}"
    if plan.chosen:
        yield _wrapped(str(plan.chosen))
    if plan.tiles_line:
        yield plan.tiles_line
    if plan.decoded_line:
        yield plan.decoded_line
    yield ""
    yield f"activations at the peak ({report.peak})"
    yield from _by_label(report.activations_by_label)
    yield ""
    yield "largest values"
    for same in largest_values(plan.assembly)[:_LARGEST]:
        yield f"  {_names(same):<40}{_size(same.nbytes)}   {same.dtype} {list(same.shape)}"


def _on_host(report: Report) -> int:
    return report.pinned_bytes + sum(report.beside.values())


def _host_verdict(report: Report) -> str:
    if memory_is_the_hosts(report.device) and not report.missing_host_bytes:
        return "counted above"
    if report.host_memory is None:
        return "not checked: host_memory_limit sets what the host has"
    rest = _size(abs(report.host_memory - _on_host(report))).strip()
    if report.missing_host_bytes:
        return f"{paint('does not fit', 'red')}, {rest} more than the run may pin"
    return f"{paint('fits', 'green')}, {rest} to spare"


def _by_label(labels: Mapping[str, int], most: int = 8) -> Iterator[str]:
    rows = list(labels.items())
    for label, nbytes in rows[:most]:
        yield f"  {label:<14}{_size(nbytes)}"
    if len(rows) > most:
        yield f"  {'others':<14}{_size(sum(nbytes for _, nbytes in rows[most:]))}"


def _names(same: SameValues, columns: int = 40) -> str:
    """Return the number of values and as many of their names as fit."""
    text = f"{same.count} x " * (same.count > 1) + same.names[0]
    for name in same.names[1:]:
        if len(f"{text}, {name}, ...") > columns:
            return f"{text}, ..."
        text += f", {name}"
    return text


def _speed(plan: Plan, config: TrainConfig) -> Iterator[str]:
    report, step = plan.report, plan.report.step
    yield (
        f"step:   {report.tokens:,} tokens, {_flops(step.flops)}, {step.bytes / 1e9:,.1f} GB moved, "
        f"{_duration(step.seconds)}"
    )
    parts = {
        "products": step.product_seconds,
        "attention": step.attention_seconds,
        "memory": step.memory_seconds,
        "not hidden": step.waiting_seconds if step.copy_seconds or step.comm_seconds else 0.0,
    }
    yield f"time:   {', '.join(f'{name} {_duration(seconds)}' for name, seconds in parts.items() if seconds)}"
    # Of both together it is not known which of them is waited for.
    waiting = "" if step.copy_seconds and step.comm_seconds else f", {_duration(step.waiting_seconds)} not hidden"
    if step.copy_seconds:
        yield f"host:   copies take {_duration(step.copy_seconds)} in the longer direction{waiting}"
    if step.comm_seconds:
        link, weights = report.route.link, plan.inputs.sharding.states
        yield _wrapped(
            f"gpus:   each sends {report.sent * report.ranks_per_device / 1e9:,.2f} GB of gradients"
            f"{' and weights' * weights} in "
            f"{_duration(step.comm_seconds)} over {link.name} ({link.source}){waiting}"
        )
    yield f"speed:  {report.tokens_per_second:,.0f} tokens/s (estimate; rates: {report.device.source})"
    if plan.kernels.in_torch and config.allows_references:
        slow = f"without what plain torch adds: {', '.join(plan.kernels.in_torch)} count as if compiled"
        yield paragraph(slow, output_width() or 80, " " * 8)
    if report.devices > 1:
        yield f"scale:  {report.scaling:.1%} of {report.devices} x one {'GPU' if report.device.sm else 'device'}"
    if config.max_steps > 0:
        yield f"run:    {counted(config.max_steps, 'step')}: {_hours(config.max_steps * step.seconds)}"
    elif report.tokens_per_second:
        yield f"run:    a billion tokens: {_hours(1e9 / report.tokens_per_second)}"
    known = config.eval_strategy == "steps" and not config.evals_per_epoch  # how long an epoch is, the data says
    every = steps_of(config.eval_steps, max(config.max_steps, 0)) if known else 0
    if every and config.eval_samples and (config.validation_datasets or config.validation_split_ratio):
        steps = config.max_steps if config.max_steps > 0 else every
        once, rows = (
            plan.eval_seconds(config.eval_samples),
            f"up to {config.eval_samples:,} rows (eval_samples)",
        )
        seconds = once * -(-steps // every)
        share = seconds / (seconds + steps * step.seconds)
        if share >= _LEAST_SHARE:
            yield f"eval:   {rows} take {_duration(once)}, up to {share:.0%} of the run"


def _disk(run: Run, plan: Plan) -> Iterator[str]:
    use = disk_use(run, plan)
    yield f"disk:   outputs {_size(use.outputs).strip()}, each checkpoint {_size(use.checkpoint).strip()}"
    trained_whole = run.adapter is None and not run.config.from_scratch
    if patterns := run.model.kept_tensors(run.dims) if trained_whole else ():
        size = "bytes unknown, as the weights are not here" if use.kept is None else _size(use.kept).strip()
        yield paragraph(
            f"kept from the base, not trained: {', '.join(patterns)} ({size})", output_width() or 80, " " * 8
        )


def _suggestions(run: Run, plan: Plan) -> Iterator[str]:
    proposals = suggest(run, plan)
    if proposals:
        yield "cheapest ways to make room"
    for proposal in proposals:
        after, lines = proposal.plan.report, proposal.lines
        yield from (f"  {line}" for line in lines)
        effects = [f"saves {_size(proposal.saves(plan)).strip()}"] if plan.report.missing_bytes > 0 else []
        effects.append(f"{proposal.costs(plan):+.0%} time")
        effects += [f"{_size(after.pinned_bytes).strip()} of host memory"] if after.pinned_bytes else []
        missing = max(after.missing_bytes, after.missing_host_bytes)
        enough = "enough alone" if len(lines) == 1 else "enough together"
        effects.append(enough if proposal.fits else f"still {_size(missing).strip()} too much")
        yield f"      {', '.join(effects)}"
        if proposal.resort:
            yield f"      last resort: {proposal.resort}"
    if not any(proposal.fits for proposal in proposals):
        yield _wrapped(nothing_fits(plan.report))


def nothing_fits(report: Report) -> str:
    """Return what is left to do if no change makes a run fit."""
    if report.missing_bytes <= 0:
        return "Nothing makes it fit: use a machine with more memory, or raise host_memory_limit if this one has more."
    return "Nothing makes it fit: use a smaller model, a shorter sequence_len, or a GPU with more memory."


def _kernels(kernels: KernelTable, allowed: bool) -> Iterator[str]:
    by_provider: dict[str, list[str]] = {}
    for kind, provider in kernels.providers.items():
        by_provider.setdefault(provider, []).append(kind)
    for provider, kinds in by_provider.items():
        if provider != REFERENCE:
            yield _wrapped(f"kernels of {provider}: {', '.join(kinds)}")
        elif kernels.target is None or kernels.target.device.sm is None:
            yield f"kernels: all {len(kinds)} kinds of ops run as torch references on a CPU"
        else:
            yield from _without_kernel(kernels, allowed)
    for kind, others in kernels.others.items():
        yield _wrapped(f"{kind} could also run by {', '.join(others)}: kernels: {{{kind}: {others[0]}}}")


def _without_kernel(kernels: KernelTable, allowed: bool) -> Iterator[str]:
    """Yield the ops that a GPU runs in plain torch or cannot run, grouped by the reasons that the kernels give."""
    if allowed:
        yield "without a compiled kernel; run in plain torch, slowly (kernels: allow_reference)"
    else:
        yield "without a compiled kernel, so this GPU cannot run it"
        yield "(model_dtype: bf16 changes dtypes; kernels: allow_reference runs it in plain torch, slowly)"
    for reasons, kinds in kernels.refused.items():
        more = f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        yield paragraph(f"{', '.join(kinds)}: {'; '.join(reasons[:2])}{more}", output_width() or 80, "  ")


def _wrapped(text: str) -> str:
    return paragraph(text, output_width() or 80)


def _size(nbytes: int) -> str:
    """Right-aligned in a column of 13: GiB, or MiB below one."""
    return f"{nbytes / GIB:>9,.2f} GiB" if nbytes >= GIB else f"{nbytes / (GIB >> 10):>9,.2f} MiB"


def _flops(n: int) -> str:
    return f"{n / 1e12:,.1f} TFLOP" if n >= 1e12 else f"{n / 1e9:,.1f} GFLOP"


def _hours(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} seconds"
    return f"{seconds / 3600:,.1f} hours" if seconds >= 3600 else f"{seconds / 60:,.1f} minutes"


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
