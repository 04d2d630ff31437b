"""Where NVIDIA's libraries lie among the installed packages. The compiled module asks when it is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def directories() -> list[str]:
    """Every `lib` folder of the `nvidia-*` wheels that this Python imports from. Imports none of them.

    nvidia/cu13/lib has the toolkit's libraries (cuBLAS, NVRTC, the runtime), nvidia/<library>/lib the others. `nvidia`
    is a namespace package: it has one location for each folder of sys.path that holds some of it.
    """
    spec = importlib.util.find_spec("nvidia")
    locations = spec.submodule_search_locations if spec is not None else None
    return [str(folder) for location in locations or () for folder in sorted(Path(location).glob("*/lib"))]
