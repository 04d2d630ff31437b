"""Entry points of the group `surogate`, and the definitions that they provide."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

CORE: Final = "surogate-core"
"""The distribution whose errors are ours."""

FLAT_OPTIONS: Final = (
    "model",
    "recipe",
    "adapter",
    "weight format",
    "optimizer",
    "loss",
    "offload",
    "launcher",
    "logger",
)
"""Kinds whose options are top-level keys of the YAML file. Those of a format are keys of its dataset's entry."""


class State(StrEnum):
    """The result of loading an entry point."""

    LOADED = "loaded"
    BLOCKED = "blocked"
    BROKEN = "broken"
    DUPLICATE = "duplicate"
    WRONG_API = "wrong API"


@dataclass(frozen=True)
class Plugin:
    """An entry point of the group `surogate`, or a file without a package.

    file: the absolute path of the latter; its distribution is the name of the file, its version a hash of the content.
    If it is not loaded, `reason` is a sentence and `error` the cause.
    """

    name: str
    distribution: str
    version: str
    module: str
    state: State = State.LOADED
    reason: str = ""
    error: BaseException | None = None
    file: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Provided:
    """A definition and the plugin that provides it."""

    kind: str
    name: str
    definition: Any
    plugin: Plugin
