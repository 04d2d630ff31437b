"""Checkpoint forms: weights that files hold in fewer bits, and that a run reads in floating point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

from ..dtypes import DtypeName
from ..origin import Declared, Definition, Name
from .models import HFTensor

if TYPE_CHECKING:
    from torch import Tensor


class StoredTensor(Protocol):
    """A tensor of a file, of which only what is asked for is read. A torch tensor is one, too."""

    def __getitem__(self, rows: slice | EllipsisType, /) -> Tensor:
        """Return the rows of a slice, on the CPU; of `...`, the whole tensor, which may have no dimension."""


@dataclass(frozen=True)
class Part(Declared):
    """One of the tensors of a checkpoint that hold a weight together.

    dtypes  those that it may have, as `surogate_core.api.DTYPES` calls them
    """

    name: Name
    shape: tuple[int, ...]
    dtypes: tuple[DtypeName, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointFormDef(Definition):
    """A form in which models are published, and which any run reads in floating point, to train all weights too.

    "Config" is `quantization_config` of config.json. A run uses the form that matches it, unless a key selects a weight
    format that reads these files as they are. Its outputs are in the dtype of the run, without the config.

    A tensor that the files hold in floating point is read as it stands. Core checks the others before it reads one: all
    parts must be there, with their shapes and dtypes, those in floating point finite, and a tensor that is no part of
    anything is an error. So a scale is never left out.

    matches   config -> whether the checkpoint holds this form. Never raises.
    check     config -> None. Raises ConfigError for what the form cannot read.
    parts     (tensor, config) -> the tensors of the files that hold it. Its own name need not be among them. Raises
              ConfigError for a shape that the form cannot hold.
    read      (tensor, its parts by name, rows, config) -> these rows of the tensor as it is stored, before its layout:
              [len(rows), *tensor.shape[1:]], in fp32 unless bf16 is exact. Core rounds them to the dtype of the run.
              It asks for a few rows at a time, and each of several processes for its own, so that no copy of the model
              is ever in memory. Equal rows must have the same bits, whatever the others that are asked for with them.
    ignored   patterns of other tensors that such checkpoints may hold, such as scales of activations
    """

    name: Name
    summary: str
    matches: Callable[[Mapping[str, Any]], bool]
    check: Callable[[Mapping[str, Any]], None] = lambda config: None
    parts: Callable[[HFTensor, Mapping[str, Any]], Sequence[Part]]
    read: Callable[[HFTensor, Mapping[str, StoredTensor], range, Mapping[str, Any]], Tensor]
    ignored: Sequence[str] = ()
