"""Export formats: the files of a finished model, as programs that serve it load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

from ..dtypes import DtypeName
from ..origin import Definition, Name
from .models import HFTensor

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ExportTensor(Protocol):
    """A tensor of the model, which is read when it is asked for. Any thread may ask, in any order."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it is read in, which is that of the checkpoint's files."""

    @property
    def by_rows(self) -> bool:
        """Whether rows can be read without the others. If not, all of it is computed at each reading."""

    def __getitem__(self, rows: slice | EllipsisType, /) -> Tensor:
        """Return rows of the tensor on the CPU, or all of it for `...`.

        Rows alone are read from the file, but a tensor that an adapter changes is merged as a whole at each call.
        """


@dataclass(frozen=True, kw_only=True)
class LinearModules:
    """The linear modules of the model's blocks, and the other modules with matrices.

    matrices  {name of a tensor: the tensor} of those whose matrices `ExportFormatDef.weight_format`, or without one any
              weight format, would store. Routers, embeddings, the LM head and towers are not among them.
    others    names of the modules that keep their matrices in floating point, for lists such as `ignore`: as the class
              of transformers has them, and as the files do where that differs. Each module inside of a tower is one.
    towers    names of whole parts of the model that are kept, such as a tower for images or a layer that predicts
              further tokens. They are among `others` too.
    stacks    {name of a tensor: the tensor} of those that hold a matrix of each expert (`HFTensor.leading`), for
              formats that hold `ExportFormatDef.stacks`
    """

    matrices: Mapping[str, HFTensor]
    others: Sequence[str]
    towers: Sequence[str] = ()
    stacks: Mapping[str, HFTensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Rewritten:
    """Tensors of the model that a checkpoint holds in another form.

    tensors  their names. Matrices that share a scale stand together.
    parts    () -> the tensors of the files in their place, by name. Called once, on any thread.
    """

    tensors: Sequence[str]
    parts: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ExportContext:
    """Argument of `ExportFormatDef.check` and `write`: a complete model in floating point.

    An adapter is merged while its tensors are read, so a merged model is never in memory or on the disk.

    source       the folder that the user named, for messages
    name         a name of the model for people, without spaces
    type         one of the format's types; "" if it has none
    config       the parsed config.json, without `quantization_config`
    folder       a folder with the files of the model besides its weights: config.json, generation_config.json,
                 tokenizer and chat template, with the end tokens and the template that were trained
    tensors      {name: tensor}, in the order of the files
    linear       () -> the linear modules of the blocks. Raises ConfigError if no installed plugin builds the model.
    stops        ids of the tokens at which generation stops, as generation_config.json in `folder` lists them
    turn_ends    those of them that end a turn in the chat template
    threads      how many threads to use
    model_dtype  the dtype that weights are rounded to before they are stored in a weight format, as in a run
    options      the options of `ExportFormatDef.weight_format`; None for its defaults, and without one
    progress     (how many tensors are done, of how many). Any thread may call it.
    notice       tells the user a line
    write_model  (empty folder, tensors in another form, quantization_config): writes the files of a Hugging Face
                 checkpoint. Tensors that no `Rewritten` names are copied as they are; an empty config is left out.
    adapter      for a format of adapters, the folder of the adapter. All else is of its base, without the adapter.
    """

    source: Path
    name: str
    type: str
    config: Mapping[str, Any]
    folder: Path
    tensors: Mapping[str, ExportTensor]
    linear: Callable[[], LinearModules]
    stops: Sequence[int]
    turn_ends: Sequence[int]
    threads: int
    model_dtype: DtypeName
    options: Any
    progress: Callable[[int, int], None]
    notice: Callable[[str], None]
    write_model: Callable[[Path, Sequence[Rewritten], Mapping[str, Any]], None]
    adapter: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ExportFormatDef(Definition):
    """A form of files in which `surogate export FOLDER OUT --format NAME[:TYPE]` writes a finished model.

    types          names that may follow the colon; the first one is meant without a colon. (): there are none
    check          context -> None. Raises ConfigError for a family, a size or a tokenizer that the form cannot hold,
                   before anything is written. It may read headers and files of `folder`, but no weights.
    write          (context, empty folder) -> None. Writes the files into the folder and nothing elsewhere. At most
                   4 GiB should be resident, so it reads a tensor at a time, or a few on several threads.
    identified_by  pattern of the file without which the others are no model; it gets its name last
    weight_format  name of the weight format whose files these are: `surogate quantize` with its key writes the same
                   bytes by `write`, with the options of the key. "": none
    of_adapters    writes adapters by themselves, which are not merged. FOLDER must hold one.
    by_matrix      holds a matrix for each expert and projection. Where files have the experts of a layer in one tensor,
                   `tensors` has these matrices, by the names of another form in which the model is published
                   (`ModelDef.published_weights`). `linear` refuses stacks without such names.
    stacks         holds stacks of experts in one tensor, which `LinearModules.stacks` are. False:
                   `ExportContext.linear` refuses a model with such tensors.
    """

    name: Name
    summary: str
    types: tuple[Name, ...] = ()
    check: Callable[[ExportContext], None] = lambda context: None
    write: Callable[[ExportContext, Path], None]
    identified_by: str = "config.json"
    weight_format: str = ""
    of_adapters: bool = False
    by_matrix: bool = False
    stacks: bool = False
