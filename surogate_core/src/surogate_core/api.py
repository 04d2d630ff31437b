"""What a plugin hands over: one frozen dataclass per kind of thing, and nothing else. The author's one page.

A plugin is a light module (no torch at import) named by an entry point of the group `surogate`. It says which
version of this page it was written for and implements the hooks it needs:

    import pluggy
    from surogate_core.api import OptimizerDef

    SUROGATE_API = 0
    hookimpl = pluggy.HookimplMarker("surogate")

    @hookimpl
    def surogate_optimizers():
        return [OptimizerDef(name="sgd", ...)]

Every `options` model is a pydantic model with `extra="forbid"` whose fields are keys of the user's YAML file; name
them with the plugin's own prefix (`adamw_beta1`), since all installed plugins share one flat space of keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from .program.op import Op, Program
from .program.value import Init, Value

if TYPE_CHECKING:
    from .program.builder import Builder

__all__ = [
    "API",
    "AdapterDef",
    "BatchInputs",
    "BindContext",
    "Call",
    "Comm",
    "DatasetFormatDef",
    "Deterministic",
    "DeviceInfo",
    "Dims",
    "Encoded",
    "EvalReport",
    "Finding",
    "GpuReport",
    "HFTensor",
    "Init",
    "KernelDef",
    "LauncherDef",
    "Logger",
    "LoggerDef",
    "Merge",
    "ModelDef",
    "NoOptions",
    "OffloadDef",
    "Op",
    "OpDef",
    "OptimizerDef",
    "OutSpec",
    "ParamGrad",
    "Part",
    "Precision",
    "PrecisionRequest",
    "Program",
    "RecipeDef",
    "RunInfo",
    "Scalars",
    "StepReport",
    "Support",
    "SystemInfo",
    "Target",
    "Topology",
    "Value",
    "WeightMap",
]

API = 0
"""Version of this page; core refuses a plugin whose `SUROGATE_API` is another. 0: any release may change it."""

T = TypeVar("T")


class NoOptions(BaseModel):
    """The options of a plugin that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Support:
    """Whether something can be used, and if not, one sentence that says why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """A device as the planner sees it. `surogate plan --device` picks one from the table, without the hardware.

    sm: compute capability as one number (90 for Hopper); None for a CPU. `flops`: sustained matrix-product FLOP/s by
    operand dtype. `bandwidth`: bytes/s of reads and writes together. `launch_seconds`: floor of any op.
    `runtime_bytes`: what the process holds on the device besides the plan's buffers. `link_bandwidth`: bytes/s that it
    sends to another device of its machine while it receives as many.
    """

    name: str
    title: str
    sm: int | None
    memory_bytes: int
    flops: Mapping[str, float]
    bandwidth: float
    launch_seconds: float
    runtime_bytes: int
    source: str
    link_bandwidth: float = 25e9


Deterministic = Literal["auto", "true", "false"]
"""Whether a run must give the same bits as the one before it.

auto: where a kernel can afford it, and where not the user is told. true: always, else the run is refused before it
begins. false: whatever is fastest.
"""


@dataclass(frozen=True)
class Target:
    """What kernels are chosen, priced and bound for."""

    device: DeviceInfo
    deterministic: Deterministic = "auto"


# ---------------------------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class OutSpec:
    """Shape, dtype and label of one output of an op."""

    label: str
    shape: tuple[int, ...]
    dtype: str


Gradients = tuple[Value | None, ...]
"""One gradient per input or output of an op, None where there is none."""


def _none(op: Op) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class OpDef:
    """A kind of op.

    infer       (ins, attrs) -> one OutSpec per output. Raises ProgramError with the shapes when they do not fit.
    reference   "module:function", imported on first use. Called as `function(*ins, **attrs)` with torch tensors,
                returns one tensor or a tuple of one tensor per output; must not write to its inputs. It defines
                what the op means: kernels are tested against it.
    vjp         (builder, op, gradients of the outputs) -> gradients of the inputs, None where there is none (an
                input that is not floating point, say). None: core differentiates the reference itself, slow but right.
    loss_with_grads
                for an op whose first output is the loss: the kind that replaces it when a program is differentiated
                with respect to that loss; same inputs and attrs, and the attr `wrt`: those of `loss_grad_ins` that
                something trainable reaches. Its outputs are the loss, then the gradient of each input in `wrt`.
    rematerialise
                (builder, op, kept) -> one Value per output, None where the original is kept. `kept` are the outputs
                that stay in memory. None: the op is emitted once more. Lets an op with an output to keep and an
                output to drop compute the second from the first.
    flops       floating-point operations of a run of the op
    traffic     bytes read and written; None: all inputs and outputs once, outputs that accumulate twice
    link        bytes that a device sends to others
    workspace   bytes of scratch that every implementation needs while the op runs
    training_only
                the op is for training alone: an evaluation leaves it out, and its one output is its first input
    always_recomputed
                its outputs do not wait for the backward pass but are computed again there, as if the user had asked
                for it: for what costs less time than memory
    effects     names of state that a run changes besides its outputs ("amax_history"): such an op may not be
                recomputed nor removed
    """

    kind: str
    infer: Callable[[Sequence[Value], Mapping[str, Any]], Sequence[OutSpec]]
    reference: str
    vjp: Callable[[Builder, Op, Gradients], Gradients] | None = None
    loss_with_grads: str | None = None
    loss_grad_ins: tuple[int, ...] = ()
    rematerialise: Callable[[Builder, Op, frozenset[Value]], Gradients] | None = None
    flops: Callable[[Op], int] = _none
    traffic: Callable[[Op], int] | None = None
    link: Callable[[Op], int] = _none
    workspace: Callable[[Op], int] = _none
    training_only: bool = False
    always_recomputed: bool = False
    effects: frozenset[str] = frozenset()


Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A launch, ready to run: `function(*arguments)`, enqueued and not waited for."""


@dataclass(frozen=True)
class Part:
    """A launch that a micro-batch only needs when it has more than `above` labels; -1: always.

    The host knows how many labels a batch has, so leaving a part out costs no synchronisation.
    """

    call: Call
    above: int = -1


class BindContext(Protocol):
    """What a kernel sees of the run when it is bound, once, before the first step. Not for the hot path."""

    @property
    def target(self) -> Target: ...
    @property
    def stream(self) -> int:
        """The CUDA stream that the op is enqueued on, as an integer: that of its lane."""
        ...

    @property
    def comm(self) -> Comm:
        """The way to the other workers of the run."""
        ...

    def pointer(self, value: Value) -> int:
        """Device address of a value's buffer, aligned to 256 bytes."""
        ...

    @property
    def workspace(self) -> int:
        """Device address of the op's scratch, `KernelDef.workspace` bytes; 0 without any."""
        ...

    def call(self, launch: Callable[..., None], *arguments: Any) -> Call:
        """A call of `launch` with values replaced by their pointers and the stream added as the last argument."""
        ...

    def table(self, words: Sequence[int]) -> int:
        """Device address of an int64 array with these contents; it lives as long as the run."""
        ...

    def notice(self, text: str) -> None:
        """Tell the user. A text is shown once a run, however many ops say it, so it should not name one of them."""
        ...

    def keep_choices(
        self, name: str, recall: Callable[[Mapping[str, str]], None], tell: Callable[[], Mapping[str, str]]
    ) -> None:
        """Keep what kernels choose by timing, so that later runs on such a GPU choose the same and give the same bits.

        `recall` is called once a run, now, with what earlier ones have chosen; `tell` when everything is bound, for all
        that is known then. Keys must name whatever a choice depends on, a library's version too. `name`: whose choices.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class KernelDef:
    """A compiled implementation of an op.

    dtypes      the dtypes of (ins..., outs...) that it serves; "*" matches any; a last "..." matches any number more
    supports    (op, target) -> Support; light: imports no compiled module, never raises
    bind        (op, context) -> the launch, or the parts that it is made of, in order. Imports the compiled module,
                chooses algorithms, times them if need be. A launch takes raw pointers and sizes, the stream last; it
                neither allocates nor synchronises. `op.accumulate` says which outputs it must add to. Where bits may
                differ from run to run: a ConfigError if `context.target.deterministic` is "true", a `context.notice` if
                it is "auto".
    workspace   (op, target) -> bytes of scratch for this op; replaces the OpDef's figure. Known before anything is
                loaded: where it depends on the version of a library, an upper bound over the versions.
    notice      (op, target) -> what `surogate plan` tells the user of this kernel, "" for nothing; light as `supports`.
                In a run `bind` tells what has become of it.
    """

    op: str
    dtypes: tuple[str, ...]
    supports: Callable[[Op, Target], Support]
    bind: Callable[[Op, BindContext], Call | tuple[Part, ...]]
    workspace: Callable[[Op, Target], int] = lambda op, target: 0
    notice: Callable[[Op, Target], str] = lambda op, target: ""
    capturable: bool = True


# ------------------------------------------------------------------------------------------------------------ models


@runtime_checkable
class Dims(Protocol):
    """A model's sizes, as its plugin derives them from `config.json`. Core reads only these."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Longest sequence that the checkpoint's configuration allows, in tokens."""
        ...


@dataclass(frozen=True)
class BatchInputs:
    """The input values of a micro-step of T tokens: rows of `seq_len`, flattened.

    tokens      int32 [T]
    targets     int32 [T]: the label of each position, already shifted; -100 where there is none
    positions   int32 [T]: restart at every document
    cu_seqlens  int32 [max_documents + 1]: offsets of the documents in [0, T], ascending; unused entries repeat T.
                Documents tile [0, T]: padding is a document without labels.
    loss_scale  fp32 []: 1 / valid tokens of the whole optimizer step
    seq_len     tokens a row: no document is longer
    lmhead_chunks  into how many pieces `lm_head_ce` divides the T rows, to keep its logits small
    """

    tokens: Value
    targets: Value
    positions: Value
    cu_seqlens: Value
    loss_scale: Value
    seq_len: int
    lmhead_chunks: int = 1


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightMap:
    """A param is the concatenation of `tensors` along their first dimension. Export splits it again."""

    param: str
    tensors: tuple[HFTensor, ...]


@dataclass(frozen=True, kw_only=True)
class ModelDef:
    """An architecture.

    architectures   names of `config.json["architectures"]`; `model_types` of `config.json["model_type"]`
    dims            parsed config.json -> Dims; raises ConfigError naming key and value
    build           emits the forward program and returns the scalar loss
    weights         one WeightMap per param of the program, in file order
    ignored_tensors fnmatch patterns of checkpoint tensors that carry nothing (buffers, tied copies)
    """

    name: str
    summary: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    dims: Callable[[Mapping[str, Any]], Dims]
    build: Callable[[Builder, Any, BatchInputs], Value]
    weights: Callable[[Any], Sequence[WeightMap]]
    ignored_tensors: Callable[[Any], Sequence[str]] = lambda dims: ()


# ----------------------------------------------------------------------------------------------------------- recipes


@dataclass(frozen=True, kw_only=True)
class PrecisionRequest:
    """The dtype keys as the user wrote them; None where left to the default."""

    model_dtype: str | None = None
    matmul_dtype: str | None = None
    gradient_dtype: str | None = None
    master_dtype: str | None = None
    lora_dtype: str | None = None
    param_grad_dtype: str | None = None
    optimizer_state_dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of a run, all decided.

    model: weights, norms, activations. matmul: operands of forward products. gradient: operands of backward products.
    master: what the optimizer updates. param_grad: accumulated gradients. optimizer_state: moments.
    """

    model: str
    matmul: str
    gradient: str
    master: str
    lora: str
    param_grad: str
    optimizer_state: str


@dataclass(frozen=True, kw_only=True)
class RecipeDef:
    """A precision recipe.

    precision   decides the dtypes; raises ConfigError naming the legal combinations
    supports    (device, precision, options) -> Support; imports no compiled module, never raises
    lower       rewrites a differentiated program; called on the training and on the evaluation program
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    precision: Callable[[PrecisionRequest, BaseModel], Precision]
    supports: Callable[[DeviceInfo, Precision, BaseModel], Support]
    lower: Callable[[Program, Builder, Precision, BaseModel], Program]


@dataclass(frozen=True, kw_only=True)
class AdapterDef:
    """Trains something beside or instead of the weights: a rewrite of the forward program before differentiation.

    apply       (program, builder, precision, the model's weight maps, scalars, options) -> the rewritten program, whose
                one output is the loss. Raises ConfigError for options that do not fit the model. Of the scalars, a
                micro-step has tick and seed; lr and step are those of the last update.
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
    """

    base_model: str
    changes: Mapping[str, Callable[[Any], Any]]
    may_lack: Sequence[str] = ()
    check: Callable[[Mapping[str, Any]], None] = lambda base: None


# -------------------------------------------------------------------------------------------------------- optimizers


@dataclass(frozen=True)
class ParamGrad:
    """A trainable param, its accumulated gradient, and its master: the param itself, or a state in `master_dtype`."""

    param: Value
    grad: Value
    master: Value


@dataclass(frozen=True)
class Scalars:
    """Device scalars that the loop writes before a program runs, so that a captured graph never bakes one in.

    lr fp32 []; step int32 [], 1 at the first optimizer step; tick int32 [], counts micro-steps over the whole run;
    seed int64 [].
    """

    lr: Value
    step: Value
    tick: Value
    seed: Value


@dataclass(frozen=True, kw_only=True)
class OptimizerDef:
    """An optimizer: appends update ops for all params at once.

    `update(builder, params, clip_coef, scalars, precision, weight_decay, options)`. States are made by
    `builder.state(name, shape, dtype, init)`. The gradient to use is `clip_coef * grad`; when `clip_coef` is not
    finite the op must write nothing: the step is skipped.
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    update: Callable[[Builder, Sequence[ParamGrad], Value, Scalars, Precision, float, Any], None]


@dataclass(frozen=True, kw_only=True)
class OffloadDef:
    """A strategy that moves values to the host: (program, builder, device bytes to stay under, options) -> program."""

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    schedule: Callable[[Program, Builder, int, BaseModel], Program]


# -------------------------------------------------------------------------------------------------------------- data


@dataclass(frozen=True)
class Encoded:
    """One document: token ids, and for each whether the model is trained to produce it."""

    tokens: Sequence[int]
    trained: Sequence[bool]


@dataclass(frozen=True, kw_only=True)
class DatasetFormatDef:
    """How a row of a dataset becomes a document.

    options     pydantic model of this type's keys inside a `datasets:` entry ("text_field" ...)
    matches     column names -> whether `type: auto` should take this format
    encode      (row, tokenizer, options) -> Encoded. The tokenizer is a `tokenizers.Tokenizer`-backed object with
                `encode_ids(text) -> list[int]`, `bos_id`, `eos_id` (None when the tokenizer has none).
    fields      (options) -> names of the columns that `encode` reads
    guess       column names -> the keys that `type: auto` sets where the entry does not
    truncation  what becomes of a document longer than a row: "split", or "delete" where its parts mean nothing alone
    """

    name: str
    summary: str
    options: type[BaseModel]
    matches: Callable[[Sequence[str]], bool]
    fields: Callable[[Any], Sequence[str]]
    encode: Callable[[Mapping[str, Any], Any, Any], Encoded]
    guess: Callable[[Sequence[str]], Mapping[str, Any]] = field(default=lambda columns: {})
    truncation: Literal["split", "delete"] = "split"


# ----------------------------------------------------------------------------------------------- running and reporting


class Comm(Protocol):
    """What a worker knows of the others, and its way to reach them. A rank is one device, driven by one thread."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> int:
        """Index of the rank's device among those visible to its process."""
        ...

    def all_reduce(self, ranges: Sequence[tuple[int, int, str]], stream: int) -> None:
        """Enqueue the sum over all ranks, in place, of each (device address, elements, dtype)."""
        ...

    def check(self) -> None:
        """Raise what went wrong on the way to the others since the start. From any thread, without waiting."""
        ...

    def abort(self) -> None:
        """Give up: what is enqueued ends instead of waiting for the others. From any thread, without waiting."""
        ...


@dataclass(frozen=True)
class Topology:
    """What a launcher is asked for: devices of this machine."""

    devices: int = 1


@dataclass(frozen=True, kw_only=True)
class LauncherDef:
    """Brings up the processes of a run and the ways between their devices.

    run     (work, topology) -> what `work` returns in the process of rank 0. In every process it calls `work` once,
            with a Comm for each device that the process drives, in order of rank, and takes the Comms down after it.
            A process that fails must end the others.
    """

    name: str
    summary: str
    run: Callable[[Callable[[Sequence[Comm]], Any], Topology], Any]


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a logger is told when a run begins. `config` is the resolved config, ready for JSON.

    done_steps: optimizer steps of the checkpoint that the run goes on from, 0 at a fresh start. Reports of later steps
    that an earlier run may have left in `output_dir` do not count any more.
    """

    run_name: str
    output_dir: Path
    total_steps: int
    steps_per_epoch: int
    tokens_per_step: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    parameters: int
    trainable_parameters: int
    done_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """An optimizer step. loss: mean over valid tokens, nats. norm: of the gradient before clipping.

    tokens: non-padding positions. valid_tokens: positions with a label. tokens_per_second = tokens / duration.
    skipped: the step was not applied, since loss or norm was not finite.
    """

    step: int
    epoch: float
    loss: float
    norm: float
    lr: float
    tokens: int
    valid_tokens: int
    tokens_per_second: float
    duration_ms: float
    time: float
    skipped: bool = False


@dataclass(frozen=True, kw_only=True)
class EvalReport:
    """An evaluation after `step` optimizer steps. loss: mean over valid tokens, nats."""

    step: int
    loss: float
    valid_tokens: int
    duration_ms: float
    time: float


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    """A look at one GPU of the run after `step` optimizer steps. What the driver does not tell of it is None.

    gpu: its number in the run. utilization: part of the driver's last sampling period (up to a second) in which a
    kernel ran, 0 to 1; memory_utilization: in which its memory was read or written. memory_used_bytes: by all
    processes.
    """

    step: int
    gpu: int
    utilization: float | None
    memory_utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    power_limit_watts: float | None
    temperature_celsius: int | None
    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    time: float


@runtime_checkable
class Logger(Protocol):
    """Receives reports, in order, from the loop's thread. A GPU's report comes when it is there: its step may be past.

    One that the user asked for and that raises is told of and left out from then on; RunStopped ends the run, saved.
    """

    def step(self, report: StepReport) -> None: ...
    def eval(self, report: EvalReport) -> None: ...
    def gpu(self, report: GpuReport) -> None: ...
    def close(self, status: str) -> None:
        """status: "done", "interrupted" or "failed"."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoggerDef:
    """A place where reports go. Opened only when `report_to` names it (`always`: in every run).

    open    (info, options) -> Logger, before the first step. Raises ConfigError for what the user has to change.
    """

    name: str
    summary: str
    options: type[BaseModel] = NoOptions
    open: Callable[[RunInfo, Any], Logger]
    always: bool = False


@dataclass(frozen=True, kw_only=True)
class SystemInfo:
    """What `surogate doctor` knows of the machine."""

    python: str
    platform: str
    cpu_count: int
    memory_bytes: int
    gpus: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """One line of `surogate doctor`. level: "ok", "warning" or "error"; remedy: what to do, empty when ok."""

    level: str
    subject: str
    message: str
    remedy: str = ""
