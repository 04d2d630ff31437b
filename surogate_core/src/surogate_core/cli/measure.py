"""`surogate doctor --measure`: the rates of this machine's GPU, for the plans of later runs."""

from __future__ import annotations

import sys

from ..api import DeviceInfo
from ..errors import ConfigError
from ..machine.devices import built_in_gpu
from ..machine.local_device import local_device
from ..machine.measured_rates import MeasuredRates, write_rates
from .json_output import print_json
from .render import output_width, table


def measure_command(as_json: bool = False) -> int:
    """Measure the GPU, write its rates, and print them beside those of the device table, or as JSON. Returns 0.

    Raises ConfigError if there is no GPU that a run would use.
    """
    here = local_device()
    if here.idle or here.device.sm is None:
        raise ConfigError(here.idle or "doctor --measure: no GPU is visible, and only the rates of GPUs are measured.")
    import torch

    from ..profiling.device_rates import Reading, Sizes, gpu_clock, measure_rates

    def report(reading: Reading) -> None:
        print(f"  {reading.name:<40}{rate_text(reading.rate, reading.unit)}", file=sys.stderr, flush=True)

    title = here.device.title
    print(f"measuring {title}, about 30 s; use it for nothing else meanwhile", file=sys.stderr, flush=True)
    rates = measure_rates(title, torch.device("cuda", 0), gpu_clock, Sizes(), report)
    path = write_rates(rates)
    if as_json:
        print_json(rates)
        return 0
    before = built_in_gpu(title, here.device.sm, here.device.memory_bytes)
    print(comparison(before, rates))
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
