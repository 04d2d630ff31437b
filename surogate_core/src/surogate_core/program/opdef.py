"""The definition of a kind of op: its shapes, its meaning, and the rules that passes follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..origin import Definition
from .op import Op
from .value import Value


@dataclass(frozen=True)
class OutSpec:
    """Shape, dtype and label of one output of an op."""

    label: str
    shape: tuple[int, ...]
    dtype: str


Gradients = tuple[Value | None, ...]
"""One gradient per input or output of an op, None where there is none."""


class Emitter(Protocol):
    """What a rule of an op may do: emit ops. `Builder` satisfies it."""

    def emit(self, kind: str, *ins: Value, label: str | Sequence[str] | None = None, **attrs: Any) -> tuple[Value, ...]:
        """Append an op and return its outputs."""
        ...

    def apply(self, kind: str, *ins: Value, label: str | None = None, **attrs: Any) -> Value:
        """Append an op and return its first output."""
        ...


def _none(op: Op) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class OpDef(Definition):
    """A kind of op.

    `flops`, `traffic`, `link` and `workspace` are called once for all ops of equal `Op.signature`. They, and the shapes
    and dtypes of `infer`, may depend on kind, attrs, phase, lane and accumulated outputs of an op and on shapes, dtypes
    and roles of its values, but not on its block or on which values it uses.

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
    vjp: Callable[[Emitter, Op, Gradients], Gradients] | None = None
    loss_with_grads: str | None = None
    loss_grad_ins: tuple[int, ...] = ()
    rematerialise: Callable[[Emitter, Op, frozenset[Value]], Gradients] | None = None
    flops: Callable[[Op], int] = _none
    traffic: Callable[[Op], int] | None = None
    link: Callable[[Op], int] = _none
    workspace: Callable[[Op], int] = _none
    training_only: bool = False
    always_recomputed: bool = False
    effects: frozenset[str] = frozenset()
