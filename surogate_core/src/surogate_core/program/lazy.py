"""An attribute that is computed when it is first read.

`functools.cached_property` of Python 3.11 takes a lock each time: half a second of a search, which reads a million.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as lazy
else:

    class lazy:
        """The decorator of a method without arguments, which becomes an attribute."""

        def __init__(self, compute: Callable[[Any], Any]) -> None:
            self._compute = compute
            self._name = compute.__name__
            self.__doc__ = compute.__doc__

        def __get__(self, owner: Any, cls: type) -> Any:
            if owner is None:
                return self
            value = owner.__dict__[self._name] = self._compute(owner)
            return value


__all__ = ["lazy"]
