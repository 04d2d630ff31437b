"""Offload strategies, which keep values in host memory while no op needs them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic

from ..origin import Definition, Name
from ..program.value import Value
from .base import NoOptions, Options, Target
from .recipes import ParamInfo, Programs

if TYPE_CHECKING:
    from ..program.builder import Builder


@dataclass(frozen=True, kw_only=True)
class OffloadContext(Generic[Options]):
    """Arguments of `OffloadDef.schedule` and `on_host` besides the programs.

    builder           declares states and emits ops
    target            the device; None for programs that references run
    params            every param of the run
    optimizer_states  the states that the optimizer declared
    options           the strategy's validated options
    """

    builder: Builder
    target: Target | None
    params: Mapping[Value, ParamInfo]
    optimizer_states: Sequence[Value]
    options: Options


@dataclass(frozen=True, kw_only=True)
class OffloadDef(Definition, Generic[Options]):
    """An offload strategy. A run uses every installed strategy that its keys select, in order of their names.

    selected  options -> whether the user's keys select the strategy
    on_host   (programs, context) -> the params, gradients and states that the host holds. Core copies those of a block
              to the device ahead of the ops that use them, and back once they are written. It records the update block
              by block. Raises ConfigError if there is nothing to move.
    schedule  (programs, context) -> Programs. Called after recomputation, before gradient accumulation. Moves
              activations by the op `move` on the lanes "to_host" and "to_device", to and from values with the place
              "host". Memory on the device is free once "compute" has waited for the copy: the op `wait` on the value on
              the host. Raises ConfigError for a run that the strategy cannot serve.
    keeps     labels of activations that recomputation leaves in memory, because `schedule` moves them. What is made of
              one and has its label, as a quantized copy, is not kept but made again.
    proposed  for `surogate plan --fit` and the suggestions of a run that does not fit: {option: value} that select the
              strategy, in as many ways as are worth a try. Empty: they do not propose it.

    What the programs compute does not change.
    """

    name: Name
    summary: str
    options: type[Options] = NoOptions  # type: ignore[assignment]
    selected: Callable[[Options], bool]
    on_host: Callable[[Programs, OffloadContext[Options]], Iterable[Value]] | None = None
    schedule: Callable[[Programs, OffloadContext[Options]], Programs] | None = None
    keeps: Collection[str] = frozenset()
    proposed: Sequence[Mapping[str, Any]] = ()
