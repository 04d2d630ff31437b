"""The front end of core: the program whose users write keys or arguments and read core's errors.

Core alone uses the names of its own fields. A front end tells its own once in a process, as a program chooses the
language of its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """The words of a front end, and the names that it keeps for itself.

    distribution  the package whose definitions are its own: their errors are not those of a plugin
    settings  {field of core: what users write}, for errors
    keys      kind of a definition -> the keys that users write beside its options, which may have none of them
    package   (kind, folded name) -> the distribution that provides it, for errors about names that nothing provides
    """

    distribution: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    keys: Callable[[str], Collection[str]] = lambda kind: ()
    package: Callable[[str, str], str | None] = lambda kind, name: None


_current = FrontEnd()


def use(front_end: FrontEnd) -> None:
    """Let errors of this process use the names of `front_end`."""
    global _current
    _current = front_end


def front_end() -> FrontEnd:
    return _current


def called(setting: str, otherwise: str | None = None) -> str:
    """Return what users write for a field of core; where no front end says so, `otherwise`, or the field itself."""
    return _current.settings.get(setting, setting if otherwise is None else otherwise)
