"""The device table: properties of GPUs, for plans on machines that do not have them.

Titles are the names that the driver gives, and memory is what CUDA reports, a little less than nvidia-smi shows. That
of the H200 was read on one (139.8 GiB). It differs by up to 0.3 GiB between drivers, so for the others the table has
about the least of what out-of-memory messages of PyTorch in public reports name, or where none was read (23 rows of
2026-11-24) an estimate, 2 to 8 % below the size that the card is sold with.

The rates of the H100 and the H200 are those that `surogate doctor --measure` found on one of each (700 W, torch
2.11+cu130, cuBLASLt 13.1, 2026-11-22 and 23): FLOP/s of large matrix products under sustained load, by dtype of
operands (in FP8 on the H200 1,263e12 with the write of their outputs, which is not hidden, 1,347e12 without it); bytes
per second read and written; copies from and to the host, each way at once. For other devices the table has the
vendor's figures (data sheets and architecture white papers): FLOP/s are 0.68 of the dense peak, the ratio measured on
the H200 for bf16 and FP8 (FP4 was not measured anywhere), and bandwidths 0.87 of the figure. For the GPU of this
machine, `surogate doctor --measure` replaces the rates.

The rate of NVLink was measured on two H100s, inside of steps, and other cards get the same share of what is published
for one direction. Other links get 0.8 of that, an estimate. Within
a machine: NVLink where all GPUs have it, else PCIe (bridges join only two cards). Between machines: a port for each GPU
as in DGX and HGX machines (A100 200 Gb/s, H100 to B200 400, B300 800, GB10 200); for other cards the table assumes one
port of 100 Gb/s for eight.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from ..api import DeviceInfo, Link
from ..errors import ConfigError
from ..front_end import called

GIB = 1 << 30

_SUSTAINED = 0.68
_MMA_SYNC = {9: 0.62, 10: 0.25}
"""Share of the rate of bf16 that the instruction `mma.sync` reaches, by the major version of an SM. Others have no
faster one. SM90: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture", 2024. SM100: assumed."""
_BANDWIDTH = 0.87
_LINK = 0.8
_NVLINK, _TAKEN, _GATHERED = 0.4, 0.36, 0.1
"""Of collectives of NCCL that are concurrent with the kernels of a step: the share of the published rate, in a trace of
Qwen3-8B with zero_level 3 on two H100s (benchmarks/h100.md); `Link.taken` and `gathered`, from its steps with each
level on two H200s (benchmarks/h200.md)."""
_LEAST_NVLINK = 300
"""GB/s for one direction from which on the link of a card is NVLink between all GPUs of a machine."""
_PUBLISHED = "published, not measured"
_LAUNCH = 1.74e-6
"""Seconds of an op besides its work, in a captured graph. Measured on an H200."""
_CUDA_RUNTIME_BYTES = 720 << 20
"""Device memory of a process besides the planned buffers. Measured on an H200 (benchmarks/h200.md): 620 MiB of context,
and up to 97 MiB of modules, graphs and library handles."""

COLLECTIVE_BYTES, GATHER_BYTES = 820 << 20, 410 << 20
"""Device memory of NCCL on each of several GPUs, and what it takes in addition for gathers by copy engines: measured on
two H200s with NVLink and the NCCL of torch 2.11. Gathers once a step (ZeRO 1) take 280 MiB."""


def _gpu(
    name: str,
    title: str,
    sm: int,
    gib: float,
    bf16: float,
    fp32: float,
    bandwidth: float,
    link: float,
    *,
    host: float = 0.0,
    fp4: float = 0.0,
    network: float = 0.0,
) -> DeviceInfo:
    """Return a device from the vendor's data sheet.

    bf16       dense peak with sums in fp32, TFLOP/s; on GeForce cards half of the peak with sums in fp16
    fp32       peak without tensor cores, TFLOP/s
    bandwidth  TB/s
    link       to other devices of the machine, GB/s for one direction
    host       GB/s of copies from and to the host, each way at once. Default: PCIe 5 or 4 with 16 lanes.
    fp4        dense peak, TFLOP/s: half of the figure with sparsity, but for the B300; 0: the device has none
    network    Gb/s of a port for each GPU. Default: that of machines with NVLink, else an eighth of 100 Gb/s.
    """
    dense = bf16 * _SUSTAINED * 1e12
    flops = {"bf16": dense, "mma.sync": dense * _MMA_SYNC.get(sm // 10, 1.0)}
    flops |= {"fp32": fp32 * _SUSTAINED * 1e12, "fp64": fp32 * _SUSTAINED / 2 * 1e12}
    if sm >= 89:
        flops["fp8"] = 2 * flops["bf16"]
    if fp4:
        flops["fp4"] = fp4 * _SUSTAINED * 1e12
    nvlink = link >= _LEAST_NVLINK
    source = _PUBLISHED if network or nvlink else "assumed, not measured"
    network = network or ((400 if sm >= 90 else 200) if nvlink else 12.5)
    return DeviceInfo(
        name=name,
        title=title,
        sm=sm,
        memory_bytes=int(gib * GIB),
        flops=flops,
        bandwidth=bandwidth * _BANDWIDTH * 1e12,
        launch_seconds=_LAUNCH,
        runtime_bytes=_CUDA_RUNTIME_BYTES,
        source="vendor data sheet, scaled",
        link=(
            Link("NVLink", link * _NVLINK * 1e9, _PUBLISHED, _TAKEN, _GATHERED)
            if nvlink
            else Link("PCIe", link * _LINK * 1e9, _PUBLISHED)
        ),
        network=Link(f"a network of {network:g} Gb/s a GPU", network * _LINK / 8 * 1e9, source),
        host_bandwidth=(host or (45 if sm in (90, 100, 103, 120) else 22)) * 1e9,
        peak_flops=bf16 * 1e12,
    )


_H100 = replace(
    _gpu("h100", "NVIDIA H100 80GB HBM3", 90, 79.1, 989, 67, 3.35, 450),
    flops={"fp8": 1422e12, "bf16": 684.1e12, "mma.sync": 424e12, "fp32": 49.5e12, "fp64": 49.5e12},
    bandwidth=2.988e12,
    launch_seconds=1.99e-6,
    host_bandwidth=41.95e9,
    source="measured 2026-11-23",
    link=Link("NVLink", 450e9 * _NVLINK, "measured 2026-11-25", _TAKEN, _GATHERED),
)
_H200 = replace(
    _gpu("h200", "NVIDIA H200", 90, 139.8, 989, 67, 4.8, 450),
    flops={"fp8": 1347e12, "bf16": 668e12, "mma.sync": 414e12, "fp32": 49.9e12, "fp64": 49.9e12},
    bandwidth=4.206e12,
    host_bandwidth=50.6e9,
    source="measured 2026-11-22",
)

DEVICES: dict[str, DeviceInfo] = {
    d.name: d
    for d in (
        _gpu("a100-40", "NVIDIA A100 40GB", 80, 39.3, 312, 19.5, 1.555, 300),
        _gpu("a100", "NVIDIA A100 80GB", 80, 79.1, 312, 19.5, 2.039, 300),
        _gpu("a30", "NVIDIA A30", 80, 23.5, 165, 10.3, 0.933, 32),
        _gpu("a10", "NVIDIA A10", 86, 21.9, 125, 31.2, 0.600, 32),
        _gpu("a10g", "NVIDIA A10G", 86, 21.9, 70, 35, 0.600, 32),
        _gpu("a40", "NVIDIA A40", 86, 44.3, 150, 37.4, 0.696, 32),
        _gpu("a4000", "NVIDIA RTX A4000", 86, 15.6, 76.7, 19.2, 0.448, 32),
        _gpu("a5000", "NVIDIA RTX A5000", 86, 23.5, 111, 27.8, 0.768, 32),
        _gpu("a6000", "NVIDIA RTX A6000", 86, 47.4, 155, 38.7, 0.768, 32),
        _gpu("rtx3060", "NVIDIA GeForce RTX 3060", 86, 11.6, 25.5, 12.7, 0.360, 32),
        _gpu("rtx3070", "NVIDIA GeForce RTX 3070", 86, 7.6, 40.6, 20.3, 0.448, 32),
        _gpu("rtx3080", "NVIDIA GeForce RTX 3080", 86, 9.6, 59.5, 29.8, 0.760, 32),
        _gpu("rtx3080ti", "NVIDIA GeForce RTX 3080 Ti", 86, 11.6, 68, 34.1, 0.912, 32),
        _gpu("rtx3090", "NVIDIA GeForce RTX 3090", 86, 23.5, 71, 35.6, 0.936, 32),
        _gpu("rtx3090ti", "NVIDIA GeForce RTX 3090 Ti", 86, 23.5, 80, 40, 1.008, 32),
        _gpu("l4", "NVIDIA L4", 89, 21.9, 121, 30.3, 0.300, 32),
        _gpu("l40", "NVIDIA L40", 89, 44.3, 181, 90.5, 0.864, 32),
        _gpu("l40s", "NVIDIA L40S", 89, 44.3, 362, 91.6, 0.864, 32),
        _gpu("rtx6000ada", "NVIDIA RTX 6000 Ada Generation", 89, 47.4, 364, 91.1, 0.960, 32),
        _gpu("rtx4060ti", "NVIDIA GeForce RTX 4060 Ti", 89, 15.6, 44.1, 22.1, 0.288, 16, host=11),
        _gpu("rtx4070", "NVIDIA GeForce RTX 4070", 89, 11.6, 58.3, 29.1, 0.504, 32),
        _gpu("rtx4070ti", "NVIDIA GeForce RTX 4070 Ti", 89, 11.6, 80, 40.1, 0.504, 32),
        _gpu("rtx4070tisuper", "NVIDIA GeForce RTX 4070 Ti SUPER", 89, 15.6, 88, 44.1, 0.672, 32),
        _gpu("rtx4080", "NVIDIA GeForce RTX 4080", 89, 15.6, 97.5, 48.7, 0.717, 32),
        _gpu("rtx4090", "NVIDIA GeForce RTX 4090", 89, 23.5, 165, 82.6, 1.008, 32),
        _gpu("h20", "NVIDIA H20", 90, 94.5, 148, 44, 4.0, 450),
        _gpu("h100-pcie", "NVIDIA H100 PCIe", 90, 79.1, 756, 51, 2.0, 64),
        _gpu("h100-nvl", "NVIDIA H100 NVL", 90, 93.0, 835, 60, 3.9, 64),
        _H100,
        _H200,
        _gpu("gh200", "NVIDIA GH200 480GB", 90, 94.5, 989, 67, 4.0, 450, host=200),
        _gpu("b200", "NVIDIA B200", 100, 178.3, 2250, 75, 8.0, 900, fp4=9000),
        _gpu("b300", "NVIDIA B300", 103, 267.6, 2250, 75, 8.0, 900, fp4=13500, network=800),
        _gpu("rtx5060ti", "NVIDIA GeForce RTX 5060 Ti", 120, 15.5, 47.4, 23.7, 0.448, 32, host=22, fp4=380),
        _gpu("rtx5070", "NVIDIA GeForce RTX 5070", 120, 11.6, 61.7, 30.9, 0.672, 64, fp4=494),
        _gpu("rtx5070ti", "NVIDIA GeForce RTX 5070 Ti", 120, 15.5, 87.9, 43.9, 0.896, 64, fp4=703),
        _gpu("rtx5080", "NVIDIA GeForce RTX 5080", 120, 15.5, 113, 56.3, 0.960, 64, fp4=900),
        _gpu("rtx5090", "NVIDIA GeForce RTX 5090", 120, 31.3, 210, 104.8, 1.792, 64, fp4=1676),
        _gpu("rtxpro6000", "NVIDIA RTX PRO 6000 Blackwell", 120, 94.9, 503, 125, 1.792, 64, fp4=2000),
        _gpu("spark", "NVIDIA GB10", 121, 119.0, 125, 31, 0.273, 25, fp4=500, network=200),
    )
}
"""The devices of `surogate plan --device`, by name."""


def cpu() -> DeviceInfo:
    """Return this machine's CPU, with all of its memory, and the cores that this process may use.

    The rates are rough: per core what was measured on one of 2024 (AVX-512), a launch with steps of 32 tokens.
    The bandwidth is at most the 307 GB/s of a socket with 8 channels of DDR5-4800 (data sheet; a Xeon of 2023), however
    many a machine has. References compute in fp32 what is stored in bf16 or FP8, so these have the rate of fp32.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return DeviceInfo(
        name="cpu",
        title=f"CPU, {cores} cores",
        sm=None,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        flops={"fp32": cores * 80e9, "fp64": cores * 40e9},
        bandwidth=min(cores * 12e9, 307e9),
        launch_seconds=6e-5,
        runtime_bytes=700 << 20,
        source="rule of thumb",
        link=Link("memory", 10e9, "rule of thumb"),
    )


def gpu(title: str, sm: int, memory_bytes: int) -> DeviceInfo:
    """Return the GPU with this name from the device table, with the actual compute capability and memory.

    A GPU that is not in the table gets the rates of the slowest one of its generation, or of the generation before:
    the one with the least product of FLOP/s and bandwidth. Its peak is not known.
    """
    words = set(title.lower().replace("-", " ").split())
    named = [d for d in DEVICES.values() if set(d.title.lower().replace("-", " ").split()) <= words]
    if named:
        return replace(max(named, key=lambda d: len(d.title)), title=title, sm=sm, memory_bytes=memory_bytes)
    older = [d for d in DEVICES.values() if d.sm is not None and d.sm <= sm] or list(DEVICES.values())
    generation = max(d.sm or 0 for d in older)
    slowest = min((d for d in older if d.sm == generation), key=lambda d: d.flops["bf16"] * d.bandwidth)
    source = f"rates of {slowest.title}, the nearest known"
    return replace(slowest, name="gpu", title=title, sm=sm, memory_bytes=memory_bytes, source=source, peak_flops=0.0)


def limited(device: DeviceInfo, nbytes: int | None) -> DeviceInfo:
    """Return the device with `nbytes` of memory; None: all of it. Raises ConfigError if it has less."""
    if nbytes is None:
        return device
    if nbytes > device.memory_bytes:
        raise ConfigError(
            f"{called('memory_limit')}: {nbytes / GIB:.2f} GiB is more than the {device.memory_bytes / GIB:.2f} GiB of "
            f"{device.title}. Lower it, or leave it out."
        )
    return replace(device, memory_bytes=nbytes)


def device(name: str) -> DeviceInfo:
    """Return a device of the table by its name as people write it (`find_device`), or the CPU for "cpu"."""
    return cpu() if name.strip().lower() == "cpu" else find_device(name, DEVICES)


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

    `name` is as people write it: that of a row, or words of its title, also with the memory: "NVIDIA H100", "rtx-4090",
    "4090", "A100 40GB". Raises ConfigError for a device before SM80, for an ambiguous name with the candidates, and
    else with all names.
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
