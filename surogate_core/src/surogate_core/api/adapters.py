"""Adapters: what is trained beside or instead of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..origin import Definition
from ..program.inputs import Scalars
from ..program.op import Program
from ..program.value import Value
from .models import WeightMap
from .recipes import Precision

if TYPE_CHECKING:
    from ..program.builder import Builder


@dataclass(frozen=True, kw_only=True)
class AdapterDef(Definition):
    """Trains something beside or instead of the weights: a rewrite of the forward program before differentiation.

    apply       (program, builder, precision, the model's weight maps, scalars, options) -> the rewritten program, whose
                one output is the loss. Raises ConfigError for options that do not fit the model. Of the scalars, a
                micro-step has micro_step and seed; lr and step are those of the last update, 0 before the first, and
                after a resume those of the checkpoint's.
    trainable   (param, its weight map or None where the adapter made it, options) -> whether it is trained; the others
                are frozen
    save        (trained tensors by name, empty folder, the base model's name, options): writes the ecosystem's files.
                Weights of the model have the names of their checkpoint's tensors, the adapter's own those of their
                params.
    load        (folder, options) -> tensors by the same names. Raises ConfigError, naming file and key, where the
                folder holds no such adapter or one of other options.
    merge       folder -> what it changes in which model. Raises ConfigError as `load` does.
    config_file the file of `save` without which a folder is no adapter: it is put in its place last
    library     the library that loads such a folder, by its name on the hub ("peft")
    check       (folder, the base model's folder): loads it once, as others will; raises, with the reason, if it fails
    commands    (folder, the base model's name, options) -> (program, the line to copy that loads it there)
    """

    name: str
    summary: str
    options: type[BaseModel]
    apply: Callable[[Program, Builder, Precision, Sequence[WeightMap], Scalars, Any], Program]
    trainable: Callable[[Value, WeightMap | None, Any], bool]
    save: Callable[[Mapping[str, Any], Path, str, Any], None]
    load: Callable[[Path, Any], Mapping[str, Any]]
    merge: Callable[[Path], Merge]
    config_file: str
    library: str
    check: Callable[[Path, Path], None]
    commands: Callable[[Path, str, Any], Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class Merge:
    """A saved adapter that is to be added to its base.

    base_model  name of the base model, as the adapter's files have it
    changes     name of a checkpoint tensor of the base -> function from that tensor to the merged one, of its dtype
    may_lack    those of them that a base need not have: copies of tied weights
    check       (the base's parsed config.json): raises ConfigError where the two cannot become one model
    base_revision  revision of the base on the hub, "" for its main one
    """

    base_model: str
    changes: Mapping[str, Callable[[Any], Any]]
    may_lack: Sequence[str] = ()
    check: Callable[[Mapping[str, Any]], None] = lambda base: None
    base_revision: str = ""
