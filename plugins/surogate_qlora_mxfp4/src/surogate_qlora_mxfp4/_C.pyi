"""The compiled module, built from csrc/. A wheel that is built without CUDA does not contain it."""

from typing import Any

def __getattr__(name: str) -> Any: ...
