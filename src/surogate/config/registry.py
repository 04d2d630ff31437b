"""The part of the plugin registry that the configuration uses. `plugins/registry.py` implements it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from pydantic import BaseModel

from surogate_core.errors import PluginError

if TYPE_CHECKING:
    from surogate_core.api import DatasetFormatDef, LauncherDef, WeightFormatDef


class Registry(Protocol):
    """Definitions of the installed plugins, by kind (recipe, optimizer, logger, format, ...) and name."""

    @property
    def option_conflicts(self) -> Mapping[str, str]:
        """{key that the options of two plugins declare differently: a sentence that names both}."""

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        """Return {(kind, name): model of its options}."""

    def dataset_formats(self) -> Mapping[str, DatasetFormatDef]:
        """Return {name: dataset type}."""

    def weight_formats(self) -> Mapping[str, WeightFormatDef]:
        """Return {name: form in which frozen matrices can be stored}."""

    def launchers(self) -> Mapping[str, LauncherDef]:
        """Return {name: what joins the processes of a run}."""

    def names(self, kind: str) -> Sequence[str]:
        """Return the names of the usable definitions of a kind."""

    def failed(self, kind: str, name: str, function: str, cause: BaseException) -> PluginError | None:
        """Return `cause` as an error that names the plugin whose code raised it; None if core raised it."""

    def missing(self, kind: str, name: str) -> PluginError:
        """Return the error to raise for a name that no working plugin provides."""
