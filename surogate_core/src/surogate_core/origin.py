"""The plugin that provides a definition, so that an error in one of its functions names the plugin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, ConfigDict, Field

from .errors import PluginError, ProgramError, SurogateError, described


@dataclass(frozen=True)
class Origin:
    """The plugin that provides a definition."""

    kind: str
    name: str
    distribution: str
    version: str
    module: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.distribution} {self.version}"

    def failed(self, function: str, cause: BaseException | str) -> PluginError:
        """Return the error to raise if `function` of the definition failed: one line with plugin, function and cause.

        For an exception, the line ends with the innermost file and line of the plugin in its traceback.
        """
        what = cause if isinstance(cause, str) else described_in(cause, self.module)
        return PluginError(f"{self} failed in {function}: {what}")


def described_in(error: BaseException, module: str) -> str:
    """Return what `described` does, and the innermost file and line of the module's package in the traceback."""
    text, place, trace = described(error), "", error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if module and name.partition(".")[0] == module.partition(".")[0]:
            path = Path(trace.tb_frame.f_code.co_filename)
            place = f"{path.parent.name}/{path.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{text} ({place})" if place and place not in text else text


EMITTING: Final[ContextVar[Origin | None]] = ContextVar("EMITTING", default=None)
"""The definition of a plugin whose function runs, and emits ops."""


def _name(text: str) -> str:
    if not text or any(letter.isspace() for letter in text):
        raise ValueError("text without spaces that is not empty")
    return text


Name = Annotated[str, AfterValidator(_name)]
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
STRICT: Final = ConfigDict(strict=True, arbitrary_types_allowed=True)


class Declared:
    """Base of dataclasses of plugins whose fields are checked against their annotations."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(**STRICT, revalidate_instances="always")


@dataclass(frozen=True, kw_only=True)
class Definition(Declared):
    """Base of everything that a plugin defines.

    origin: the plugin that provides it, set by the registry; None for definitions of surogate-core.
    """

    origin: Origin | None = field(default=None, repr=False, compare=False)

    def failed(self, function: str, cause: BaseException | str) -> SurogateError:
        """Return the error to raise if `function` of the definition failed; see `Origin.failed`."""
        if self.origin is not None:
            return self.origin.failed(function, cause)
        return ProgramError(f"{function}: {cause if isinstance(cause, str) else described(cause)}")


@contextmanager
def blaming(origin: Origin | None, function: str) -> Iterator[None]:
    """Turn a ProgramError raised inside into a PluginError of `function` of `origin`; None: leave it unchanged."""
    try:
        yield
    except ProgramError as error:
        if origin is None:
            raise
        raise origin.failed(function, error) from error
