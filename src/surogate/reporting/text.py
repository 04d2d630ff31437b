"""Numbers as short text for people."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surogate_core.api import DeviceInfo

LINE_WIDTH = 80

MOST_NAMES = 3
"""Names that `names_text` spells out."""


def names_text(names: Collection[str]) -> str:
    """The first names, and how many more there are: a, b, c and 2 more."""
    shown, more = list(names)[:MOST_NAMES], len(names) - MOST_NAMES
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def count_text(count: float) -> str:
    """Return at most 5 characters, 3 digits: 512, 1.25k, 12.5k, 125k, 19.7M, 1.10B."""
    for limit, suffix in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "B")):
        scaled = count / limit * 1e3
        if scaled < 999.5:
            if suffix == "":
                return f"{scaled:.0f}"
            decimals = 2 if scaled < 9.995 else 1 if scaled < 99.95 else 0
            return f"{scaled:.{decimals}f}{suffix}"
    return f"{count / 1e12:.3g}T"


def counted(number: int, word: str) -> str:
    """Return a number with the word for what is counted: 1 row, 3,000 rows."""
    return f"{number:,} {word}{'s' * (number != 1)}"


def parameters_text(count: int) -> str:
    """Return a number of parameters as in names of models: 8.19B, 596.0M, 9.2K, 512."""
    if count < 1000:
        return str(count)
    for unit, suffix in ((1e3, "K"), (1e6, "M")):
        if round(count / unit, 1) < 1000:
            return f"{count / unit:.1f}{suffix}"
    return f"{count / 1e9:.2f}B"


def duration_text(seconds: float) -> str:
    """Return a duration: 4.2 s, 2 min 15 s, 3 h 05 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def devices_text(device: DeviceInfo, count: int, nodes: int = 1) -> str:
    """Return the device of a run, with the numbers of devices and machines if there are several."""
    return f"{count} x {device.title}" * (count > 1) + f" on {nodes} machines" * (nodes > 1) or device.title


def loss_text(loss: float) -> str:
    """Return at most 6 characters for a loss below 1000: 2.3456, 10.812, 123.46."""
    if not math.isfinite(loss):
        return str(loss)
    decimals = 4 if abs(loss) < 10 else 3 if abs(loss) < 100 else 2
    decimals -= math.copysign(1, loss) < 0  # the sign takes a place
    return f"{loss:.{decimals}f}" if abs(loss) < 1000 else f"{loss:.1e}"


def norm_text(norm: float) -> str:
    """Return at most 5 characters: 0.12, 12.3, 123, 5e-3, 1e4; 0.0 below 1e-99, 9e99 at most."""
    if not math.isfinite(norm) or norm < 1e-99:
        return str(norm if norm != norm or norm > 1 else 0.0)
    norm = min(norm, 9e99)
    if 0.01 <= norm < 999.5:
        return f"{norm:.2f}" if norm < 9.995 else f"{norm:.1f}" if norm < 99.95 else f"{norm:.0f}"
    return _short_exponent(f"{norm:.0e}")


def lr_text(lr: float) -> str:
    """Return at most 6 characters for a rate above 1e-10: 3.0e-4; 0 below 1e-99."""
    return _short_exponent(f"{lr:.1e}") if lr >= 1e-99 else "0"


def _short_exponent(text: str) -> str:
    mantissa, _, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}"


def step_time_text(duration_ms: float) -> str:
    """Return at most 5 characters: 8.4ms, 156ms, 1.23s, 12.3s, 123s."""
    if duration_ms < 999.5:
        return f"{duration_ms:.1f}ms" if duration_ms < 9.95 else f"{duration_ms:.0f}ms"
    seconds = duration_ms / 1000
    return f"{seconds:.2f}s" if seconds < 9.995 else f"{seconds:.1f}s" if seconds < 99.95 else f"{seconds:.0f}s"


def group_text(size: int) -> str:
    """Return what the groups of a loss are called, of `size` documents (`LossDef.group_size`); "" if it has none."""
    return {0: "", 1: "documents", 2: "pairs"}.get(size, "groups")


def mfu_text(mfu: float) -> str:
    """Return at most 8 characters for what a device can reach: mfu 41%, mfu 3.2%."""
    return f"mfu {100 * mfu:.1f}%" if mfu < 0.0995 else f"mfu {100 * mfu:.0f}%"


def eta_text(seconds: float) -> str:
    """Return at most 5 characters, as precise as a forecast: 45s, 2m15s, 42m, 3h05m, 12h, 2d04h, 12d, 9999d."""
    whole = round(min(seconds, 9999 * 86400))
    for unit, name, smaller, smaller_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= unit:
            count, rest = divmod(whole, unit)
            return f"{count}{name}" if count >= 10 else f"{count}{name}{rest // smaller:02d}{smaller_name}"
    return f"{whole}s"


def printable(text: str) -> str:
    """Escape control characters but line breaks: a terminal obeys them."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
