"""The inputs of a plan: definitions from plugins, each with its validated options, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from ..api import (
    AdapterDef,
    Dims,
    LossDef,
    LoweringDef,
    ModelDef,
    OffloadDef,
    OpDef,
    OptimizerDef,
    ParamKind,
    Precision,
    RecipeDef,
    Target,
    TrainedParam,
    WeightFormatDef,
)
from ..program.labels import labels_of
from ..program.shards import Sharding
from ..program.value import Value
from .recomputed import Recomputation
from .resolve import KernelFor, by_references
from .streaming import ZeroCopy

Beside = Callable[[int], tuple[Mapping[str, int], Mapping[str, int]]]


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Arguments of `assemble`.

    batch_size        rows of one worker's micro-step
    grad_accum_steps  micro-steps of an optimizer step. Which programs exist depends on whether it is 1, 2 or more.
    world_size        ranks of the run
    sharding          what each rank holds a part of
    nodes             machines, with as many ranks on each
    ranks_per_device  ranks that share a device and its memory
    max_documents     most documents of a micro-step, padding at the end of a row included
    lmhead_chunks     chunks of the LM head; None: chosen by the size of the logits
    attn_bwd_chunks   chunks of rows of the attention backward pass; divides `batch_size`
    zero_copy         whether the update uses values that the host holds where they are, without copies (`Streaming`)
    frozen_reference  whether the loss compares with a copy of the weights
    other_reference   whether that copy is of other weights of the same sizes, which the caller writes into the states
                      `reference.PARAM` before the first step
    lowering          what serves the products' dtypes in place of the recipe; None: the recipe does
    numerics          add the micro-step that reports on numerics
    update_groups     splits the trained params into groups, whose updates are recorded one after another. None: by
                      block if the host or other ranks hold params or states, else one group; of what a rank owns,
                      one group unless the host holds states.
    recompute         parts of blocks that are recomputed in any case
    recompute_more    whether `plan_inputs` may choose more, if the run does not fit
    recompute_chosen  what it chose; None: nothing besides `recompute`
    row_tiles         rows of a tile, a multiple of `tile.MULTIPLE`, 0: no tiles; None: `sketched` may choose some,
                      if the run does not fit
    tiles_stand_in    a sketch: one of the tiles between the first and the last stands for all (`tile`)
    decoded_experts   most bytes of a weight of experts that are decoded at a time, 0: all; None: `sketched` may choose
                      fewer, if the run does not fit
    weight_format     how frozen matrices are stored; None: in the model's dtype
    stored_kinds      kinds of params that are stored so: "matrix", of blocks, "head", "embedding"
    target            device to plan for; None: no device, and references run every op
    host_memory       bytes of host memory that the run may pin; None: not known
    beside            (elements that are trained) -> what others than the run's programs need: {purpose: bytes} of the
                      first device's memory, and of its machine's, which are one on a CPU
    kernel_for        chooses what runs an op on the target
    """

    ops: Mapping[str, OpDef]
    model: ModelDef
    dims: Dims
    recipe: RecipeDef
    recipe_options: BaseModel
    optimizer: OptimizerDef
    optimizer_options: BaseModel
    precision: Precision
    loss: LossDef
    loss_options: BaseModel
    frozen_reference: bool = False
    other_reference: bool = False
    lowering: LoweringDef | None = None
    batch_size: int
    seq_len: int
    max_documents: int
    grad_accum_steps: int = 2
    world_size: int = 1
    sharding: Sharding = field(default_factory=Sharding)
    nodes: int = 1
    ranks_per_device: int = 1
    lmhead_chunks: int | None = None
    attn_bwd_chunks: int = 1
    zero_copy: ZeroCopy = False
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    numerics: bool = False
    update_groups: Grouping | None = None
    recompute: frozenset[str] = frozenset()
    recompute_more: bool = False
    recompute_chosen: Recomputation | None = None
    row_tiles: int | None = 0
    tiles_stand_in: bool = False
    decoded_experts: int | None = 0
    adapters: Sequence[tuple[AdapterDef, BaseModel]] = ()
    weight_format: tuple[WeightFormatDef, BaseModel] | None = None
    stored_kinds: frozenset[ParamKind] = frozenset({"matrix"})
    offload: Sequence[tuple[OffloadDef, BaseModel]] = ()
    target: Target | None = None
    host_memory: int | None = None
    beside: Beside = lambda trained: ({}, {})
    kernel_for: KernelFor = by_references

    @property
    def grouping(self) -> Grouping:
        """Return the rule that splits the trained params into groups."""
        return by_block if self.sharding.states and not self.update_groups else self.grouping_of_owners

    @property
    def grouping_of_owners(self) -> Grouping:
        """Return the rule that splits the params that one rank owns. No update of these needs what others have."""
        in_turn = any(strategy.on_host for strategy, _ in self.offload)
        return self.update_groups or (by_block if in_turn else one_group)

    @property
    def labels(self) -> Mapping[str, frozenset[str]]:
        """Return the labels of the values that each part of a block drops."""
        return labels_of(self.model.recompute)

    @property
    def kept_labels(self) -> frozenset[str]:
        """Return the labels of the values that are not recomputed, because offload strategies move them."""
        return frozenset(label for strategy, _ in self.offload for label in strategy.keeps)

    def dropped_by(self, recomputation: Recomputation) -> Callable[[Value], bool]:
        """Return the rule that says whether a value inside a block is dropped after the forward pass."""
        labels, kept = self.labels, self.kept_labels
        return lambda value: value.label not in kept and recomputation.drops(value, labels)

    @property
    def recomputation(self) -> Recomputation:
        return self.recompute_chosen or Recomputation(self.recompute)

    @property
    def tokens(self) -> int:
        """Tokens of one worker's micro-step."""
        return self.batch_size * self.seq_len


Groups = Sequence[Sequence[TrainedParam]]
Grouping = Callable[[Sequence[TrainedParam]], Groups]
"""Splits the trained params into groups. Each param is in exactly one, and no group is empty."""


def one_group(params: Sequence[TrainedParam]) -> Groups:
    return (params,)


def by_block(params: Sequence[TrainedParam]) -> Groups:
    """Return one group for each block and for each param outside of blocks, in order of their first params.

    Params outside of blocks are few and large: an embedding of 8B models has three times the size of a block.
    """
    groups: dict[int | Value, list[TrainedParam]] = {}
    for p in params:
        groups.setdefault(p.param.block if p.param.block >= 0 else p.param, []).append(p)
    return tuple(groups.values())
