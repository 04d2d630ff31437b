"""The build backend of packages with kernels: scikit-build-core, after a decision whether and how to compile.

SUROGATE_CUDA=on compiles the kernels and fails if something is missing. `off` builds a wheel of Python files only, with
which plans and the reference path work. `auto`, the default, is `on` where a GPU and nvcc are visible, otherwise `off`.

nvcc is searched in CUDACXX, PATH, $CUDA_HOME (by default /usr/local/cuda), and the wheels installed in this Python. If
there is none, pip installs these wheels into an isolated build; `python -m surogate_build.backend` prints the missing
ones.

    [build-system]
    requires = ["surogate-build>=0.2,<0.3"]
    build-backend = "surogate_build.backend"

The environment variable SUROGATE_CMAKE_DIR tells CMakeLists.txt where SurogateKernels.cmake is.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import scikit_build_core.build as scikit_build
from scikit_build_core.build import *  # noqa: F403

NVCC_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
NVCC_RELEASE = "13.0"

Settings = dict[str, Any] | None


def kernels_are_wanted() -> bool:
    """Return whether SUROGATE_CUDA is on, or auto where a GPU is visible."""
    if ASKED == "auto":
        return bool(compute_capabilities())
    if ASKED in ("on", "1"):
        return True
    if ASKED in ("off", "0"):
        return False
    raise SystemExit(f"SUROGATE_CUDA={ASKED}: expected on, off or auto")


def compute_capabilities() -> list[str]:
    """Return those of the visible GPUs as nvidia-smi prints them: ["9.0"]."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return sorted({line.strip() for line in answer.stdout.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())})


def architectures(capabilities: list[str]) -> str:
    """Return CUDAARCHS for these GPUs: "80-real;90-real"; nothing for GPUs before SM80."""
    numbers = dict.fromkeys(int(capability.replace(".", "")) for capability in capabilities)
    return ";".join(f"{number}-real" for number in numbers if number >= 80)


def nvcc_of_toolkit() -> Path | None:
    """Return the nvcc of a CUDA toolkit, or None."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if named:
        return Path(named)
    root = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    return nvcc if os.access(nvcc := root / "bin/nvcc", os.X_OK) else None


def nvcc_of_wheels() -> Path | None:
    """Return the nvcc that pip has installed in this Python, or None."""
    paths = (Path(folder, "nvidia/cu13/bin/nvcc") for folder in sys.path)  # an isolated build has folders of its own
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def missing_wheels() -> list[str]:
    """Return requirements for an nvcc of the release of torch's runtime, if kernels are wanted and there is no nvcc."""
    if not WANTED or nvcc_of_toolkit() or nvcc_of_wheels():
        return []
    try:
        release = ".".join(version("nvidia-cuda-runtime").split(".")[:2])
    except PackageNotFoundError:
        release = NVCC_RELEASE
    return [f"{name}=={release}.*" for name in NVCC_WHEELS]


def decide() -> None:
    """Set SUROGATE_CUDA to on or off, and the variables that CMake needs to find nvcc and SurogateKernels.cmake."""
    found = nvcc_of_toolkit() or nvcc_of_wheels()
    os.environ["SUROGATE_CUDA"] = "on" if WANTED and (found or ASKED != "auto") else "off"
    os.environ["SUROGATE_CMAKE_DIR"] = str(Path(__file__).resolve().parent / "cmake")
    if WANTED and found:
        os.environ["CUDACXX"] = str(found)
        if found == nvcc_of_wheels():  # their libraries are in lib, nvcc searches lib64
            libraries = (str(found.parents[1] / "lib"), os.environ.get("LIBRARY_PATH"))
            os.environ["LIBRARY_PATH"] = ":".join(filter(None, libraries))


def requirements(ask: Callable[[Settings], list[str]], settings: Settings) -> list[str]:
    """Return what pip installs before the build: requirements of scikit-build-core, and nvcc."""
    wheels = missing_wheels()
    if wheels:
        os.environ["SUROGATE_CUDA"] = "on"  # the build will find them
    return [*ask(settings), *wheels]


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:  # type: ignore[no-redef]
    return requirements(scikit_build.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:  # type: ignore[no-redef]
    return requirements(scikit_build.get_requires_for_build_editable, config_settings)


def build_editable(  # type: ignore[no-redef]
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    """Build an editable wheel. It serves this machine only, so kernels are compiled for the visible GPUs."""
    if os.environ["SUROGATE_CUDA"] == "on" and (visible := architectures(compute_capabilities())):
        os.environ.setdefault("CUDAARCHS", visible)
    return scikit_build.build_editable(wheel_directory, config_settings, metadata_directory)


ASKED = os.environ.get("SUROGATE_CUDA", "").lower() or "auto"
WANTED = kernels_are_wanted()
if __name__ == "__main__":
    print(*missing_wheels())
else:
    decide()
