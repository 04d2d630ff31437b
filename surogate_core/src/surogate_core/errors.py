"""Exceptions, by who must act. The command line turns each into its exit code."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PASSWORD = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")


class SurogateError(Exception):
    """Base of all errors that Surogate raises on purpose. The message says what happened, where, and what to do.

    told: another process of the run shows the message, so this one need not.
    """

    exit_code = 1
    told = False

    def __init__(self, message: str = "") -> None:
        """A name, password or token before the @ of a URL is left out of the message."""
        super().__init__(without_passwords(message))


class ConfigError(SurogateError):
    """Input of the user cannot be used: a key, a file, a checkpoint, a plan that does not fit. Exit 2, no traceback."""

    exit_code = 2

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        """problems: each by itself, if the message has several."""
        super().__init__(message)
        self.problems = problems


class PluginError(SurogateError):
    """A plugin that this run needs is missing, broken or in conflict; the message names it. Exit 2, no traceback."""

    exit_code = 2


class ProgramError(SurogateError):
    """A program violates its rules: a bug in core or in a plugin, not a mistake of the user. Exit 1, traceback."""

    exit_code = 1


def need(condition: bool, message: str) -> None:
    """Raise ProgramError with `message` unless `condition`."""
    if not condition:
        raise ProgramError(message)


class DisconnectedError(ProgramError):
    """No gradient reaches the parameters to be trained. cut_by: the kind of op whose vjp gave None there, or ""."""

    def __init__(self, message: str, cut_by: str = "") -> None:
        super().__init__(message)
        self.cut_by = cut_by


class RunStopped(SurogateError):
    """The run stopped itself (limit of non-finite steps, full disk, lost device). What is complete is saved. Exit 3."""

    exit_code = 3


class RunLost(RunStopped):
    """A device, a process or what connects them failed or stood still: nobody's input is wrong. Exit 3."""


class NonFiniteError(RunStopped):
    """An op wrote NaN or inf in a run with `check_finite`. weights_whole: no op had started to change the weights."""

    def __init__(self, message: str, *, weights_whole: bool) -> None:
        super().__init__(message)
        self.weights_whole = weights_whole


def without_passwords(text: str) -> str:
    """Return a text without what stands before the @ of URLs."""
    return _PASSWORD.sub("***", text)


_LONGEST_CAUSE = 600  # characters of the message of another library


def described(error: BaseException) -> str:
    """Return type and message on one line, without passwords of URLs; of a ProgramError, the message alone."""
    message = without_passwords(" ".join(str(error).split()))[:_LONGEST_CAUSE]
    if isinstance(error, ProgramError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
