"""For packages with kernels: whether the compiled module exists and supports the GPUs of this machine.

surogate_kernels, surogate_diagnose = compiled_hooks("my_package", KERNELS)

SurogateKernels.cmake builds the module `my_package._C`, which can be imported without a GPU and without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from . import Finding, KernelDef, SystemInfo
from .hooks import hookimpl, provides

__all__ = ["aligned", "compiled_hooks", "diagnose", "groups_bytes"]

INSTALL = "install it again with SUROGATE_CUDA=on, which uses nvcc of CUDA 13 from the PATH or from NVIDIA's wheels"

HEADERS: Final = 1
"""Version of the headers of surogate-build that modules must be compiled with: <surogate/version.h>."""

_ABSENT: Final = "is not compiled"


def aligned(nbytes: int) -> int:
    """Round up to where the next part of a workspace begins. Must match <surogate/workspace.h>."""
    return -(-nbytes // 256) * 256


def groups_bytes(groups: int) -> int:
    """Return the workspace of products of `groups` of rows by CUTLASS. Must match <surogate/groups.h>."""
    return 160 * 8 * 128 + aligned(12 * groups) + 10 * aligned(8 * groups)


def compiled_hooks(package: str, kernels: Iterable[KernelDef]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the hooks `surogate_kernels` and `surogate_diagnose` of a package, whose compiled module is `_C`."""
    compiled = tuple(replace(kernel, module=f"{package}._C") for kernel in kernels)
    return provides(compiled), hookimpl(lambda system: diagnose(package, system))


def problem(module: str, sm: int) -> str:
    """Return why a compiled module does not support compute capability `sm`, such as "is not compiled", or ""."""
    info = _info(module)
    if isinstance(info, str):
        return info
    targets = info["architectures"]
    return "" if any(serves(target, sm) for target in targets) else f"is compiled for {_shown(targets)}"


def diagnose(package: str, system: SystemInfo) -> list[Finding]:
    """Return findings about the compiled module of `package`. Never raises."""
    gpus = [gpu for gpu in system.gpus if "error" not in gpu]
    info = _info(f"{package}._C")
    if info == _ABSENT:
        if not gpus:
            return [Finding("ok", package, "kernels are not compiled, which is fine without a GPU")]
        return [Finding("warning", package, "kernels are not compiled, so its ops cannot run on a GPU", INSTALL)]
    if isinstance(info, str):
        return [Finding("error" if gpus else "warning", package, f"the compiled module {info}", INSTALL)]
    return list(_targets(package, info, {gpu["sm"] for gpu in gpus if gpu.get("sm")}))


def _info(module: str) -> Mapping[str, Any] | str:
    """Return `build_info` of a compiled module, or why it cannot be used."""
    try:
        if find_spec(module) is None:
            return _ABSENT
        info = import_module(module).build_info()
        found = info.get("headers", 0)  # modules had no number before version 1
        if found == HEADERS:
            return {**info, "architectures": list(info["architectures"])}
    except Exception as error:  # an ImportError, or any error of a damaged file
        return f"does not load: {type(error).__name__}: {error}"
    remedy = "; update surogate-core" if found > HEADERS else ""
    return f"has version {found} of the headers of surogate-build, surogate-core needs {HEADERS}{remedy}"


def _targets(package: str, info: Mapping[str, Any], present: set[int]) -> Iterator[Finding]:
    """Yield the compiled targets, and the GPUs that they do not support. It is an error if they support no GPU."""
    targets = info["architectures"]
    yield Finding("ok", package, f"kernels compiled by CUDA {info['cuda']} for {_shown(targets)}")
    unsupported = sorted(sm for sm in present if not any(serves(target, sm) for target in targets))
    if unsupported:
        names = ", ".join(f"SM{sm}" for sm in unsupported)
        archs = ";".join(f"{sm}-real" for sm in unsupported)
        level = "error" if len(unsupported) == len(present) else "warning"
        remedy = f"{INSTALL}, and CUDAARCHS='{archs}'; or hide that GPU by CUDA_VISIBLE_DEVICES"
        yield Finding(level, package, f"no kernel runs on the {names} of this machine", remedy)


def _shown(targets: list[str]) -> str:
    """["80-real", "90a-real", "90-virtual"] -> "SM80, SM90a, PTX 90"."""
    prefixes = {"real": "SM", "virtual": "PTX "}
    parts = [target.partition("-") for target in targets]
    return ", ".join(f"{prefixes.get(kind, '')}{arch}" for arch, _, kind in parts)


def serves(target: str, sm: int) -> bool:
    """Return whether code for a target of CMake's CUDA_ARCHITECTURES ("90a-real") runs on compute capability `sm` (90).

    Machine code runs on the same major version with an equal or later minor version. The driver compiles PTX
    ("-virtual") for any later version. `f` restricts code to one major version, `a` to exactly one version. Other
    targets, such as "native", are assumed to run.
    """
    match = re.fullmatch(r"(\d+)([af]?)(-real|-virtual)?", target)
    if match is None:
        return True
    arch, only, kind = int(match[1]), match[2], match[3]
    if only == "a":
        return sm == arch
    same_major = sm // 10 == arch // 10
    return sm >= arch and (same_major or (kind != "-real" and not only))
