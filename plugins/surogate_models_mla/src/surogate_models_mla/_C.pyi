"""The compiled module, built from csrc/; a wheel that was built without CUDA has none."""

from typing import Any

def __getattr__(name: str) -> Any: ...
