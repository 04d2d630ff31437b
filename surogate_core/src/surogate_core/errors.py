"""Errors, typed by who must act. The command line turns each into its exit code."""

from __future__ import annotations


class SurogateError(Exception):
    """Base of every error that Surogate raises on purpose. The message says what happened, where, what to do."""

    exit_code = 1


class ConfigError(SurogateError):
    """The user's input cannot be used: a key, a file, a checkpoint, a plan that does not fit. Exit 2, no traceback."""

    exit_code = 2


class PluginError(SurogateError):
    """A plugin that this run needs is missing, broken or in conflict. Exit 2, no traceback."""

    exit_code = 2

    def __init__(self, message: str, *, distribution: str = "", version: str = "", hook: str = "") -> None:
        super().__init__(message)
        self.distribution = distribution
        self.version = version
        self.hook = hook

    def reworded(self, message: str) -> PluginError:
        """The same error, of the same cause, with another message."""
        error = PluginError(message, distribution=self.distribution, version=self.version, hook=self.hook)
        error.__cause__ = self.__cause__
        return error


class ProgramError(SurogateError):
    """A program breaks its own rules: a fault of ours or of a plugin's, not of the user's. Exit 1 with a traceback."""

    exit_code = 1


class DisconnectedError(ProgramError):
    """A loss does not depend on params that are to be trained."""


class RunStopped(SurogateError):
    """The run stopped itself (non-finite limit, disk full, lost device); everything complete is saved. Exit 3."""

    exit_code = 3


class NonFiniteError(RunStopped):
    """An op of a checked run wrote NaN or inf. weights_whole: no op had begun to change the weights."""

    def __init__(self, message: str, *, weights_whole: bool) -> None:
        super().__init__(message)
        self.weights_whole = weights_whole
