"""Finds a device of the device table by a name as people write it: "NVIDIA H100", "rtx-4090", "4090", "A100 80GB"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from ..api import DeviceInfo
from ..errors import ConfigError

_VENDOR: Final = re.compile(
    r"nvidia|geforce|tesla|dgx|generation|\b(?:sxm\d?|hbm\d?e?|gpu|edition|server|workstation)\b"
)
_MEMORY: Final = re.compile(r"\b(\d+) ?gi?b\b")
_TOO_OLD: Final = {
    "7.5": re.compile(r"t4g?|(rtx|)20[678]0(ti|)(super|)|gtx16\d0(ti|)(super|)|titanrtx|quadrortx\d000"),
    "7.0": re.compile(r"v100s?(pcie|)|titanv"),
    "6 or less": re.compile(r"p4|p40|p100(pcie|)|k80|m40|m60|gtx\d{3,4}(ti|)|titanx|titanxp"),
}
"""Names of devices that no kernel serves, by compute capability."""


def find_device(name: str, devices: Mapping[str, DeviceInfo]) -> DeviceInfo:
    """Return the device with this name.

    `name` is that of a row, or words of its title, also with the memory: "4090", "A100 40GB". Raises ConfigError for a
    device before SM80, for an ambiguous name with the candidates, and else with all names.
    """
    text = _plain(name)
    for d in devices.values():
        if _compact(text) in (_short(d.name), _compact(d.name), _compact(_plain(d.title))):
            return d
    memory, text = _MEMORY.search(text), _MEMORY.sub(" ", text)
    for capability, old in _TOO_OLD.items():
        if old.fullmatch(_compact(text)):
            raise ConfigError(
                f"device: {name!r} has compute capability {capability}. Kernels need 8.0 (Ampere) or newer, for "
                "products in bf16."
            )
    size = int(memory[1]) << 30 if memory else 0  # with which the card is sold: CUDA reports up to a tenth less
    fits = [d for d in devices.values() if not memory or 0.9 * size <= d.memory_bytes <= size]
    found = [d for d in fits if _compact(text) in (_short(d.name), _compact(d.name))]
    for words in (_words(text), _words(text) - {"pcie"}):
        found = found or [d for d in fits if words and words <= _words(_plain(d.title))]
    if len(found) == 1:
        return found[0]
    if found:
        candidates = ", ".join(f"{d.name} ({d.title})" for d in found)
        raise ConfigError(f"device: {name!r} is ambiguous. Candidates: {candidates}.")
    raise ConfigError(f"device: {name!r} is not in the device table. Known: cpu, {', '.join(devices)}.")


def _plain(text: str) -> str:
    """Return a name in lower case, without words that all cards of the vendor have."""
    return _VENDOR.sub(" ", re.sub(r"[-_]", " ", text.lower()))


def _short(name: str) -> str:
    return _compact(name).removeprefix("rtx")


def _compact(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text)


def _words(text: str) -> set[str]:
    """Return words; "4070ti" is two."""
    return set(re.findall(r"[a-z]+\d+|[a-z]+|\d+", text.replace("rtx", " rtx ")))
