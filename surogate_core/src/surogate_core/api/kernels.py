"""Kernels: compiled implementations of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field

from ..dtypes import KernelDtype
from ..origin import Count, Definition, Name
from ..program.op import Op
from ..program.value import Value
from .base import Support, Target
from .world import Comm

Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A function and its arguments: `function(*arguments)` enqueues work on a stream and returns without waiting for it."""


@dataclass(frozen=True)
class Launch:
    """A call, and the micro-batches that need it: those with more than `labels_above` labels; -1: all.

    The host knows the number of labels of a batch, so skipping a launch needs no synchronisation.
    """

    call: Call
    labels_above: int = -1


class BindContext(Protocol):
    """Arguments of `KernelDef.bind`: an op's buffers and stream. Used once per op, before the first step."""

    @property
    def target(self) -> Target: ...
    @property
    def stream(self) -> int:
        """The CUDA stream of the op's lane, as an integer."""

    @property
    def comm(self) -> Comm:
        """The communicator of this rank."""

    def pointer(self, value: Value) -> int:
        """Return the device address of a value's buffer, aligned to 256 bytes."""

    @property
    def workspace(self) -> int:
        """Device address of the op's workspace of `KernelDef.workspace` bytes; 0 if it has none."""

    def call(self, function: Callable[..., None], *arguments: Any) -> Call:
        """Return a call of `function`, with each Value replaced by its pointer and the stream as the last argument."""

    def table(self, words: Sequence[int]) -> int:
        """Return the device address of an int64 array with these contents, which lives as long as the run."""

    def notice(self, text: str) -> None:
        """Show a line to the user. Each different text is shown once per run, so it should not name a single op."""

    def autotune_cache(
        self, name: str, load: Callable[[Mapping[str, str]], None], dump: Callable[[], Mapping[str, str]]
    ) -> None:
        """Cache what kernels select by timing, so that later runs on the same GPU model give the same bits.

        `name` identifies the cache. Once per run `load` is called immediately, with the entries of earlier runs, and
        `dump` when everything is bound, for all entries known by then. A key must contain everything that a selection
        depends on, library versions too.
        """


@dataclass(frozen=True, kw_only=True)
class KernelDef(Definition):
    """A compiled implementation of an op. `supports`, `workspace` and `notice` are called once for ops of equal
    `Op.signature`; `bind` is called for every op.

    dtypes      the supported dtypes of (ins..., outs...); "*" matches any dtype, a final "..." any number of further
                values
    attrs       names of the attributes with a default that it implements. It is not asked to run an op in which another
                attribute differs from its default. It implements all attributes without one (`OpDef.attrs`).
    takes       names of the optional inputs (`OpDef.optional`) that it reads. It is not asked to run an op that has
                another one. `dtypes` has the dtypes of the inputs that an op has, so ops with and without one take two
                definitions, or "...".
    sm          the least compute capability of a GPU that it runs on (80: Ampere)
    supports    (op, target) -> Support, on such a GPU. Must be cheap: imports no compiled module, never raises.
    bind        (op, context) -> a Call, or a tuple of Launch to run in order. Imports the compiled module and selects
                algorithms, by timing if necessary. It may overwrite all buffers of the op but those of role "input",
                for example with random operands to time: weights are loaded later. The functions take raw pointers
                and sizes, and the stream last. They neither allocate nor synchronise. They must add to the outputs in
                `op.accumulate`. If the algorithm is not deterministic, bind raises ConfigError where
                `context.target.deterministic` is "true", and calls `context.notice` where it is "auto".
    workspace   (op, target) -> bytes of workspace, in place of the OpDef's. Known before anything is loaded: if it
                depends on the version of a library, an upper bound over all versions.
    notice      (op, target) -> a line about this kernel for the user of `surogate plan`, or "". Must be cheap. In a
                run, `bind` gives the notice instead.
    memory_efficiency
                share of the device's bandwidth at which it moves `OpDef.traffic` and `OpDef.passes`, measured inside of
                steps, for plans. None: that of most kernels of the class of devices (`machine/prices.py`).
    arithmetic  (rate, share): the rate of `DeviceInfo.flops` whose units it computes with, and the share of it that it
                reaches, in place of `OpDef.math` and of the table of the class of devices.
    module      import name of the compiled module that `bind` imports ("my_package._C"), built by
                SurogateKernels.cmake. A run is refused early if it is missing or has no code for the GPU. "": no check.
    """

    op: Name
    dtypes: tuple[KernelDtype, ...]
    bind: Callable[[Op, BindContext], Call | tuple[Launch, ...]]
    supports: Callable[[Op, Target], Support] = lambda op, target: Support(True)
    sm: int = 80
    attrs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    workspace: Callable[[Op, Target], Count] = lambda op, target: 0
    notice: Callable[[Op, Target], str] = lambda op, target: ""
    memory_efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    arithmetic: tuple[str, Annotated[float, Field(gt=0, le=1)]] | None = None
    module: str = ""
