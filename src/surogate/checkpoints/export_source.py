"""The model that `surogate export` is given: found in a folder, its tensors opened, the files beside them written.

A folder may be a model, a checkpoint, an adapter, or the output of a run with one of these in it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api.destination import MANIFEST
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

from ..hub.config_json import QUANTIZATION, read_config, refused_quantized
from ..hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, find_local, looks_like_repo, resolve_model_dir
from ..hub.generation_config import GENERATION_CONFIG, stop_ids
from ..runs.published_form import form_of
from ..runs.run import named_model
from .adapter import ADAPTER_FOLDER, MERGED_FOLDER, Merging
from .base_files import moved_in, names_of_base
from .folders import list_checkpoints

if TYPE_CHECKING:
    from surogate_core.api import HFTensor

    from .formed_weights import FormedWeights
    from .matrix_codec import Matrices
    from .model_tensors import ModelTensor

CONFIG = "config.json"
_DTYPE = "bf16"
"""The dtype that weights in a checkpoint form are read in."""


@dataclass(frozen=True)
class Found:
    """A folder to export. checkpoint: a run has saved it. adapter: it holds an adapter, else a model."""

    folder: Path
    checkpoint: bool
    adapter: bool


def find_source(named: str, registry: Registry, where: str = "surogate export") -> Found:
    """Return what a folder, or a name on the hub, holds. Raises ConfigError if it is nothing that can be exported.

    where: the beginning of the message if the hub does not have it.
    """
    folder = find_local(named)
    if folder is None and looks_like_repo(named):
        patterns = [*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES, *sorted(_adapter_files(registry))]
        downloaded = resolve_model_dir(named, patterns, where)
        return Found(downloaded, checkpoint=False, adapter=_holds_adapter(downloaded, registry))
    if folder is None or not folder.is_dir():
        fault = "does not exist" if folder is None else "is a file"
        raise ConfigError(f"{named}: {fault}. Name {_WANTED}.")
    if (folder / MANIFEST).is_file():
        return Found(folder, checkpoint=True, adapter=not (folder / CONFIG).is_file())
    for place in (folder, folder / MERGED_FOLDER, folder / ADAPTER_FOLDER):
        if _holds_adapter(place, registry):
            return Found(place, checkpoint=False, adapter=True)
        if (place / CONFIG).is_file():
            return Found(place, checkpoint=False, adapter=False)
    if checkpoints := list_checkpoints(folder):
        raise ConfigError(f"{folder}: is a folder of checkpoints. Name one: {checkpoints[-1]}.")
    raise ConfigError(f"{folder}: holds no model, no checkpoint and no adapter. Name {_WANTED}.")


_WANTED = "the output of a run, a checkpoint such as output/step_00000050, a model or an adapter"


def _holds_adapter(folder: Path, registry: Registry) -> bool:
    return any((folder / file).is_file() for file in _adapter_files(registry))


def _adapter_files(registry: Registry) -> set[str]:
    return {registry.adapter(name).config_file for name in registry.names("adapter")} | {"adapter_config.json"}


@dataclass(frozen=True)
class Source:
    """A model to be exported.

    model_dir  the folder of its config.json, tokenizer and weights; of an adapter, that of its base
    formed     the weights that the files hold in a checkpoint form
    merging    the adapter that is merged into them; None: there is none
    moved      tensors in another order than the param's, of weights that several processes saved (`model_ranges`)
    stacks     {name: its matrices} of tensors that are opened as their matrices, each by itself
    """

    model_dir: Path
    formed: FormedWeights
    merging: Merging | None = None
    moved: Mapping[str, HFTensor] = field(default_factory=dict)
    stacks: Mapping[str, Matrices] = field(default_factory=dict)

    @property
    def read_in(self) -> str | None:
        """The dtype that weights in a checkpoint form are read in; None: they are in none."""
        return None if self.formed.form is None else _DTYPE

    @contextmanager
    def tensors(self) -> Iterator[dict[str, ModelTensor]]:
        """Open the tensors. Raises ConfigError if the adapter changes others."""
        from .hf import refuse_absent
        from .model_ranges import range_tensors
        from .model_tensors import model_tensors
        from .stored_weights import RANGES_FOLDER

        if (self.model_dir / RANGES_FOLDER).is_dir():
            tensors = range_tensors(self.model_dir, self.moved)
            yield {name: each for whole in tensors.values() for name, each in self._opened(whole).items()}
            return
        changes, needed = self._changes()
        with model_tensors(self.model_dir, changes, self.formed, _DTYPE) as tensors:
            refuse_absent(self.model_dir, needed, tensors)
            yield {name: each for whole in tensors.values() for name, each in self._opened(whole).items()}

    def _opened(self, tensor: ModelTensor) -> dict[str, ModelTensor]:
        """Return a tensor, or the matrices of a stack, by name."""
        from .model_tensors import in_stack

        stack = self.stacks.get(tensor.name)
        if stack is None:
            return {tensor.name: tensor}
        return {matrix.name: in_stack(tensor, stack.tensor, stack.each, i) for i, matrix in enumerate(stack.each)}

    def by_matrix(self, registry: Registry) -> Source:
        """Return the model with a matrix for each expert and projection, where it is published so too.

        Raises ConfigError if the adapter changes a tensor that holds several.
        """
        from .split_stacks import refuse_changed, split_stacks

        stacks = split_stacks(self.model_dir, registry)
        refuse_changed(stacks, self._changes()[0])
        return replace(self, stacks=stacks)

    def _changes(self) -> tuple[Mapping[str, Callable[[Any], Any]], set[str]]:
        if self.merging is None:
            return {}, set()
        of, merge = self.merging.names.of, self.merging.merge
        changes = {of(name): change for name, change in merge.changes.items()}
        return changes, changes.keys() - set(map(of, merge.may_lack))

    def write_beside(self, folder: Path) -> None:
        """Write config.json, generation config, tokenizer and chat template of the model into an empty folder.

        Generation stops at what the adapter's training, or the chat template, ends turns with.
        """
        from .hf import write_files_beside, write_stops

        write_files_beside(folder, self.model_dir, self.merging.adapter_dir if self.merging else None, self.read_in)
        if ends := turn_ends(folder):
            write_stops(folder / GENERATION_CONFIG, ends, folder)


def open_model(model_dir: Path, registry: Registry) -> Source:
    """Return the model in a folder. Raises ConfigError if it is quantized in what no checkpoint form reads."""
    from .formed_weights import FormedWeights, all_formed
    from .stored_weights import locate

    config = read_config(model_dir)
    form = form_of(registry, model_dir, config)
    if form is None:
        if QUANTIZATION in config:
            raise refused_quantized(model_dir, "They cannot be exported in another form")
        return Source(model_dir, FormedWeights(model_dir), moved=moved_in_ranges(model_dir, registry))
    model, dims = named_model(config, registry, model_dir)
    names = names_of_base(model_dir, config, registry)
    tensors = [tensor for m in names.maps(model.weights(dims)) for tensor in m.tensors]
    return Source(model_dir, all_formed(model_dir, locate(model_dir), form, tensors))


def moved_in_ranges(folder: Path, registry: Registry) -> Mapping[str, HFTensor]:
    """Return the tensors that a checkpoint has in ranges of the rows of their params, with their layouts.

    Raises ConfigError if no plugin builds the model.
    """
    from .model_ranges import in_rows

    names = in_rows(folder)
    return moved_in(folder, names, registry) if names else {}


def open_merged(merging: Merging) -> Source:
    """Return the model that merging an adapter makes."""
    from .formed_weights import FormedWeights

    return Source(merging.base_dir, merging.formed or FormedWeights(merging.base_dir), merging)


def turn_ends(folder: Path) -> tuple[int, ...]:
    """Return the tokens with which the chat template in a folder ends an answer; none without one."""
    from ..data.chat.row_tokenizer import RowTokenizer
    from ..data.turn_ends import template_ends

    try:
        return template_ends(RowTokenizer(folder))
    except ConfigError:  # the tokenizer's files are missing, or are for what only reads them
        return ()


def stops_of(folder: Path) -> tuple[list[int], list[int]]:
    """Return the tokens at which generation stops, and those of them that end a turn."""
    stops = stop_ids(folder)
    return stops, [token for token in turn_ends(folder) if token in stops]


def copy_beside(beside: Path, folder: Path) -> None:
    """Copy what `write_beside` has written."""
    shutil.copytree(beside, folder, dirs_exist_ok=True)
