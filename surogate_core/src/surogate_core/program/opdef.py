"""The definition of a kind of op: shapes, reference, and the rules that passes apply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, Protocol, get_args

from ..dtypes import DtypeName
from ..errors import ProgramError
from ..origin import Count, Declared, Definition, Name, Share
from .op import Op
from .value import Value


@dataclass(frozen=True)
class OutSpec(Declared):
    """Shape, dtype and label of one output of an op."""

    label: str
    shape: tuple[int, ...]
    dtype: DtypeName


Gradients = tuple[Value | None, ...]
"""One gradient per input or output of an op; None if there is none."""


IN_OUTPUTS: Final = object()
"""Default of an attribute whose whole effect is on the shapes and dtypes of the outputs, where kernels see it."""

ParamKind = Literal["matrix", "embedding", "head", "vector", "router"]
"""Kind of a param: "embedding" and "head" have a row for each token, "vector" at most one dimension, or a row of biases
for each expert. A "router" chooses what other params multiply, so that rounding it changes more than its product: it is
neither quantized nor adapted."""


@dataclass(frozen=True, kw_only=True)
class Product(Declared):
    """The matrix product that an op computes of its first two inputs.

    of      "forward": x [T, K] w [N, K]^T. "dgrad": dy [T, N] w [N, K]. "wgrad": dy [T, N]^T x [T, K]
    adds    what the op adds to it, if it has one more input after its operands and the ends of groups: a "bias" of one
            row, for groups of one row each, or a "base" of the product's shape
    second  the kind of the op whose result it adds, with the inputs after the first two; ""
    """

    of: Literal["forward", "dgrad", "wgrad"]
    adds: Literal["", "bias", "base"] = ""
    second: str = ""


class Emitter(Protocol):
    """The part of `Builder` that rules of an op use."""

    def emit(self, kind: str, *ins: Value, label: str | Sequence[str] | None = None, **attrs: Any) -> tuple[Value, ...]:
        """Append an op and return its outputs."""

    def apply(self, kind: str, *ins: Value, label: str | None = None, **attrs: Any) -> Value:
        """Append an op and return its first output."""


def _none(op: Op) -> int:
    return 0


def first_output(kind: str) -> Callable[[Op, Sequence[bool]], Op]:
    """Return the rule that an op becomes `kind`, which computes the first output alone, if nothing reads the others."""
    return lambda op, read: op if any(read[1:]) else op.changed(kind=kind, outs=op.outs[:1])


@dataclass(frozen=True, kw_only=True)
class Rewrites(Declared):
    """Rules by which passes put other ops in the place of one. References of both forms give the same bits.

    rematerialize
                (builder, op, kept) -> one Value per output; None for outputs in `kept`, which stay in memory. Emits the
                recomputation of the others, possibly from the kept ones. Without it, the op is emitted again.
    recompute_kind
                (op, a recomputed op that reads one of its inputs) -> the kind with the inputs and attrs of this
                backward op that writes its outputs and then the first output of the other (`fuse_recompute`); "" if
                there is none
    add_kind    op -> the kind (*ins, base) -> base + output that replaces the op and an addition of its only output
                (pass `fuse_adds`); "" if there is none
    pair_kind   the kind (*ins, *ins of another op of this kind) -> the sum of both outputs (`fuse_adds`), or ""
    narrowed    (op, for each output whether anything reads it) -> the op that writes fewer outputs, all that are read
                among them, or the op itself (`dead_code`). `first_output` is such a rule.
    """

    rematerialize: Callable[[Emitter, Op, frozenset[Value]], Gradients] | None = None
    recompute_kind: Callable[[Op, Op], str] | None = None
    add_kind: Callable[[Op], str] = lambda op: ""
    pair_kind: str = ""
    narrowed: Callable[[Op, Sequence[bool]], Op] = lambda op, read: op


@dataclass(frozen=True, kw_only=True)
class RowWise(Declared):
    """An op that computes each row of its outputs from the same row of its inputs, however many rows it gets.

    A value may have several rows for each of another, such as those of the experts of a token, next to each other.

    ins       indices of the inputs that have these rows; the others are read whole. Without any, an op has the rows of
              the matrices that it takes.
    outs      indices of the outputs that have them
    sums      indices of outputs that are sums over the rows
    largest   indices of inputs, all states, that the op raises to a maximum over the rows
    local     indices of outputs, `outs` or not, that make sense for these very rows alone, such as an order of them:
              only ops that compute the same rows, and take them (`takes`), read them
    takes     indices of inputs, `ins` or not, that may be such outputs
    first     the attr, 0 by default, that says where in whole values the rows begin, of an op whose results depend on
              it, as random bits do; "": they do not
    together  rows of `outs` depend on which others are computed with them, as on a scale by the largest magnitude.
              Plans then compute the same rows together, whatever they choose (`row_tiles`): in tiles of a length that
              depends on that of a long row alone, or all at once if it, or one that computes the same value again, has
              a reader that needs all rows.
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...] = ()
    sums: tuple[int, ...] = ()
    largest: tuple[int, ...] = ()
    local: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    first: str = ""
    together: bool = False


@dataclass(frozen=True, kw_only=True)
class GroupWise(Declared):
    """An op whose rows are of groups, each of which meets one of the matrices in an input, all one above another.

    weight  index of that input
    groups  how many there are
    kind    the kind with the inputs (base, *ins) and the attr `first`, whose weight holds the matrices of some groups
            alone, from that one on. It writes the rows of these groups in the place of base, and leaves all others.
    """

    weight: int
    groups: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class Apart(Declared):
    """An op on matrices of `rows` (an attr) that does on some of these what it does on the same ones of all.

    ins     indices of the inputs that hold them, one above another; the others are read whole
    outs    indices of the outputs that hold them; the others are the same for any of them
    beside  indices of those of `outs` in which they are beside each other
    """

    ins: tuple[int, ...]
    outs: tuple[int, ...]
    beside: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpDef(Definition):
    """A kind of op.

    `flops`, `traffic`, `passes`, `link` and `workspace` are called once for all ops of equal `Op.signature`. They, and
    the shapes and dtypes of `infer`, may depend on kind, attrs, phase, lane and accumulated outputs of an op and on
    shapes, dtypes and roles of its values, but not on its block or on which values it uses.

    infer       (ins, attrs) -> one OutSpec per output. Raises ProgramError, with the shapes, if they are invalid.
    reference   "module:function", imported on first use. Called as `function(*ins, **attrs)` with torch tensors, attrs
                by keyword-only parameters; returns one tensor, or a tuple with one tensor per output. Must not write to
                its inputs. It defines what the op computes: kernels are tested against it.
    attrs       {name: type, or (type, default)} of its attributes. An op has all of them that are without a default,
                and no others. Every kernel implements the attributes without a default, and those whose default is
                IN_OUTPUTS; `KernelDef.attrs` names the others that it implements. `dtype` of an op with one output is
                that of this output: "bf16" for what it adds to a bf16 gradient.
    optional    {name: index} of inputs that an op may lack. They come last, and the reference gives them a default.
                Only kernels that name one (`KernelDef.takes`) get an op that has it. Inputs that `infer` allows to be
                absent and that are not named here are taken by every kernel whose dtypes fit.
    vjp         (builder, op, gradients of the outputs) -> gradients of the inputs; None for inputs without a gradient,
                such as integers, and for params that are never trained (`WeightMap.trained`). Without a rule, core
                differentiates the reference by autograd, which is slow.
    loss_with_grads
                for an op whose first output is the loss: the kind of op that replaces it when that loss is
                differentiated. It has the same inputs and attrs, and the attr `wrt`: the indices in `loss_grad_ins`
                whose inputs depend on trained params. Its outputs are the op's, and these gradients.
    rewrites    the ops that passes put in its place
    may_overwrite
                op -> {index of an output: index of an input}: both may have one place in memory if no later op reads
                the input. Every kernel of the op must allow that.
    flops       floating-point operations
    traffic     bytes read and written. Default: every input and output once, outputs that accumulate twice.
    passes      further bytes, of kernels that run before or after the arithmetic and do not overlap with it
    link        bytes that a device sends to others
    workspace   bytes of workspace that every implementation needs
    training_only
                evaluations omit the op. It has one output, whose readers then read the first input instead.
    takes_chunks
                it has the attr `chunks`, 1 by default (`attn_bwd_chunks`): kernels process the rows in that many equal
                parts, in the workspace of one. Outputs do not depend on it.
    attention   "forward" or "backward": its arithmetic is that of attention, of which devices have prices by the attrs
                `head_dim` and `seq_len`, and plans show its time so
    always_recomputed
                recompute its outputs in the backward pass whatever the user chose, because that is cheaper than storing
                them
    changes     (ins, attrs) -> indices of the inputs, all states, that the op changes. The reference returns their new
                contents after the outputs. Such an op is not removed, and is recomputed only by a rule
                `rewrites.rematerialize` that emits an op without changes.
    uses_host   it may use values that are placed on the host: to copy them, to wait for them, or to read them over the
                link
    zero_copy   share of the link's rate at which its kernels use values on the host (`use_zero_copy`), each byte once
                in each direction; 0: they may not
    positioned  what an output holds depends on where its elements are in a whole value, as random bits do. Its
                reference takes `firsts`: of each output, the index of its first element in the value that it is a
                part of. Kernels use `Value.first`.
    elementwise op -> whether it may read a part of its first input, in one dimension, and then writes that part of what
                it would write, its only output: of ranks that have a part of the input each makes its own, and they
                gather these (`assembly/passes/quantize_parts.py`)
    row_wise    op -> how it computes each row by itself; None: it does not. Of such ops plans may compute some rows at
                a time (`row_tiles`).
    group_wise  op -> how groups of its rows meet matrices; None: they do not. Of such ops plans may compute some groups
                at a time (`decoded_experts`). The op has one output.
    apart       op -> where it has matrices, on some of which it does what it does on all; None: it has none. Plans may
                decode and encode some of them at a time (`decoded_experts`).
    param_kinds {index of an input, which may be an optional one: the kind of a param that the op reads there}; "matrix"
                or "vector" without an entry
    product     the matrix product that it computes, which recipes may compute of other operands (`lower_products`)
    group_ends  of a product x [R, K] w [G N, K]^T in which G groups of rows meet N rows of w each, and of its dgrad and
                wgrad: the index of the input with the ends of the groups. Adapters emit the forward op again, with
                other matrices in place of w.
    moves       its only output holds the elements of its first input, of any dtype, each at least once and nothing
                else: recipes may quantize the input instead
    copies_to   op -> a dtype: the outputs are copies of its only input in that dtype, the second of two transposed, and
                their scale by the largest magnitude, fp32 [2] (decode, encode). To "e4m3" it maps that to 448; to
                "e5m2" it is a power of two (`surogate_core.reference.stored_matrix`). "": the op does anything else.
                Weight formats make such copies from what they store (`WeightFormatDef.copies`).
    math        op -> the rate of `DeviceInfo.flops` that prices its arithmetic. Default: the dtype of the first input
                that has one.
    """

    kind: Name
    infer: Callable[[Sequence[Value], Mapping[str, Any]], Sequence[OutSpec]]
    reference: str
    attrs: Mapping[str, Any] = field(default_factory=dict)
    optional: Mapping[str, int] = field(default_factory=dict)
    vjp: Callable[[Emitter, Op, Gradients], Gradients] | None = None
    loss_with_grads: str | None = None
    loss_grad_ins: tuple[int, ...] = ()
    rewrites: Rewrites = Rewrites()
    may_overwrite: Callable[[Op], Mapping[int, int]] = lambda op: {}
    flops: Callable[[Op], Count] = _none
    traffic: Callable[[Op], Count] | None = None
    passes: Callable[[Op], Count] = _none
    link: Callable[[Op], Count] = _none
    workspace: Callable[[Op], Count] = _none
    training_only: bool = False
    takes_chunks: bool = False
    attention: Literal["", "forward", "backward"] = ""
    always_recomputed: bool = False
    changes: Callable[[Sequence[Value], Mapping[str, Any]], Sequence[int]] = lambda ins, attrs: ()
    uses_host: bool = False
    zero_copy: Share = 0.0
    positioned: bool = False
    elementwise: Callable[[Op], bool] = lambda op: False
    row_wise: Callable[[Op], RowWise | None] = lambda op: None
    group_wise: Callable[[Op], GroupWise | None] = lambda op: None
    apart: Callable[[Op], Apart | None] = lambda op: None
    param_kinds: Mapping[int, ParamKind] = field(default_factory=dict)
    product: Product | None = None
    group_ends: int | None = None
    moves: bool = False
    copies_to: Callable[[Op], str] = lambda op: ""
    math: Callable[[Op], str] | None = None

    @cached_property
    def _required(self) -> frozenset[str]:
        return frozenset(self.attrs.keys() - self._defaults.keys())

    @cached_property
    def _defaults(self) -> Mapping[str, Any]:
        return {name: declared[1] for name, declared in self.attrs.items() if isinstance(declared, tuple)}

    @cached_property
    def _accepted(self) -> Mapping[str, tuple[type, ...]]:
        """The classes whose instances an attribute may be, by name."""
        accepted = {}
        for name, declared in self.attrs.items():
            expected = declared[0] if isinstance(declared, tuple) else declared
            classes = get_args(expected) or (expected,)
            accepted[name] = (*classes, int) if float in classes else classes  # a whole number is a float
        return accepted

    def specs(self, ins: Sequence[Value], attrs: Mapping[str, Any], place: str) -> Sequence[OutSpec]:
        """Return what `infer` does. Raises ProgramError, which begins with `place`, for wrong attributes too."""
        try:
            self.check_attrs(attrs)
            return self.infer(ins, attrs)
        except (ProgramError, LookupError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, ProgramError) else f"{type(error).__name__}: {error}"
            raise ProgramError(f"{place}: {self.kind}({', '.join(map(repr, ins))}): {reason}") from error

    def check_attrs(self, attrs: Mapping[str, Any]) -> None:
        """Raise ProgramError if an attribute is unknown or missing, or has a value of another type."""
        accepted, reason = self._accepted, ""
        for name, value in attrs.items():
            if value.__class__ in accepted.get(name, ()):
                continue
            if name not in accepted:
                reason = f"attribute {name}={value!r:.80} is unknown"
            elif value.__class__ is bool or not isinstance(value, accepted[name]):  # bool is a subclass of int
                reason = f"attribute {name}={value!r:.80} has the wrong type"
        if not self._required <= attrs.keys():
            reason = f"attribute {min(self._required - attrs.keys())} is missing"
        if reason:
            known = ", ".join(f"{name}: {_as_written(declared)}" for name, declared in self.attrs.items())
            raise ProgramError(f"{reason}. {self.kind} has {known or 'no attributes'}.")

    def not_implemented(self, op: Op, implemented: Sequence[str]) -> dict[str, Any]:
        """Return the attributes of `op` that differ from their defaults and that a kernel does not name."""
        return {
            name: value
            for name, value in op.attrs.items()
            if name not in self._required
            and name not in implemented
            and self._defaults.get(name, IN_OUTPUTS) is not IN_OUTPUTS
            and value != self._defaults[name]
        }

    def not_taken(self, op: Op, taken: Sequence[str]) -> list[str]:
        """Return the optional inputs that `op` has and that a kernel does not name."""
        return [name for name, index in self.optional.items() if index < len(op.ins) and name not in taken]


def _as_written(declared: Any) -> str:
    """Return "float" or "int = 1"."""
    expected, *default = declared if isinstance(declared, tuple) else (declared,)
    name = getattr(expected, "__name__", str(expected))
    return name if default in ([], [IN_OUTPUTS]) else f"{name} = {default[0]!r}"
