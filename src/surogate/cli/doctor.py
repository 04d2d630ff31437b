"""`surogate doctor`: the machine, the versions, the findings of core and plugins, and with `--measure` its rates."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, Final

from surogate_core.api import DeviceInfo, Finding, SystemInfo
from surogate_core.api.compiled import problem
from surogate_core.assembly.resolve import idle_kernels
from surogate_core.errors import ConfigError
from surogate_core.machine.local_device import local_device
from surogate_core.machine.measured_rates import MeasuredRates
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import Plugin
from surogate_core.plugins.registry import Registry

from ..machine.rates_file import write_rates
from ..machine.system import GIB, collect
from .json_output import print_json
from .render import output_width, paint, paragraph, table

_COLOUR: Final = {"ok": "green", "warning": "yellow", "error": "red"}
_LEVELS: Final = ("error", "warning", "ok")


def doctor_command(as_json: bool) -> int:
    """Print the findings. Return 2 if one is an error or a GPU cannot be used, else 0."""
    system = collect()
    registry = load_registry()
    findings = [*registry.diagnose(system), *_plugin_findings(registry)]
    findings.sort(key=lambda item: _LEVELS.index(item[1].level))
    gpu = gpu_problem(registry)
    if as_json:
        print_json(_as_json(system, findings, gpu))
    else:
        if gpu:
            print(f"{paint('problem:', 'red')} {gpu}\n")
        _print_report(system, findings)
    return 2 if gpu or any(finding.level == "error" for _, finding in findings) else 0


def gpu_problem(registry: Registry) -> str:
    """Return why runs would not use a GPU of this machine; "" if they would, or if there is none."""
    here = local_device()
    if here.idle or here.device.sm is None:
        return here.idle
    modules = sorted({item.definition.module for item in registry.provided if item.kind == "kernel"} - {""})
    idle = {module: why for module in modules if (why := problem(module, here.device.sm))}
    return idle_kernels(here.device, idle) if idle else ""


def _plugin_findings(registry: Registry) -> list[tuple[Plugin, Finding]]:
    core = registry.plugins[0]
    conflicts = [Finding("error", "plugins", conflict) for conflict in registry.conflicts]
    notices = [Finding("warning", "plugins", notice, "surogate plugins") for notice in registry.notices]
    return [(core, finding) for finding in (*conflicts, *notices)]


def _as_json(system: SystemInfo, findings: list[tuple[Plugin, Finding]], gpu: str) -> dict[str, Any]:
    return {
        "problem": gpu,
        "system": {**dataclasses.asdict(system), "gpus": [dict(gpu) for gpu in system.gpus]},
        "findings": [{"plugin": plugin.name, **dataclasses.asdict(finding)} for plugin, finding in findings],
    }


def _print_report(system: SystemInfo, findings: list[tuple[Plugin, Finding]]) -> None:
    width = output_width()
    rows = [
        ("Python", system.python),
        ("Platform", system.platform),
        ("CPU", f"{system.cpu_count} cores for this process"),
        ("Memory", f"{system.memory_bytes / GIB:.1f} GiB"),
        *((f"GPU {gpu['index']}", _describe_gpu(gpu)) for gpu in system.gpus if "error" not in gpu),
        ("Packages", ", ".join(f"{name} {version}" for name, version in system.versions.items())),
    ]
    print(table(rows, width))
    print()
    alike: dict[tuple[str, str, str], list[tuple[Plugin, Finding]]] = {}
    for plugin, finding in findings:
        alike.setdefault((finding.level, finding.message, finding.remedy), []).append((plugin, finding))
    for found in alike.values():
        plugin, finding = found[0]
        subjects = ", ".join(dict.fromkeys(other.subject for _, other in found))
        by = "" if plugin.distribution == "surogate-core" or len(found) > 1 else f" (from {plugin.name})"
        text = paragraph(f"{finding.level}: {subjects}: {finding.message}{by}", width)
        print(paint(finding.level, _COLOUR[finding.level]) + text.removeprefix(finding.level))
        if finding.remedy:
            print(paragraph(f"-> {finding.remedy}", width, "    "))
    if all(finding.level == "ok" for _, finding in findings):
        print(paint("No problems found.", "green"))


def _describe_gpu(gpu: Mapping[str, Any]) -> str:
    total, used, sm = gpu["memory_bytes"], gpu["used_bytes"], gpu["sm"]
    memory = f"{total / GIB:.1f} GiB" if total else "memory not reported by the driver"
    busy = f" ({used / GIB:.1f} in use)" if used else ""
    return f"{gpu['name']}, {memory}{busy}, {f'SM{sm}' if sm else 'SM unknown'}, driver {gpu['driver']}"


def measure_command(as_json: bool = False) -> int:
    """Measure the GPU, write its rates, and print them beside those of the device table, or as JSON. Returns 0.

    Raises ConfigError if there is no GPU that a run would use.
    """
    here = local_device()
    if here.idle or here.device.sm is None:
        raise ConfigError(here.idle or "doctor --measure: no GPU is visible, and only the rates of GPUs are measured.")
    import torch

    from surogate_core.runtime.device_rates import Reading, Sizes, gpu_clock, measure_rates

    def report(reading: Reading) -> None:
        print(f"  {reading.name:<40}{rate_text(reading.rate, reading.unit)}", file=sys.stderr, flush=True)

    title = here.device.title
    print(f"measuring {title}, about 30 s; use it for nothing else meanwhile", file=sys.stderr, flush=True)
    rates = measure_rates(title, torch.device("cuda", 0), gpu_clock, Sizes(), report)
    path = write_rates(rates)
    if as_json:
        print_json(rates)
        return 0
    print(comparison(here.device, rates))
    print(f"written to {path}; plans on this card take these rates")
    return 0


def comparison(before: DeviceInfo, rates: MeasuredRates) -> str:
    """Return the rates as a table: those of the device table, the measured ones, and their ratio."""
    rows = [("", before.source, f"measured {rates.date}", "ratio")]
    pairs = [(f"{dtype} products", before.flops.get(dtype), rate, "FLOP/s") for dtype, rate in rates.flops.items()]
    pairs.append(("reads and writes", before.bandwidth, rates.bandwidth, "B/s"))
    pairs.append(("host, each direction", before.host_bandwidth, rates.host_bandwidth, "B/s"))
    pairs.append(("launch of an op", before.launch_seconds, rates.launch_seconds, "s"))
    for name, old, new, unit in pairs:
        known, ratio = (rate_text(old, unit), f"{new / old:.2f}") if old else ("", "")
        rows.append((name, known, rate_text(new, unit), ratio))
    return table(rows, output_width())


def rate_text(rate: float, unit: str) -> str:
    if unit == "s":
        return f"{rate * 1e6:.2f} us"
    return f"{rate / 1e12:,.1f} TFLOP/s" if unit == "FLOP/s" else f"{rate / 1e9:,.1f} GB/s"
