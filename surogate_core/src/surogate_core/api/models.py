"""Models: sizes, weights, and the function that records the forward program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, SkipValidation

from ..origin import Declared, Definition, Name
from ..program.inputs import BatchInputs
from ..program.opdef import ParamKind
from ..program.value import Value
from .base import NoOptions

if TYPE_CHECKING:
    from ..program.builder import Builder


CAUSAL_LM = "AutoModelForCausalLM"
"""The class of transformers that loads language models."""
IMAGE_TEXT_TO_TEXT = "AutoModelForImageTextToText"
"""The class of transformers that loads language models whose checkpoints also hold a tower for images."""
WRITES_TEXT = (CAUSAL_LM, IMAGE_TEXT_TO_TEXT)
"""The classes of models with an LM head."""


@runtime_checkable
class Dims(Protocol):
    """The sizes of a model, which its plugin derives from `config.json`. Core reads only these."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Longest sequence in tokens that `config.json` allows."""


ModelDims = TypeVar("ModelDims", bound=Dims)
"""The class of the sizes of a model."""


@runtime_checkable
class Layout(Protocol):
    """The order of a checkpoint tensor's elements where it is not that of the param: a frozen dataclass.

    `load` and `save` are inverse to each other. They move elements and change none, so that they are also those of
    gradients. They get one torch tensor at a time, and may return a view. `str` of a layout says what the tensor is.

    A layout may have an attribute `leading`, which is False where it lacks it. True: it works on each index of the
    first dimension of the stored tensor alone, so that `load(stored[a:b])` is the rows of the indices a to b, and
    `save` of these rows is `stored[a:b]`. A stack of experts is then read and written a few experts at a time, by each
    process its own part. Adapters, files in a weight format, and several processes serve such layouts alone.
    """

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the param of a tensor `stored`. Raises ProgramError if it cannot have the layout."""

    def load(self, stored: Any) -> Any:
        """Return a tensor of a checkpoint as rows of the param."""

    def save(self, rows: Any) -> Any:
        """Return rows of the param as the tensor of a checkpoint."""


@dataclass(frozen=True)
class HFTensor(Declared):
    """A tensor of a Hugging Face checkpoint. layout: None where rows of the param are the tensor as it is stored.

    name: of the parameter in the class of transformers. Files may have another (`ModelDef.published_names`).
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of its rows in the param."""
        return self.shape if self.layout is None else self.layout.shape(self.shape)

    @property
    def leading(self) -> bool:
        """Whether it has a layout that works on each index of its first dimension alone (`Layout`)."""
        return getattr(self.layout, "leading", False) is True

    @property
    def matrices(self) -> HFTensor:
        """A stack as a tensor [matrices, rows, columns] without a layout; any other tensor as it is."""
        if not self.leading:
            return self
        count, (rows, columns) = self.shape[0], self.rows
        return HFTensor(self.name, (count, rows // count, columns))

    def load(self, stored: Any) -> Any:
        """Return the stored tensor as rows of the param."""
        return stored if self.layout is None else self.layout.load(stored)

    def save(self, rows: Any) -> Any:
        """Return rows of the param as the tensor is stored."""
        return rows if self.layout is None else self.layout.save(rows)


@dataclass(frozen=True)
class WeightMap(Declared):
    """A param that is the concatenation of the rows of checkpoint `tensors`. Export splits it again.

    kind    of the param, where neither its shape nor the ops that read it tell
    new     a base may lack the tensors, and the param then starts as its `Init` says; adapters train and save it
    trained False: it is never trained, such as a bias that corrects the choices of a router. It has neither gradient
            nor master nor optimizer state, `OpDef.vjp` may give None for it, adapters leave it alone, and outputs hold
            it as it was read, in the dtype of the param.
    precise no recipe and no weight format quantizes the matrix, as a projection of a few rows, which would save little
            and lose much. Adapters adapt it.
    matrices
            how many matrices of equal rows the param consists of, where a tensor holds several, such as one of each
            expert: recipes, weight formats and optimizers treat each by itself. 1: each tensor is a matrix.
    parameter
            of experts, the name of the parameter in the class of transformers that holds the whole param, as PEFT's
            `target_parameters` names it ("model.layers.0.mlp.experts.gate_up_proj"). Adapters adapt experts by it. Maps
            of parameters of a module are in the order of these in the class, in which PEFT wraps them.
    """

    param: str
    tensors: tuple[HFTensor, ...]
    _: KW_ONLY
    kind: ParamKind | None = None
    new: bool = False
    trained: bool = True
    precise: bool = False
    matrices: int = 1
    parameter: str = ""


@dataclass(frozen=True)
class Matrix:
    """A logical matrix of a param: `rows` consecutive rows. A fused param, such as [q; k; v], has several.

    name: of its tensor in a checkpoint; with ".0", ".1" and so on at its end if the tensor holds several.
    """

    name: str
    rows: int


Unit = Literal["token", "group"]
"""The unit of the mean that a metric is: the labels of an optimizer step, or its groups of documents."""


@dataclass(frozen=True)
class Metric(Declared):
    """A number of an optimizer step: the mean over its units of `value`, fp32 [].

    An op sums over the units of the micro-batch and multiplies by `loss_scale` ("token") or `group_scale` ("group"),
    which evaluations set to 1. Core adds up micro-steps and ranks.

    of  (value, a float or a numpy array) -> the number, of a figure that is no mean of micro-steps, such as a maximum.
        None: this step or evaluation has no such number, and its report lacks it. It computes on the host, from a value
        of any shape, which several metrics may share.
    doubt  (the same value of a step) -> a sentence for the user if it shows that training goes wrong, with a remedy; ""
        if it does not. Shown once, after 20 steps or more of which most give one.
    headline  whether the table at the end of a run and its picture show it
    """

    name: str
    value: Value
    per: Unit = "token"
    of: Callable[[Any], float | None] = float
    doubt: Callable[[Any], str] = lambda value: ""
    headline: bool = False


@dataclass(frozen=True)
class Head(Declared):
    """The input of a loss: the logits are x weight^T, which no op holds as a whole.

    x       [T, C], the last hidden state
    weight  [V, C]
    losses  further losses of the model, such as that of a router, whose gradients are added. Each is an output of its
            own op.
    attrs   further attributes of the ops that compute logits
    metrics what the model reports besides what the loss does
    """

    x: Value
    weight: Value
    _: KW_ONLY
    losses: Sequence[Value] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    metrics: Sequence[Metric] = ()


@dataclass(frozen=True)
class RowChoice(Declared):
    """A choice that a program makes by the length of its rows, where transformers chooses by the length of each input.

    says    a line for the user: the choice, and when transformers makes another one
    config  the config.json with which transformers makes this choice for every input
    """

    says: str
    config: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelDef(Definition, Generic[ModelDims]):
    """A model architecture.

    architectures   values of `config.json["architectures"]` that select it
    model_types     values of `config.json["model_type"]` that select it
    dims            (parsed config.json) -> Dims. Raises ConfigError with key and value.
    build           (builder, dims, batch) -> Head. Emits the forward program up to the last hidden state; what
                    follows is the run's loss (`LossDef`).
    weights         (dims) -> one WeightMap per param of the program, in file order
    options         keys of the user's YAML file for this model, such as the weight of a router's loss
    configure       (dims, options) -> the Dims that `build`, `weights` and all others get. They hold what these read of
                    the options. Raises ConfigError with key and value.
    ignored_tensors (dims) -> fnmatch patterns of checkpoint tensors without information (buffers)
    tied_copies     (dims) -> {copy: original}: checkpoint tensors that may exist in addition, as copies of others. A
                    checkpoint in which the two differ is refused.
    kept_tensors    (dims) -> fnmatch patterns of checkpoint tensors that the program does not compute with, such as a
                    vision tower. Every output of the model has them, byte for byte. A base without a match of each
                    pattern is refused, but of those that it `may_lack`.
    may_lack        (dims) -> patterns of `kept_tensors` that published files have, and that files may be without: those
                    that transformers writes lack what it ignores, as heads that predict further tokens
    published_names (dims) -> other names that checkpoints may have for tensors and patterns: {beginning of a name: what
                    files have in its place}, for each form that is published. Outputs have the names of their base.
    published_weights
                    (dims) -> further maps of all params, for each other form that is published, such as all experts of
                    a layer in one tensor. A base has the form of which it holds the most, and so have its outputs.
    in_transformers whether transformers has the architecture. Outputs of a run are then loaded with it once, and
                    `surogate verify` can compare.
    loaded_by       the class of transformers that loads its checkpoints, and bases with the keyword arguments `loading`
    saved           (config.json of the base) -> that of checkpoints
    recompute       {key: labels of values of its own that the key drops, besides those of core}: recompute_att,
                    recompute_qkv, recompute_ffn, recompute_swiglu or recompute_rmsnorm. `recompute: auto` chooses
                    among these keys.
    row_choice      (config.json, tokens of a row) -> the choice that differs from that of transformers; None: there is
                    none
    """

    name: Name
    summary: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    dims: Callable[[Mapping[str, Any]], SkipValidation[ModelDims]]
    build: Callable[[Builder, ModelDims, BatchInputs], Head]
    weights: Callable[[ModelDims], Sequence[WeightMap]]
    options: type[BaseModel] = NoOptions
    configure: Callable[[ModelDims, Any], SkipValidation[ModelDims]] = lambda dims, options: dims
    ignored_tensors: Callable[[ModelDims], Sequence[str]] = lambda dims: ()
    tied_copies: Callable[[ModelDims], Mapping[str, str]] = lambda dims: {}
    kept_tensors: Callable[[ModelDims], Sequence[str]] = lambda dims: ()
    may_lack: Callable[[ModelDims], Sequence[str]] = lambda dims: ()
    published_names: Callable[[ModelDims], Sequence[Mapping[str, str]]] = lambda dims: ()
    published_weights: Callable[[ModelDims], Sequence[Sequence[WeightMap]]] = lambda dims: ()
    in_transformers: bool = True
    loaded_by: str = CAUSAL_LM
    loading: Mapping[str, Any] = field(default_factory=dict)
    saved: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    recompute: Mapping[str, frozenset[str]] = field(default_factory=dict)
    row_choice: Callable[[Mapping[str, Any], int], RowChoice | None] = lambda config, length: None
