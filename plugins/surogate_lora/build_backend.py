"""The build backend: scikit-build-core, told whether to compile kernels, with which nvcc and for which GPUs.

SUROGATE_CUDA=on compiles them, or says what is missing; off builds a wheel of Python files alone, for which the
reference path and the plan work; auto, the default, means on where a GPU and nvcc are visible and off elsewhere.

nvcc is that of CUDACXX, of PATH, of $CUDA_HOME (else /usr/local/cuda), or of the wheels beside this Python. pip fetches
these wheels into an isolated build where no other nvcc is found; `python build_backend.py` prints what is missing.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import scikit_build_core.build as scikit_build
from scikit_build_core.build import *  # noqa: F403

NVCC_WHEELS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
NVCC_RELEASE = "13.0"


def kernels_are_wanted():
    """SUROGATE_CUDA=on, or auto where a GPU is visible."""
    if ASKED == "auto":
        return bool(compute_capabilities())
    if ASKED in ("on", "1"):
        return True
    if ASKED in ("off", "0"):
        return False
    raise SystemExit(f"SUROGATE_CUDA={ASKED}: expected on, off or auto")


def compute_capabilities():
    """Of the GPUs here, as nvidia-smi prints them: ["9.0"]."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True)
    return sorted({line.strip() for line in answer.stdout.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())})


def architectures(capabilities):
    """CUDAARCHS for these GPUs: 90a for Hopper, the family from Blackwell on, else the GPU's own; "" for older ones."""
    pairs = [tuple(map(int, capability.split("."))) for capability in capabilities]
    served = [(major, minor) for major, minor in pairs if major >= 8]
    names = ("90a" if m == 9 else f"{m}0f" if m > 9 else f"{m}{minor}" for m, minor in served)
    return ";".join(f"{name}-real" for name in dict.fromkeys(names))


def nvcc_of_toolkit():
    """The nvcc that somebody installed on this machine; None without one."""
    named = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if named:
        return Path(named)
    root = Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")
    return nvcc if os.access(nvcc := root / "bin/nvcc", os.X_OK) else None


def nvcc_of_wheels():
    """The nvcc that pip installed beside this Python; None without it."""
    paths = (Path(folder, "nvidia/cu13/bin/nvcc") for folder in sys.path)  # an isolated build has folders of its own
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def missing_wheels():
    """Requirements that bring an nvcc, of the release of torch's runtime, where one is wanted and none is found."""
    if not WANTED or nvcc_of_toolkit() or nvcc_of_wheels():
        return []
    try:
        release = ".".join(version("nvidia-cuda-runtime").split(".")[:2])
    except PackageNotFoundError:
        release = NVCC_RELEASE
    return [f"{name}=={release}.*" for name in NVCC_WHEELS]


def decide():
    """Set SUROGATE_CUDA to on or off, and what CMake needs to use an nvcc that is not on PATH."""
    found = nvcc_of_toolkit() or nvcc_of_wheels()
    os.environ["SUROGATE_CUDA"] = "on" if WANTED and (found or ASKED != "auto") else "off"
    if WANTED and found:
        os.environ["CUDACXX"] = str(found)
        if found == nvcc_of_wheels():  # which have lib where nvcc looks for lib64
            libraries = (str(found.parents[1] / "lib"), os.environ.get("LIBRARY_PATH"))
            os.environ["LIBRARY_PATH"] = ":".join(filter(None, libraries))


def requirements(ask, settings):
    """What pip installs before it builds: of scikit-build-core, nvcc, and core's CMake files outside of a checkout."""
    wheels = missing_wheels()
    if wheels:
        os.environ["SUROGATE_CUDA"] = "on"  # as it will be for the build, which sees them
    folders = Path(__file__).resolve().parents[1:3]
    alone = os.environ["SUROGATE_CUDA"] == "on" and not any((f / "surogate_core").is_dir() for f in folders)
    return [*ask(settings), *wheels, *(["surogate-core>=0.1,<0.2"] if alone else [])]


def get_requires_for_build_wheel(config_settings=None):
    return requirements(scikit_build.get_requires_for_build_wheel, config_settings)


def get_requires_for_build_editable(config_settings=None):
    return requirements(scikit_build.get_requires_for_build_editable, config_settings)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    """An editable install serves this machine alone: its kernels are compiled for the GPUs that are visible here."""
    if os.environ["SUROGATE_CUDA"] == "on" and (visible := architectures(compute_capabilities())):
        os.environ.setdefault("CUDAARCHS", visible)
    return scikit_build.build_editable(wheel_directory, config_settings, metadata_directory)


ASKED = os.environ.get("SUROGATE_CUDA", "").lower() or "auto"
WANTED = kernels_are_wanted()
if __name__ == "__main__":
    print(*missing_wheels())
else:
    decide()
