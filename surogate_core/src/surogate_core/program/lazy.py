"""An attribute that is computed when it is first read.

`functools.cached_property` of Python 3.11 takes a lock each time: half a second of a search, which reads a million.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["lazy"]

if TYPE_CHECKING:
    from functools import cached_property as lazy
else:

    class lazy:
        def __init__(self, compute):
            self._compute = compute
            self.__doc__ = compute.__doc__

        def __get__(self, owner, cls):
            if owner is None:
                return self
            value = owner.__dict__[self._compute.__name__] = self._compute(owner)
            return value
