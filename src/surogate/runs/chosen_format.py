"""An export format and one of its types, as a user names them: NAME or NAME:TYPE. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from surogate_core.api import ExportFormatDef
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

FILES = "hf"
"""The format of Hugging Face files in the dtype of the model."""


@dataclass(frozen=True)
class Chosen:
    """A format and one of its types."""

    format: ExportFormatDef
    type: str

    @classmethod
    def of(cls, format: ExportFormatDef) -> Chosen:
        """Return a format and its first type, if it has types."""
        return cls(format, next(iter(format.types), ""))

    def __str__(self) -> str:
        return f"{self.format.name}:{self.type}" if self.type else self.format.name


def chosen_format(registry: Registry, text: str, key: str = "--format") -> Chosen:
    """Return the format that NAME or NAME:TYPE selects. Raises PluginError or ConfigError if there is none.

    key: what the user has written it after, for messages.
    """
    name, colon, kind = text.partition(":")
    format = registry.export_format(name)
    if not colon:
        return Chosen.of(format)
    if kind not in format.types:
        types = ", ".join(f"{format.name}:{each}" for each in format.types)
        raise ConfigError(
            f"{key} {text}: {format.name} has "
            + (f"no type {kind!r}. Use one of {types}." if types else f"no types. Use {key} {format.name}.")
        )
    return Chosen(format, kind)
