"""The run that is checked: its model, its tokenizer and conversations of its data."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from surogate import run
from surogate.checkpoints.export_source import Found, find_source
from surogate.checkpoints.found_run import FoundRun, found_run
from surogate.config.dataset_entry import DatasetEntry
from surogate.config.load import LoadedConfig, load_config
from surogate.config.plugin_files import KEY, plugin_files, read_run
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate.data.chats import Chat, chats_of, places_of
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.registry import Registry

_VARIABLES = "chat_template_kwargs"


@dataclass(frozen=True)
class CheckedRun:
    """The output of a run.

    named   the folder that the user has named
    found   the model or adapter in it
    config  the run's own; None: there is no run.yaml
    """

    named: Path
    found: Found
    registry: Registry
    config: LoadedConfig | None

    def chats(self, rows: Path | None, most: int) -> tuple[list[Chat], RowTokenizer]:
        """Return conversations, and the tokenizer that they were trained with.

        rows: a file of conversations; None: the validation data of the run. Raises ConfigError if there are none.
        """
        if rows is not None:
            entries, tokenizer, places = self._of_file(rows), RowTokenizer(self.found.folder, "--run"), None
            scale = self.config.config.loss_scale if self.config else "default"
        else:
            if self.config is None:
                raise ConfigError(f"{self.named}: has no run.yaml that names data. Give conversations with --rows.")
            config = self.config.config
            data = run.tokenize(self.config, notice=lambda line: None)
            if data.validation is None:
                raise ConfigError(
                    f"{self.config.source}: the run has no validation data. Give conversations with --rows."
                )
            key = "validation_datasets" if config.validation_datasets else "datasets"
            given: Sequence[DatasetEntry] = getattr(config, key)
            entries = {f"{key}.{index}": entry for index, entry in enumerate(given)}
            tokenizer, places, scale = data.tokenizer, places_of(data.validation, most), config.loss_scale
        chats = chats_of(entries, self.registry.dataset_formats(), scale, tokenizer, most, places)
        if not chats:
            where = rows or (self.config and self.config.source)
            raise ConfigError(
                f"{where}: has no conversation that is trained (type: conversation). Give some with --rows."
            )
        return chats, tokenizer

    def _of_file(self, rows: Path) -> dict[str, DatasetEntry]:
        """Return the entry of a file, with the variables of the chat template that the run sets."""
        given = self.config.config.datasets if self.config else ()
        variables = next((found for entry in given if (found := entry.options.get(_VARIABLES))), None)
        options = {_VARIABLES: variables} if variables else {}
        entry = {"path": str(rows), "type": "conversation", "options": options}
        return {"--rows": DatasetEntry.model_validate(entry)}


def open_checked(named: Path, config: Path | None) -> CheckedRun:
    """Return the run that has written a folder.

    config: the YAML file of the run, whose `plugins` are loaded; those of a run.yaml that is only found are not.
    Raises ConfigError if the folder holds no model and no adapter.
    """
    written = FoundRun(config, named=True) if config else found_run(named)
    registry = load_registry(files=plugin_files(read_run(config, ())) if config else ())
    with written.explaining() if written else nullcontext():
        found = find_source(str(named), registry)
        loaded = None
        if written:
            keys = {name: value for name, value in written.keys.items() if name != KEY or written.named}
            loaded = load_config(keys, registry=registry, source=str(written.path))
    return CheckedRun(named, found, registry, loaded)
