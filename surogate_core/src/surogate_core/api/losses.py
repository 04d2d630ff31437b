"""Losses: what a run minimises, from what the model's head computes of the labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from ..origin import Declared, Definition, Name
from ..program.inputs import BatchInputs
from ..program.value import Value
from .base import NoOptions, Options
from .data import Column
from .models import Head, Metric, ModelDef

if TYPE_CHECKING:
    import numpy as np

    from ..program.builder import Builder


@dataclass(frozen=True)
class Loss(Declared):
    """The result of `LossDef.build`.

    terms    the gradient is that of their sum: no op may add them. The first is reported as the loss, and `name`
             of it is not used; the others are reported as metrics.
    metrics  what is reported besides
    cached_reference
             numbers of the documents, [G, n], that the column `LossDef.cached_reference` holds later
    """

    terms: Sequence[Metric]
    _: KW_ONLY
    metrics: Sequence[Metric] = ()
    cached_reference: Value | None = None


@dataclass(frozen=True, kw_only=True)
class LossContext(Generic[Options]):
    """Arguments of `LossDef.build`.

    builder    emits ops
    head       what the model gives to compute logits from
    reference  the same, of the model without its adapter (`LossDef.reference`). No gradient flows into it.
    batch      the inputs of a micro-step, with the columns and groups that the loss asks for
    options    the loss's validated options
    """

    builder: Builder
    head: Head
    reference: Head | None
    batch: BatchInputs
    options: Options


Document = tuple[Any, Any]
"""Tokens and targets of a document of a micro-batch, int32 arrays: targets are shifted, -100 without a label."""


@dataclass(frozen=True, kw_only=True)
class Prepass(Declared):
    """A forward pass over a whole optimizer step, on all ranks, ahead of its micro-steps; or over a validation set.

    means      names of metrics of the loss. The means over the pass are `BatchInputs.means` of the micro-steps. While
               it runs, and in checks of single batches, these are 0.
    documents  (groups of one document of a row, in order) -> the documents that the pass reads in their place, which
               have as many tokens at most. Columns are 0.
    """

    means: Sequence[str]
    documents: Callable[[Sequence[Document]], Sequence[Document]]


@dataclass(frozen=True, kw_only=True)
class PrepareContext(Generic[Options]):
    """Arguments of `LossDef.prepare`: the documents of a dataset, and what may be computed of them.

    options    the loss's validated options
    tokens     ids [n_tokens]; document d is offsets[d] to offsets[d + 1]. trained(a, b): which of a to b are, bool
    folder     for what the loss keeps of these tokens. find_model(model, where=key): the folder of another model
    model_dir  the folder of the run's model, with its tokenizer. sequence_len: of rows, and of pieces of documents
    notice     prints a line for the user. progress: to be called with what is being done, again and again
    """

    options: Options
    tokens: np.ndarray[Any, Any]
    offsets: np.ndarray[Any, Any]
    trained: Callable[[int, int], np.ndarray[Any, Any]]
    folder: Path
    model_dir: Path
    sequence_len: int
    find_model: Callable[..., Path]
    notice: Callable[[str], None]
    progress: Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """The result of `LossDef.prepare`: columns, numpy arrays with a row for each token or document, and of all datasets
    facts, {option: what a resumed run must have in common in place of its value, None for nothing}. Facts are kept in
    checkpoints: reworded, they refuse older ones. check, {column: called with the rows (int64) that are about to be
    read}, raises `api.proven_file.DamagedFile` if they are damaged."""

    columns: Mapping[str, Any]
    _: KW_ONLY
    facts: Mapping[str, str | None] = field(default_factory=dict)
    check: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossDef(Definition, Generic[Options]):
    """A loss, selected by the key `loss`.

    model      (a model, parsed config.json and folder of the run's base, options) -> the model that is trained in its
               place, with another head. Called for every installed model, so it reads files later; a plan may have
               none but config.json.
    build      (context) -> Loss. Emits the ops that follow the model's. `lm_head_ce` is the sum of the labels'
               cross-entropies; `lm_head_tokens` yields log-probabilities of labels, without ever holding all logits.
    columns    (options) -> the columns of the batch (`BatchInputs.columns`): of dataset types, or made by `prepare`
    prepare    (context) -> columns that it makes of a dataset
    group_size documents of a group (`BatchInputs.groups`), which lie in one row: 2 for pairs. 1: groups are documents
               with a label. 0: the loss asks for no groups. Dataset types whose rows give another number are refused.
    reference  (options) -> whether `LossContext.reference` is wanted
    cached_reference
               with `reference: cached`, a column per document in place of the reference: `Loss.cached_reference` before
               the first step. Only of a loss whose groups have several documents.
    prepass    metrics of the whole step that `build` reads; only of a loss with `group_size=1`
    reference_loss
               with `model`: (what transformers computes of a group, [n, labels], options) -> its loss, for verify
    in_nats    the first term is the cross-entropy of the labels, so that reports can show perplexities
    """

    name: Name
    summary: str
    options: type[Options] = NoOptions  # type: ignore[assignment]
    build: Callable[[LossContext[Options]], Loss]
    model: Callable[[ModelDef[Any], Mapping[str, Any], Path, Options], ModelDef[Any]] | None = None
    columns: Callable[[Options], Sequence[Column]] = field(default=lambda options: ())
    prepare: Callable[[PrepareContext[Options]], Prepared] | None = None
    group_size: int = 0
    reference: Callable[[Options], bool] = field(default=lambda options: False)
    cached_reference: Column | None = None
    prepass: Prepass | None = None
    reference_loss: Callable[[Any, Options], Any] | None = None
    in_nats: bool = False
