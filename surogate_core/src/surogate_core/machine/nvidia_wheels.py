"""Locations of NVIDIA's libraries in the installed packages. Compiled modules query them when they are imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def library_dirs() -> list[str]:
    """Return every `lib` folder of the installed `nvidia-*` wheels, without importing them.

    nvidia/cu13/lib contains the libraries of the toolkit (cuBLAS, NVRTC, the runtime), nvidia/<library>/lib the others.
    `nvidia` is a namespace package with one location for each folder of sys.path that contains a part of it.
    """
    spec = importlib.util.find_spec("nvidia")
    locations = spec.submodule_search_locations if spec is not None else None
    return [str(folder) for location in locations or () for folder in sorted(Path(location).glob("*/lib"))]
