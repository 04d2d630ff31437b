"""For packages with kernels: is the compiled module there, and does it serve the GPUs here?

@hookimpl
def surogate_kernels():
    return of_module("my_package._C", KERNELS)

@hookimpl
def surogate_diagnose(system):
    return diagnose("my_package", system)

The module is `my_package._C`, as SurogateKernels.cmake builds it: it imports without a GPU and without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from . import Finding, KernelDef, SystemInfo

INSTALL = "install it again with SUROGATE_CUDA=on, which takes nvcc of CUDA 13 from the PATH or from NVIDIA's wheels"


def of_module(module: str, kernels: Iterable[KernelDef]) -> tuple[KernelDef, ...]:
    """The kernels, marked as bound by this compiled module: "my_package._C"."""
    return tuple(replace(kernel, module=module) for kernel in kernels)


def problem(module: str, sm: int) -> str:
    """Why a compiled module cannot serve compute capability `sm`, as "is not compiled"; empty when it can."""
    try:
        if find_spec(module) is None:
            return "is not compiled"
        targets = list(import_module(module).build_info()["architectures"])
    except Exception as error:  # an ImportError, or whatever a damaged file does
        return f"does not load: {type(error).__name__}: {error}"
    return "" if any(serves(target, sm) for target in targets) else f"is compiled for {_shown(targets)}"


def diagnose(package: str, system: SystemInfo) -> list[Finding]:
    """Findings about the compiled module of `package`. Never raises."""
    gpus = [gpu for gpu in system.gpus if "error" not in gpu]
    if find_spec(f"{package}._C") is None:
        if not gpus:
            return [Finding("ok", package, "kernels are not compiled in; without a GPU none are needed")]
        return [Finding("warning", package, "kernels are not compiled in: a GPU cannot run its ops", INSTALL)]
    try:
        info = import_module(f"{package}._C").build_info()
    except Exception as error:  # an ImportError, or whatever a damaged file does
        told = f"compiled kernels do not load: {type(error).__name__}: {error}"
        return [Finding("error" if gpus else "warning", package, told, INSTALL)]
    return list(_targets(package, info, {gpu["sm"] for gpu in gpus if gpu.get("sm")}))


def _targets(package: str, info: Mapping[str, Any], present: set[int]) -> Iterator[Finding]:
    """What is compiled in; and the compute capabilities here that none of it runs on, an error if all are such."""
    targets = list(info["architectures"])
    yield Finding("ok", package, f"kernels compiled by CUDA {info['cuda']} for {_shown(targets)}")
    idle = sorted(sm for sm in present if not any(serves(target, sm) for target in targets))
    if idle:
        names = ", ".join(f"SM{sm}" for sm in idle)
        archs = ";".join(f"{sm}-real" for sm in idle)
        level = "error" if len(idle) == len(present) else "warning"
        remedy = f"{INSTALL}, and CUDAARCHS='{archs}'; or hide that GPU by CUDA_VISIBLE_DEVICES"
        yield Finding(level, package, f"no kernel runs on the {names} here", remedy)


def _shown(targets: list[str]) -> str:
    """["80-real", "90a-real", "90-virtual"] -> "SM80, SM90a, PTX 90"."""
    prefixes = {"real": "SM", "virtual": "PTX "}
    parts = [target.partition("-") for target in targets]
    return ", ".join(f"{prefixes.get(kind, '')}{arch}" for arch, _, kind in parts)


def serves(target: str, sm: int) -> bool:
    """Whether code for a target of CMake's CUDA_ARCHITECTURES ("90a-real") runs on compute capability `sm` (90).

    Machine code runs on its own major version, from its minor version on; PTX ("-virtual") is compiled by the driver
    for anything later; `f` is for a family (one major version), `a` for exactly one. What cannot be told, as "native",
    counts as served.
    """
    match = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", target)
    if match is None:
        return True
    arch, only, kind = int(match[1]), match[2], match[3]
    if only == "a":
        return sm == arch
    same_major = sm // 10 == arch // 10
    return sm >= arch and (same_major or (kind != "-real" and not only))
