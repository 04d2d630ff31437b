"""The run.yaml beside an adapter, which may have come with it from anywhere.

What it says is data. The Python files that it names as `plugins` are never imported: a user who trusts them names a
config on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from reprlib import repr as brief
from typing import Any

from surogate_core.api.destination import RUN_FILE
from surogate_core.api.regular_file import is_regular
from surogate_core.errors import ConfigError, PluginError

from ..config.plugin_files import KEY
from ..config.yaml import read_yaml


@dataclass(frozen=True)
class FoundRun:
    """The resolved config of the run that wrote an adapter.

    named: the user gave its path on the command line, so that its plugins are loaded.
    """

    path: Path
    named: bool = False

    @cached_property
    def keys(self) -> Mapping[str, Any]:
        """The keys in the file. Raises ConfigError if it cannot be read."""
        return read_yaml(self.path)

    @property
    def not_loaded(self) -> str:
        """A sentence on plugins that the file names and nobody loads, and what to do; "" if there are none."""
        files: Any = ()
        with suppress(ConfigError):
            files = () if self.named else self.keys.get(KEY) or ()
        if not files:
            return ""
        text = ", ".join(map(str, files)) if isinstance(files, list) else str(files)
        return (
            f"{self.path} names plugins ({brief(text)}), which are not loaded because that file was found, not named: "
            f"if you trust them, --config {self.path}."
        )

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Add `not_loaded` to errors of the block, which may need such a plugin."""
        try:
            yield
        except (ConfigError, PluginError) as error:
            if not (said := self.not_loaded):
                raise
            raise type(error)(f"{error} {said}") from None


def found_run(folder: Path) -> FoundRun | None:
    """Return the resolved config of the run that wrote the adapter in a folder; None if it is not next to it."""
    return next((FoundRun(p) for p in (folder / RUN_FILE, folder.parent / RUN_FILE) if is_regular(p)), None)
