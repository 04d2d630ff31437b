"""The files of a model that writes text: a model, or an adapter with its base. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from surogate_core.api import CAUSAL_LM
from surogate_core.api.models import IMAGE_TEXT_TO_TEXT
from surogate_core.api.peft import PEFT_CONFIG, PEFT_TASKS
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

from ..checkpoints.adapter import kind_of_adapter
from ..checkpoints.export_source import find_source, turn_ends
from ..checkpoints.trained_base import check_base
from ..data.chat.row_tokenizer import RowTokenizer
from ..hub.config_json import read_config, read_json, text_part
from ..hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, find_local, resolve_model_dir
from ..hub.generation_config import stop_ids

_FILES: Final = (*CONFIG_FILES, *TOKENIZER_FILES, *WEIGHT_FILES)
_CLASSES: Final = {"ForCausalLM": CAUSAL_LM, "ForConditionalGeneration": IMAGE_TEXT_TO_TEXT}
"""End of an architecture's name -> the class of transformers that loads it, of those that write text."""
_WRITE: Final = {task for name, task in PEFT_TASKS.items() if name in _CLASSES.values()}


@dataclass(frozen=True)
class ModelFiles:
    """A model that writes text, and the adapter on it, as PEFT reads it.

    loaded_by    the class of transformers that loads the model
    adapter_dir  None: there is no adapter
    """

    model_dir: Path
    loaded_by: str
    adapter_dir: Path | None = None

    def __str__(self) -> str:
        return f"{self.model_dir}" + (f" with {self.adapter_dir}" if self.adapter_dir else "")

    @cached_property
    def tokenizer(self) -> RowTokenizer:
        """The tokenizer of the adapter, if its folder has one, else that of the model. Raises ConfigError."""
        return RowTokenizer(self.tokenizer_dir, str(self.adapter_dir or self.model_dir))

    @property
    def tokenizer_dir(self) -> Path:
        own = self.adapter_dir
        return own if own is not None and (own / "tokenizer.json").is_file() else self.model_dir

    @cached_property
    def longest(self) -> int | None:
        """Most tokens that the model reads; None if its config.json does not say."""
        positions = text_part(read_config(self.model_dir)).get("max_position_embeddings")
        return positions if isinstance(positions, int) and positions > 0 else None

    def room(self, prompt_tokens: int, wanted: int, where: str) -> int:
        """Return how many tokens may follow a prompt: `wanted`, or fewer at the end of what the model reads."""
        longest = self.longest
        if longest is None:
            return wanted
        if prompt_tokens >= longest:
            raise ConfigError(
                f"{where}: has {prompt_tokens:,} tokens, and the model reads {longest:,} with its answer. Shorten it."
            )
        return min(wanted, longest - prompt_tokens)

    def stops(self, *, chat: bool) -> list[int]:
        """Return the tokens that end an answer: those that the run has trained, or the model's files name.

        chat: also the one with which the chat template ends an answer.
        """
        folders = [folder for folder in (self.adapter_dir, self.model_dir) if folder is not None]
        named = next((found for folder in folders if (found := stop_ids(folder))), [])
        eos = [self.tokenizer.eos_id] if self.tokenizer.eos_id is not None else []
        return list(dict.fromkeys([*named, *eos, *(turn_ends(self.tokenizer_dir) if chat else ())]))


def find_files(
    named: str, registry: Registry, base: str | None = None, notice: Callable[[str], None] = print
) -> ModelFiles:
    """Return the model that a folder, or a name on the hub, holds.

    named: the output of a run, a checkpoint, a model, or an adapter, whose base is `base` or the one that it names.
    notice: told if `base` has other weights than those that the adapter was trained on.
    Raises ConfigError for a folder of nothing, for the base that an adapter names if its weights have changed since
    the training, and for a model that writes no text or that transformers cannot read.
    """
    _refuse_gguf(named)
    found = find_source(named, registry, "FOLDER")
    if found.adapter:
        return _with_base(found.folder, registry, base, notice)
    if base is not None:
        raise ConfigError(f"--base {base}: {found.folder} holds a model, not an adapter. Leave it out.")
    return model_files(found.folder)


def model_files(folder: Path, adapter: Path | None = None) -> ModelFiles:
    """Return the model in a folder, with an adapter. Raises ConfigError if transformers cannot have it write text."""
    from ..checkpoints.stored_weights import RANGES_FOLDER  # imports torch

    if (folder / RANGES_FOLDER).is_dir():
        raise ConfigError(
            f"{folder}: several processes have each written a part of this model. Join them first: "
            f"surogate export {folder} model."
        )
    loaded_by = _class_of(folder, read_config(folder))
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder}: holds no weights (*.safetensors). Name the folder of a whole model.")
    return ModelFiles(folder, loaded_by, adapter)


def _class_of(folder: Path, config: Mapping[str, Any]) -> str:
    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    found = (loads for name in names for end, loads in _CLASSES.items() if name.endswith(end))
    if loaded_by := next(found, None):
        return loaded_by
    said = f"holds a {names[0]}, which writes no text" if names else "names no class in `architectures`"
    raise ConfigError(f"{folder / 'config.json'}: {said}. Name a language model.")


def _with_base(folder: Path, registry: Registry, base: str | None, notice: Callable[[str], None]) -> ModelFiles:
    kind = registry.adapter(kind_of_adapter(registry, folder))
    if kind.config_file != PEFT_CONFIG or kind.library != "peft":
        raise ConfigError(
            f"{folder}: is an adapter of {kind.name}, which PEFT does not read. Merge it first: "
            f"surogate merge {folder} merged."
        )
    config = read_json(folder / PEFT_CONFIG, "Save the adapter again.")
    if (task := config.get("task_type")) not in (*_WRITE, None):
        raise ConfigError(f"{folder / PEFT_CONFIG}: task_type is {task}, which writes no text. Name another adapter.")
    named = base or config.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise ConfigError(f"{folder / PEFT_CONFIG}: names no base model. Give it: --base MODEL.")
    where = "--base" if base else f"{folder / PEFT_CONFIG}: its base (--base names it elsewhere)"
    files = model_files(resolve_model_dir(named, _FILES, where), folder)
    check_base(folder, files.model_dir, notice if base else None)
    return files


def _refuse_gguf(named: str) -> None:
    local = find_local(named)
    gguf = local if local is not None and local.suffix == ".gguf" else None
    if local is not None and local.is_dir() and not (local / "config.json").is_file():
        gguf = next(iter(sorted(local.glob("*.gguf"))), None)
    if gguf is not None:
        raise ConfigError(
            f"{gguf}: is a model for other programs, which transformers does not run. Name the model that it was "
            "made from."
        )
