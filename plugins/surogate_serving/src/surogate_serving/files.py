"""Files in the format of the hub, in this process: what a program that uses transformers or PEFT would make of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Final

import torch
import transformers

from surogate.hub.config_json import read_config
from surogate.outputs.check_process import quiet
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

from .connection import Refused, shown
from .protocol import OwnForm, Rendering, ServedModel, Words
from .reference import Reference, open_model

_TOP: Final = 20
"""Likeliest tokens that are compared."""
_ADAPTER: Final = "adapter_config.json"
_WRONG_INPUT: Final = 400

WORDS: Final = Words(
    template="in the folder, as chat_template.jinja",
    variables="The chat_template.jinja of the folder does not read them: it is another one.",
    ends="transformers reads it from the folder that is loaded.",
    dtype="Write the files in {dtype}",
    adapter="Name the folder of the adapter.",
)


@dataclass
class Files:
    """A model or an adapter in a folder."""

    where: str
    reference: Reference
    tokenizer: Any
    adapter: str | None
    base: str
    program: str = "transformers"
    words: Words = WORDS
    own_error: float = 0.0
    least: float = -inf
    left_out: str = ""
    continues: bool = False

    def models(self) -> Sequence[ServedModel]:
        base = ServedModel(self.base, None)
        return [base] if self.adapter is None else [base, ServedModel(self.adapter, self.base)]

    def form(self) -> str | None:
        return None

    def own_forms(self, rendering: Rendering) -> Iterator[OwnForm]:
        yield from ()

    def ids(self, model: str, rendering: Rendering) -> list[int]:
        try:
            text = self.tokenizer.apply_chat_template(
                [dict(message) for message in rendering.messages],
                tools=list(rendering.tools) if rendering.tools else None,
                add_generation_prompt=rendering.prompt,
                tokenize=False,
                **rendering.variables,
            )
        except Exception as error:  # templates raise exceptions of many types
            raise Refused("apply_chat_template", _WRONG_INPUT, _reason(error)) from error
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return found

    def log_probs(self, model: str, ids: Sequence[int], wanted: Sequence[int]) -> Mapping[int, Mapping[int, float]]:
        with self._as(model):
            rows = self.reference.log_probs(ids, wanted)
        best = rows.topk(min(_TOP, rows.shape[-1]))
        tokens = torch.cat([torch.tensor([[ids[at]] for at in wanted]), best.indices], -1)
        values = rows.gather(-1, tokens)
        pairs = zip(wanted, tokens.tolist(), values.tolist(), strict=True)
        return {at: dict(zip(row, listed, strict=True)) for at, row, listed in pairs}

    def stops(self, model: str, before: Sequence[int], end: int) -> bool:
        ids = torch.tensor([list(before)])
        with quiet(), self._as(model):
            written = self.reference.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=2,
                do_sample=False,
                sequence_bias={(end,): 1e4},
            )
        return int(written.shape[-1]) == ids.shape[-1] + 1

    def _as(self, model: str) -> Any:
        """Return a context in which the model is the one of that name: an adapter, or the base without it."""
        return self.reference.alone(self.adapter is not None and model != self.adapter)


def open_files(folder: Path, registry: Registry, base: str | None) -> Files:
    """Load a folder of the hub's format. No code in it is run.

    base: folder of the base of an adapter; None: that which adapter_config.json names.
    Raises ConfigError if the folder does not load.
    """
    named = folder
    if (folder / _ADAPTER).is_file():
        named = Path(base or _base_of(folder))
        if not named.is_dir():
            raise ConfigError(f"{folder}: its base {shown(str(named))} is no folder. Name one with --base.")
    if not (named / "config.json").is_file():
        raise ConfigError(
            f"{folder}: holds no config.json and no adapter_config.json. Name a folder of Hugging Face's format, or "
            "the address of a server."
        )
    reference = open_model(named, registry, read_config(named), "auto")
    try:
        with quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # libraries raise exceptions of many types
        raise ConfigError(f"{folder}: its tokenizer does not load in transformers: {_reason(error)}.") from error
    if named == folder:
        return Files(str(folder), reference, tokenizer, None, folder.name)
    reference.adapt(folder)
    return Files(str(folder), reference, tokenizer, folder.name, named.name, program="PEFT")


def _base_of(folder: Path) -> str:
    try:
        found = json.loads((folder / _ADAPTER).read_text())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, str):
        raise ConfigError(f"{folder / _ADAPTER}: names no base_model_name_or_path. Name the base with --base.")
    return found


def _reason(error: Exception) -> str:
    return shown(" ".join(str(error).split()) or type(error).__name__)
