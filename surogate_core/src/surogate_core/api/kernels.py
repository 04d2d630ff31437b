"""Kernels: what runs an op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..origin import Definition
from ..program.op import Op
from ..program.value import Value
from .base import Support, Target
from .running import Comm

Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A launch, ready to run: `function(*arguments)`, enqueued and not waited for."""


@dataclass(frozen=True)
class Launch:
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

    def autotune_cache(
        self, name: str, recall: Callable[[Mapping[str, str]], None], tell: Callable[[], Mapping[str, str]]
    ) -> None:
        """Keep what kernels choose by timing, so that later runs on such a GPU choose the same and give the same bits.

        `recall` is called once a run, now, with what earlier ones have chosen; `tell` when everything is bound, for all
        that is known then. Keys must name whatever a choice depends on, a library's version too. `name`: whose choices.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class KernelDef(Definition):
    """A compiled implementation of an op. `supports`, `workspace` and `notice` are called once for ops of equal
    `Op.signature`; `bind` is called for every op.

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
    bind: Callable[[Op, BindContext], Call | tuple[Launch, ...]]
    workspace: Callable[[Op, Target], int] = lambda op, target: 0
    notice: Callable[[Op, Target], str] = lambda op, target: ""
    capturable: bool = True
    module: str = ""
