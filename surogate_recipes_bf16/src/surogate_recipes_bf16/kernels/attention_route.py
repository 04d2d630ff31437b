"""How cuDNN's attention backward runs, decided and priced without cuDNN: route, groups of heads, workspace.

It gives the same bits from run to run on two routes. Up to cuDNN 9.24 SM90 must keep the gradients of all scores: bytes
of documents x heads x longest^2, so it does that for one group of heads after another, in one workspace. From 9.25 on,
and on SM100, it can add to dq in a fixed order instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from surogate_core.api import Op, Target

from .gemm import aligned

SCORE_BYTES_LIMIT = 1 << 30
"""Most workspace for the gradients of scores.

It lies in the arena while attention's backward runs, where the logits of the LM head lay before: 4,096 rows of a
vocabulary of 151,936 are 1.16 GiB. So a limit of 1 GiB seldom raises a plan's peak. It is enough for one group of two
heads and 64 documents of 2,048 tokens, or 4 of 8,192.
"""

MINIMUM_CUDNN = 91800
ORDERED_CUDNN = 92500
"""The oldest cuDNN that is loaded (library.cpp), and the first with the ordered route on SM90."""

_SLACK_BYTES = 1 << 16
_SLACK_DOCUMENT_BYTES = 512
"""Above cuDNN's own descriptors, of which it keeps a few for every document (448 bytes seen in 9.19 and 9.28)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention op. documents: entries of cu_seqlens less one, most of them empty in a usual batch."""

    tokens: int
    documents: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def launch(self) -> tuple[int, int, int, int, int]:
        """What the plain launchers take."""
        return self.tokens, self.documents, self.heads, self.kv_heads, self.head_dim

    @property
    def plan(self) -> tuple[int, int, int, int, int, int]:
        """What cuDNN's plans take."""
        return self.tokens, self.documents, self.seq_len, self.heads, self.kv_heads, self.head_dim


def shape_of(op: Op) -> Shape:
    """Sizes of `attention` or `attention_bwd`."""
    qkv, cu_seqlens = (op.ins[0], op.ins[1]) if op.kind == "attention" else (op.ins[1], op.ins[4])
    a = op.attrs
    return Shape(qkv.shape[0], cu_seqlens.shape[0] - 1, a["seq_len"], a["n_heads"], a["n_kv_heads"], a["head_dim"])


# -------------------------------------------------------------------------------------------------------------- route


class Route(IntEnum):
    """How dq is added up; attention.h has the same codes and says what each does."""

    ANY_ORDER = 0
    KEPT_SCORES = 1
    ORDERED = 2


@dataclass(frozen=True)
class Way:
    """A route, and into how many groups of key/value heads the backward is divided."""

    route: Route
    groups: int = 1

    @property
    def deterministic(self) -> bool:
        return self.route is not Route.ANY_ORDER


def backward_way(shape: Shape, target: Target, cudnn_version: int) -> Way:
    """The fastest way that does what `target.deterministic` asks for; in any order where no other is affordable.

    Kept scores come before the ordered route, in which the blocks of a head wait for each other.
    """
    if target.deterministic == "false":
        return Way(Route.ANY_ORDER)
    is_ordered = (target.device.sm or 0) >= 100
    if is_ordered or (cudnn_version >= ORDERED_CUDNN and score_bytes(shape) > SCORE_BYTES_LIMIT):
        return Way(Route.ORDERED)
    groups = head_groups(shape)
    return Way(Route.KEPT_SCORES, groups) if groups else Way(Route.ANY_ORDER)


def score_bytes(shape: Shape) -> int:
    """The gradients of all scores in bf16, of every document as if it were the longest."""
    rows, columns = -(-shape.seq_len // 64) * 64, -(-shape.seq_len // 128) * 128
    return 2 * shape.documents * shape.heads * rows * columns


def head_groups(shape: Shape) -> int:
    """The least number of equal groups of key/value heads of which each keeps to SCORE_BYTES_LIMIT; 0: none does."""
    for groups in range(1, shape.kv_heads + 1):
        if shape.kv_heads % groups == 0 and score_bytes(shape) <= groups * SCORE_BYTES_LIMIT:
            return groups
    return 0


# ---------------------------------------------------------------------------------------------------------- workspace


def packs_dkv(shape: Shape) -> bool:
    """Whether dk and dv go through packed scratch (attention.h): where query heads share key heads."""
    return shape.heads != shape.kv_heads


def forward_bytes(shape: Shape) -> int:
    """Upper bound of the forward plan's workspace: lengths, three arrays of offsets, cuDNN's own."""
    return _ragged_bytes(shape, 3) + _own_bytes(shape)


def backward_bytes(shape: Shape, target: Target) -> int:
    """Upper bound of the backward's workspace, whichever cuDNN is loaded."""
    ways = {backward_way(shape, target, version) for version in (MINIMUM_CUDNN, ORDERED_CUDNN)}
    return max(way_bytes(shape, way) for way in ways)


def way_bytes(shape: Shape, way: Way) -> int:
    """Upper bound of the workspace of one way.

    Of one group of heads: packed dk and dv in bf16; for cuDNN rowsum(dout * out), dk and dv of every query head with
    room for fp32, and either the score gradients or dq in fp32 with the row width of qkv. The ordered route has a
    counter of 8 bytes for every document, head and 64 queries.
    """
    group = replace(shape, heads=shape.heads // way.groups, kv_heads=shape.kv_heads // way.groups)
    tokens, size = shape.tokens, shape.head_dim
    packed = packs_dkv(shape)
    total = _ragged_bytes(shape, 4 if packed else 3) + _own_bytes(shape) + 4 * tokens * group.heads
    if packed:
        total += 2 * aligned(2 * tokens * group.kv_heads * size) + 2 * 4 * tokens * group.heads * size
    if way.route is Route.KEPT_SCORES:
        return aligned(total + score_bytes(group))
    dq = 4 * tokens * (shape.heads + 2 * shape.kv_heads) * size
    counters = 8 * shape.documents * shape.heads * -(-shape.seq_len // 64) if way.route is Route.ORDERED else 0
    return aligned(total + dq + counters)


def _ragged_bytes(shape: Shape, tensors: int) -> int:
    return aligned(4 * shape.documents) + aligned(8 * tensors * (shape.documents + 1))


def _own_bytes(shape: Shape) -> int:
    return _SLACK_BYTES + aligned(_SLACK_DOCUMENT_BYTES * shape.documents)


# -------------------------------------------------------------------------------------------------------- what is told


MAY_DIFFER = "gradients may differ in their last bits from run to run. deterministic: true says what to change."


def cost_of_repeating(cudnn: str) -> str:
    """Why a backward by `cudnn` ("cuDNN 9.19.1") is not deterministic, and what to do. The same for all shapes."""
    return (
        f"{cudnn} gives the same bits from run to run only with the gradients of all scores in memory, and batches of "
        f"many or long documents may need more than {SCORE_BYTES_LIMIT / 2**30:.0f} GiB for that, even for one "
        "key/value head and its query heads. To have the same bits: "
        f"pip install --upgrade 'nvidia-cudnn-cu13>={dotted(ORDERED_CUDNN)}', a smaller per_device_train_batch_size or "
        "sequence_len, sample_packing: false, or SUROGATE_ATTENTION=plain in the environment (slow)."
    )


def score_figures(shape: Shape) -> str:
    """The sizes behind `cost_of_repeating`."""
    group = score_bytes(shape) / shape.kv_heads / 2**30
    return (
        f"{group:.1f} GiB for each of {shape.kv_heads} groups of heads: up to {shape.documents} documents of up to "
        f"{shape.seq_len} tokens"
    )


def planned_notice(shape: Shape, target: Target) -> str:
    """What a plan can tell before cuDNN is loaded: whether the version will decide."""
    if target.deterministic == "false" or backward_way(shape, target, MINIMUM_CUDNN).deterministic:
        return ""
    before = f"cuDNN before {dotted(ORDERED_CUDNN)}"
    if target.deterministic == "true":
        return f"deterministic: true: with {before} the run is refused. {cost_of_repeating(before)}"
    return f"deterministic: auto: with {before} {MAY_DIFFER}"


def dotted(version: int) -> str:
    """91901 -> 9.19.1"""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
