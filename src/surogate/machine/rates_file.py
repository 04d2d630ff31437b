"""Rates that `surogate doctor --measure` has measured, kept for later plans on a card of the same name."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from surogate_core.api import DeviceInfo
from surogate_core.api.sealed import sealed, unsealed
from surogate_core.machine.local_device import LocalDevice, local_device
from surogate_core.machine.measured_rates import MeasuredRates

from .cache_home import device_file
from .progress import print_notice
from .replaced_file import replaced

_RATES = "rates"


def this_machine() -> LocalDevice:
    """Return the first visible GPU, with the rates that were measured on it, or the CPU if there is none."""
    here = local_device()
    return replace(here, device=as_measured(here.device))


def as_measured(device: DeviceInfo) -> DeviceInfo:
    """Return a device of this machine, with the rates that were measured here on a card of its name, if any were."""
    rates = None if device.sm is None else read_rates(device.title)  # only the rates of GPUs are measured
    return rates.of(device) if rates else device


def write_rates(rates: MeasuredRates) -> Path:
    """Write the rates and return the file. Replaces those of an earlier measurement."""
    path = device_file("devices", rates.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as fresh:
        fresh.write_text(json.dumps(sealed({_RATES: asdict(rates)}), indent=2) + "\n", encoding="utf-8")
    return path


def read_rates(title: str) -> MeasuredRates | None:
    """Return the rates that were measured on a card of this name; None if there are none.

    A damaged file is named on standard error and not used.
    """
    path = device_file("devices", title)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        # files of 0.1.0 and 0.2.0 hold the rates alone
        rates = MeasuredRates(**(unsealed(content)[_RATES] if _RATES in content else content))
        numbers = (*rates.flops.values(), rates.bandwidth, rates.launch_seconds, rates.host_bandwidth)
        if rates.title != title or not all(math.isfinite(x) and x > 0 for x in numbers):
            raise ValueError("not the rates of this card")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        print_notice(f"{path}: is damaged and not used ({error}). Measure again: surogate doctor --measure")
        return None
    return rates
