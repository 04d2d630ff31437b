"""Weight formats: how the frozen matrices of a model are stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from ..origin import Declared, Definition, Name
from ..program.op import Op
from ..program.value import Value
from .base import DeviceInfo, Options, Support
from .models import HFTensor
from .recipes import ParamInfo

if TYPE_CHECKING:
    from torch import Tensor

    from ..program.builder import Builder


@dataclass(frozen=True, kw_only=True)
class StorageContext(Generic[Options]):
    """Arguments of `WeightFormatDef.quantize`, `dequantize` and `copies` besides what they read.

    builder  declares states and emits ops
    param    the matrix, or several that are fused
    options  the format's validated options
    """

    builder: Builder
    param: ParamInfo
    options: Options


@dataclass(frozen=True, kw_only=True)
class CheckpointForm(Declared, Generic[Options]):
    """The form of matrices of a weight format in Hugging Face checkpoints.

    "Config" is `quantization_config` of config.json.

    Functions get torch tensors on the CPU. The states of a matrix are those that `quantize` declares for it alone.

    matches   config -> whether the checkpoint holds this form
    check     (config, options) -> None. Raises ConfigError, with the keys to set, if the checkpoint was stored with
              other options, and for what the form does not allow.
    kept      config -> patterns of the linear modules that are in floating point; None: the config does not say
    parts     (name of a tensor, options) -> names of the tensors that hold it; its own name is among them, unless the
              form is `stacked`
    stacked   a stack of matrices is held in the parts of its tensor, which have other names than the tensor: `load` and
              `save` get `HFTensor.matrices`, [matrices, rows, columns], and states of all its matrices, by rows. Files
              with the tensor itself beside its parts are refused. False: each matrix of a stack is a tensor of its own,
              with ".0", ".1" and so on at the end of its name.
    ignored   patterns of other tensors that such checkpoints may hold
    load      (tensor, its parts by name, options) -> the first states of the matrix. Ops of `quantize` compute the
              others from them. Raises ConfigError for parts of another shape, dtype or content.
    save      (tensor, the states of the matrix, name of the dtype that it is dequantized to, options) -> its parts
    config    (names of the modules that are not stored in it, options) -> the config of a checkpoint
    notice    (tensors that are stored in it, options) -> what to tell who writes such a checkpoint, in one line; "" if
              nothing
    loaded_by programs that load such checkpoints, by the names that `AdapterDef.commands` uses; None: all
    """

    matches: Callable[[Mapping[str, Any]], bool]
    check: Callable[[Mapping[str, Any], Options], None]
    kept: Callable[[Mapping[str, Any]], Sequence[str] | None] = lambda config: None
    parts: Callable[[str, Options], Sequence[str]]
    stacked: bool = False
    ignored: Sequence[str] = ()
    load: Callable[[HFTensor, Mapping[str, Tensor], Options], Sequence[Tensor]]
    save: Callable[[HFTensor, Sequence[Tensor], str, Options], Mapping[str, Tensor]]
    config: Callable[[Sequence[str], Options], Mapping[str, Any]]
    notice: Callable[[Sequence[HFTensor], Options], str] = lambda tensors, options: ""
    loaded_by: Collection[str] | None = None


@dataclass(frozen=True, kw_only=True)
class WeightFormatDef(Definition, Generic[Options]):
    """A form in which frozen matrices are stored: fewer bits than the model's dtype, with scales.

    A run uses the installed format whose `key` is true, for every frozen matrix of the model's blocks that it `stores`.
    Core quantizes them while it loads them, a block at a time, and dequantizes each one where the forward pass, and
    again where the backward pass, first reads it. Neither the recipe nor the adapter needs to know the format.

    key         the boolean field of `options` that selects the format
    quantize    context -> the states that hold the matrix. Declares them, `derived`, and emits the op that writes them
                from `context.param.param`. Raises ConfigError if the format cannot store its shape. A param of several
                logical matrices (`context.param.matrices`) is stored as if each were a tensor of its own: each of its
                states is the concatenation of theirs along the first dimension.
    dequantize  (those states, context) -> an activation of the param's shape and dtype. Emits the op that computes it.
    copies      (those states, op, outputs, context) -> activations like the outputs of `op` with these indices, or
                None. `op` is an op of `derive` by which the recipe makes its copies of the param. Emits ops that
                compute the same bits from the states; after None, the param is dequantized and `op` reads that. Called
                in front of the first op that reads such a copy, for those that this op reads.
    stores      the frozen matrices of the blocks -> those of them that are stored; by default, all
    supports    (device, options) -> Support. Never raises.
    layout      name of what the states hold, for recipes whose products read them in place of the param; "": none do
    checkpoints how files hold the format; None: they do not
    bits        per weight with the default options, scales included. A run that does not fit is proposed the installed
                format with the fewest; None: the format is not proposed
    """

    name: Name
    summary: str
    options: type[Options]
    key: str
    quantize: Callable[[StorageContext[Options]], Sequence[Value]]
    dequantize: Callable[[Sequence[Value], StorageContext[Options]], Value]
    copies: Callable[[Sequence[Value], Op, Sequence[int], StorageContext[Options]], Sequence[Value] | None] | None = (
        None
    )
    stores: Callable[[Sequence[ParamInfo]], Sequence[ParamInfo]] = lambda params: params
    supports: Callable[[DeviceInfo, Options], Support] = lambda device, options: Support(True)
    layout: str = ""
    checkpoints: CheckpointForm[Options] | None = None
    bits: float | None = None
