"""Adapters: params that are trained in addition to, or instead of, the weights of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from ..origin import Definition, Name
from ..program.inputs import Scalars
from ..program.op import Program
from ..program.value import Value
from .base import Options
from .models import ModelDef, WeightMap
from .recipes import Precision

if TYPE_CHECKING:
    from torch import Tensor

    from ..program.builder import Builder

ADAPTER_LABEL = "adapter"
"""Label of the values that an adapter adds to a block and that are kept when the rest of the block is recomputed,
unless `recompute_lora` is set: a branch's thin intermediate values."""


@dataclass(frozen=True, kw_only=True)
class AdapterContext(Generic[Options]):
    """Arguments of `AdapterDef.apply` and `start` besides what they work on.

    builder    declares params and emits ops
    precision  the dtypes of the run
    weights    the model's weight maps, without those of what is never trained
    options    the adapter's validated options
    untrained  the weight maps of what is never trained
    """

    builder: Builder
    precision: Precision
    weights: Sequence[WeightMap]
    options: Options
    untrained: Sequence[WeightMap] = ()


@dataclass(frozen=True, kw_only=True)
class AdapterDef(Definition, Generic[Options]):
    """An adapter: a rewrite of the forward program before differentiation, and the files of what was trained.

    apply       (program, scalars, context) -> the rewritten program, with the same outputs. Values that it adds have
                the label of the output that they belong to, and are recomputed with it, or ADAPTER_LABEL. Raises
                ConfigError if the options do not fit the model. In a micro-step, the scalars micro_step and seed are
                those of the micro-step; lr and step are those of the last update: 0 before the first, or those of the
                checkpoint after a resume.
    start       (all params by name, context): emits ops that write params of the adapter from the loaded weights of the
                model, which they only read. They run once, at the start of a fresh run without `adapter_path`. Of
                weights that are stored in a weight format they read what training reads. None: `Init` says how all
                params start.
    fuse        (micro-step program, options) -> the program with fewer ops for the same gradients. Called after
                differentiation and the recipe's lowering, and before recomputation.
    trainable   (param, its weight map or None if the adapter made it, options) -> whether the param is trained. The
                others are frozen. Not asked of what is never trained (`WeightMap.trained`).
    rate        (trained param, its weight map or None if the adapter made it, options) -> factor of its learning rate,
                positive. Params of one factor are updated together; `UpdateContext.scalars.lr` is theirs.
    save        (tensors by name, empty folder, name of the base model, options): writes the adapter in the format of
                its ecosystem. The tensors are all params of the adapter, by their names, and the weights of the model
                that are trained, by the names of their checkpoint tensors.
    load        (folder, options) -> tensors by the same names. Raises ConfigError, with file and key, if the folder has
                no such adapter or one with different options.
    merge       folder -> Merge. Raises ConfigError as `load` does.
    config_file the file of `save` that identifies an adapter folder. It is moved to its place last.
    with_head   (the adapter, a model with the head of a loss, `LossDef.model`) -> one that trains new weights, and
                whose files hold them and name the class that loads the model. None: such models are refused.
    of_model    (the adapter, the weight maps of a model) -> one whose save, load and merge know these, such as the
                parameters of transformers that hold experts (`WeightMap.parameter`). Called for the model of a run, and
                for the base of a merge if an installed package builds it. None: they need to know nothing of it.
    matches     (a folder with `config_file`) -> whether the adapter in it is one of these. Several kinds of adapters
                may have files of one name. Never raises; false for a file that cannot be read.
    library     name on the hub of the library that loads such a folder ("peft")
    check       (folder, folder of the base model): loads the adapter as its users will. Raises, with the reason, if
                that fails.
    commands    (folder, name of the base model, options) -> pairs of a program and the command that loads it there
    trains_tokens
                settings with which the rows of tokens in embedding and head are trained too, as a notice on tokens that
                nothing has trained names them ("key: [value]"). "": there are none.
    """

    name: Name
    summary: str
    options: type[Options]
    apply: Callable[[Program, Scalars, AdapterContext[Options]], Program]
    trainable: Callable[[Value, WeightMap | None, Options], bool]
    save: Callable[[Mapping[str, Tensor], Path, str, Options], None]
    load: Callable[[Path, Options], Mapping[str, Tensor]]
    merge: Callable[[Path], Merge]
    config_file: str
    library: str
    check: Callable[[Path, Path], None]
    commands: Callable[[Path, str, Options], Sequence[tuple[str, str]]]
    start: Callable[[Mapping[str, Value], AdapterContext[Options]], None] | None = None
    fuse: Callable[[Program, Options], Program] = lambda program, options: program
    with_head: Callable[[AdapterDef[Options], ModelDef[Any]], AdapterDef[Options]] | None = None
    of_model: Callable[[AdapterDef[Options], Sequence[WeightMap]], AdapterDef[Options]] | None = None
    matches: Callable[[Path], bool] = lambda folder: True
    trains_tokens: str = ""
    rate: Callable[[Value, WeightMap | None, Options], float] = lambda param, stored, options: 1.0


@dataclass(frozen=True)
class Merge:
    """A way to merge a saved adapter into its base model.

    base_model     name of the base model in the adapter's files
    changes        maps the names of checkpoint tensors of the base to functions that return the merged tensor, in the
                   dtype of the original
    may_lack       names in `changes` that the base may lack, because they are copies of tied weights
    check          (parsed config.json of the base): raises ConfigError if the two cannot be merged
    base_revision  revision of the base on the hub; "" for the main one
    """

    base_model: str
    changes: Mapping[str, Callable[[Tensor], Tensor]]
    _: KW_ONLY
    may_lack: Sequence[str] = ()
    check: Callable[[Mapping[str, Any]], None] = lambda base: None
    base_revision: str = ""
