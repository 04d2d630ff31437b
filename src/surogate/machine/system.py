"""Facts about this machine for `surogate doctor`. Imports no torch and does not start CUDA."""

from __future__ import annotations

import csv
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from surogate_core.api import Finding, SystemInfo
from surogate_core.machine.local_device import torch_has_cuda

PACKAGES: Final = (
    "surogate-core",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "datasets",
    "pyarrow",
    "numpy",
    "pydantic",
    "pluggy",
    "typer",
    "rich",
    "matplotlib",
)
"""Distributions whose versions matter for a run, in display order."""

OPTIONAL_PACKAGES: Final = {"datasets": "to load from the Hugging Face Hub", "pyarrow": "to read parquet files"}
MINIMUM_VERSIONS: Final = {"torch": (2, 9), "transformers": (5,), "pydantic": (2,), "pluggy": (1, 6)}

GIB: Final = 2**30
LOW_MEMORY_BYTES: Final = 4 * GIB
LOW_DISK_BYTES: Final = 2 * GIB
PINNED_RESERVE_BYTES: Final = 2 * GIB
"""Available memory that a run must not pin: for the processes of the run and for the system, an estimate."""
_GPU_FIELDS: Final = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap")
_GPU_TIMEOUT_SECONDS: Final = 10.0
_GROUP_FILES: Final = (
    ("sys/fs/cgroup", "", ("memory.max", "memory.current", "inactive_file")),
    (
        "sys/fs/cgroup/memory",
        "memory",
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ),
)
"""Of control groups of version 2 and 1: the mount, the controller, and the files of limit and use and the statistic."""


def collect() -> SystemInfo:
    """Collect the facts. Takes as long as nvidia-smi, at most ten seconds."""
    return SystemInfo(
        python=platform.python_version(),
        platform=platform.platform(),
        cpu_count=len(os.sched_getaffinity(0)),
        memory_bytes=memory_bytes(),
        gpus=tuple(_query_gpus()),
        versions=package_versions(),
    )


def memory_bytes() -> int:
    """Return the bytes of physical memory, or the limit of the container if it is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return min(physical, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such controller here, or the word "max"
            continue
    return physical


def pinnable_memory_bytes() -> int:
    """Return the bytes of host memory that a run may pin now: what is available, less a reserve."""
    return max(0, available_memory_bytes() - PINNED_RESERVE_BYTES)


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes available without swapping, by the system's estimate and within the limits of its groups.

    `root` is the folder in which `proc` and `sys` are.
    """
    free = memory_bytes()
    with suppress(OSError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = min([free, *(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))])
    return max(0, min([free, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """Yield what is left of the limit of each control group that this process is in. Cached files do not count.

    /proc/self/cgroup has lines "0::/path" (version 2) and "4:memory:/path" (version 1). Inside a container the path may
    be that of the host, which does not exist here; the container's own limit is then at the top of the mount.
    """
    lines = []
    with suppress(OSError):
        lines = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    for mount, controller, (limit, used, cached) in _GROUP_FILES:
        paths = {Path(path.lstrip("/")) for _, names, path in lines if controller in names.split(",")}
        folders = {root / mount / part for path in (*paths, Path()) for part in (path, *path.parents)}
        for folder in sorted(folders):
            with suppress(OSError, ValueError, KeyError):  # no such controller here, or the word "max"
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                yield left + int(statistics[cached])


def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that matter, from metadata alone."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _query_gpus() -> Iterator[dict[str, Any]]:
    """Yield a mapping per GPU that nvidia-smi lists, `{"error": text}` if it fails, nothing if it is not installed."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return
    command = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_TIMEOUT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield {"error": f"nvidia-smi: {error}"}
        return
    if result.returncode != 0:
        yield {"error": f"nvidia-smi: {(result.stderr or result.stdout).strip() or f'exit {result.returncode}'}"}
        return
    yield from parse_gpus(result.stdout)


def parse_gpus(text: str) -> Iterator[dict[str, Any]]:
    """Parse the CSV of nvidia-smi: index, name, memory_bytes, used_bytes, driver, sm (90 for compute capability 9.0).

    memory_bytes, used_bytes and sm are None where the driver reports "[N/A]".
    """
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) != len(_GPU_FIELDS):
            yield {"error": f"nvidia-smi: unexpected line {', '.join(row)!r}"}
            continue
        index, name, total, used, driver, capability = (cell.strip() for cell in row)
        yield {
            "index": int(index) if index.isdigit() else index,
            "name": name,
            "memory_bytes": int(total) * 2**20 if total.isdigit() else None,
            "used_bytes": int(used) * 2**20 if used.isdigit() else None,
            "driver": driver,
            "sm": int(capability.replace(".", "")) if re.fullmatch(r"\d+\.\d+", capability) else None,
        }


# ------------------------------------------------------------------------------------------------------------ findings


def diagnose(system: SystemInfo) -> list[Finding]:
    """Return core's own findings: versions, memory, disk, GPUs."""
    return [*_check_python(), *_check_packages(system), *_check_resources(system), *_check_gpus(system)]


def _check_python() -> Iterator[Finding]:
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        yield Finding(
            "warning", "platform", f"{platform.system()} {platform.machine()} is not tested", "use Linux on x86-64"
        )
    torch = find_spec("torch")
    if torch and torch.origin and torch.cached and sys.dont_write_bytecode and not Path(torch.cached).is_file():
        yield Finding(
            "warning",
            "bytecode",
            "PYTHONDONTWRITEBYTECODE is set and torch has none, so each command compiles it for seconds",
            f"unset it, or run once: {sys.executable} -m compileall -q -j 0 {Path(torch.origin).parents[1]}",
        )


def _check_packages(system: SystemInfo) -> Iterator[Finding]:
    for name, minimum in MINIMUM_VERSIONS.items():
        installed = system.versions.get(name)
        wanted = ".".join(map(str, minimum))
        if installed is None:
            yield Finding("error", name, "is not installed", f"pip install '{name}>={wanted}'")
        elif _numbers(installed) < minimum:
            yield Finding("error", name, f"{installed} is older than {wanted}", f"pip install -U '{name}>={wanted}'")
    for name, purpose in OPTIONAL_PACKAGES.items():
        if name not in system.versions:
            yield Finding("warning", name, f"is not installed: it is needed {purpose}", f"pip install {name}")


def _numbers(installed: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", installed)
    return tuple(map(int, match.group().split("."))) if match else ()


def _check_resources(system: SystemInfo) -> Iterator[Finding]:
    if system.memory_bytes < LOW_MEMORY_BYTES:
        yield Finding(
            "warning",
            "memory",
            f"{system.memory_bytes / GIB:.1f} GiB of host memory",
            "only small models fit; `surogate plan` shows what a run needs",
        )
    free = shutil.disk_usage(Path.cwd()).free
    if free < LOW_DISK_BYTES:
        yield Finding(
            "warning",
            "disk",
            f"{free / GIB:.1f} GiB free in {Path.cwd()}",
            "free some space, or set output_dir to another disk: checkpoints are written there",
        )


def _check_gpus(system: SystemInfo) -> Iterator[Finding]:
    errors = [gpu["error"] for gpu in system.gpus if "error" in gpu]
    for error in errors:
        yield Finding("warning", "gpu", error, "check the NVIDIA driver; until it answers, runs use the CPU")
    if not system.gpus:
        yield Finding("ok", "gpu", "none found: runs use the CPU")
    if len(errors) < len(system.gpus) and not torch_has_cuda():
        installed = system.versions.get("torch", "")
        remedy = "install a torch for CUDA 13: https://pytorch.org/get-started/locally"
        yield Finding("warning", "torch", f"{installed} is built without CUDA, so runs use the CPU", remedy)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and system.gpus and not errors:
        yield Finding("ok", "gpu", f"CUDA_VISIBLE_DEVICES={hidden} limits which of them a run sees")
