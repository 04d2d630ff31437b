"""The build backend: scikit-build-core, told whether to compile kernels.

SUROGATE_CUDA=on compiles them, or says what is missing; off builds a wheel of Python files alone, for which the
reference path and the plan work; auto, the default, means on where nvcc and a GPU are visible and off elsewhere.
"""

import os
import shutil
import subprocess

from scikit_build_core.build import *  # noqa: F403


def nvcc_is_visible() -> bool:
    return bool(os.environ.get("CUDACXX") or shutil.which("nvcc"))


def gpu_is_visible() -> bool:
    program = shutil.which("nvidia-smi")
    return program is not None and "GPU " in subprocess.run([program, "-L"], capture_output=True, text=True).stdout


def choice() -> str:
    asked = os.environ.get("SUROGATE_CUDA", "auto").lower() or "auto"
    if asked == "auto":
        return "on" if nvcc_is_visible() and gpu_is_visible() else "off"
    if asked in ("on", "1"):
        return "on"
    if asked in ("off", "0"):
        return "off"
    raise SystemExit(f"SUROGATE_CUDA={asked}: expected on, off or auto")


os.environ["SUROGATE_CUDA"] = choice()
