"""Ops and kernels: what an op means, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ..program.op import Op
from ..program.value import Value
from .base import Definition, Support, Target
from .running import Comm

if TYPE_CHECKING:
    from ..program.builder import Builder


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
class OpDef(Definition):
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
class KernelDef(Definition):
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
    module      import name of the compiled module that `bind` imports ("my_package._C"), by SurogateKernels.cmake:
                runs say before they start where it is missing or has no code for the GPU. "": nothing to look for
    """

    op: str
    dtypes: tuple[str, ...]
    supports: Callable[[Op, Target], Support]
    bind: Callable[[Op, BindContext], Call | tuple[Part, ...]]
    workspace: Callable[[Op, Target], int] = lambda op, target: 0
    notice: Callable[[Op, Target], str] = lambda op, target: ""
    capturable: bool = True
    module: str = ""
