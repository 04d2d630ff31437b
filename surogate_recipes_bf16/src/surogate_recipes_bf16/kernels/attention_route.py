"""Algorithm of cuDNN's attention backward: route, groups of heads and workspace, determined without loading cuDNN.

Two routes are deterministic. On SM90 up to cuDNN 9.24, the gradients of all scores must be stored, which takes
documents x heads x seq_len^2 elements. Groups of heads therefore run one after another in the same workspace. From
cuDNN 9.25 on, and on SM100, dq can be accumulated in a fixed order instead.

On every route groups also bound the sums in fp32 of long rows (SUM_BYTES_LIMIT). No gradient of a head depends on the
other heads, so groups change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from surogate_core.api import Op, Target
from surogate_core.api.compiled import aligned

SCORE_BYTES_LIMIT = 1 << 30
"""Maximum workspace for the gradients of the scores, in bytes.

In the arena it reuses the memory of the LM head's logits, which are dead by then: 4,096 rows of a vocabulary of 151,936
are 1.16 GiB. So a limit of 1 GiB seldom raises the peak. It suffices for a group of two heads with 64 documents of
2,048 tokens, or 4 documents of 8,192.
"""

SUM_BYTES_LIMIT = 2 << 30
"""Maximum workspace for sums in fp32, in bytes, unless one key/value head takes more. 32 heads of 128 take 2 GiB for
65,536 tokens. Groups cost no time there: 541 and 533 TFLOP/s in one group and in eight, and 528 in both for 131,072
tokens (H200, cuDNN 9.19, 2026-11-29)."""

MINIMUM_CUDNN = 91800
ORDERED_CUDNN = 92500
"""The oldest supported cuDNN (cudnn_library.cpp), and the first with the ordered route on SM90."""

_SLACK_BYTES = 1 << 16
_SLACK_DOCUMENT_BYTES = 512
"""Upper bounds of cuDNN's descriptors: a constant, and bytes per document (448 observed in 9.19 and 9.28)."""


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention op, and its attributes of scores.

    `documents` is the length of cu_seqlens minus one; in most batches many are empty. `own`: the out and lse that a
    backward reads are those of attention.
    """

    tokens: int
    documents: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    own: bool = True

    @property
    def dense(self) -> bool:
        """Whether every document has `seq_len` tokens, as in attention.h. cuDNN has faster graphs for such documents.

        This follows from the sizes, since documents cover all tokens and none is longer than `seq_len`.
        """
        return self.documents * self.seq_len == self.tokens

    @property
    def scores(self) -> tuple[int, float]:
        """The keys that a query sees, and the factor of their products."""
        return self.window, self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def launch(self) -> tuple[int | float, ...]:
        """Arguments of the plain launchers that say what to compute."""
        return self.tokens, self.documents, self.heads, self.kv_heads, self.head_dim, *self.scores, self.softcap

    @property
    def plan(self) -> tuple[int | float, ...]:
        """Arguments of cuDNN's plans that say what to compute."""
        return self.tokens, self.documents, self.seq_len, self.heads, self.kv_heads, self.head_dim, *self.scores


def shape_of(op: Op) -> Shape:
    """Return the sizes of an `attention` or `attention_bwd` op."""
    qkv, cu_seqlens = (op.ins[0], op.ins[1]) if op.kind == "attention" else (op.ins[1], op.ins[4])
    a, scores = op.attrs, {name: op.attrs[name] for name in ("window", "scale", "softcap", "own") if name in op.attrs}
    sizes = (a["seq_len"], a["n_heads"], a["n_kv_heads"], a["head_dim"])
    return Shape(qkv.shape[0], cu_seqlens.shape[0] - 1, *sizes, **scores)


def chunks_of(op: Op) -> int:
    """Return the number of chunks of rows of an `attention_bwd` op."""
    return int(op.attrs.get("chunks", 1))


def of_chunk(shape: Shape, chunks: int) -> Shape:
    """Return the shape of one of `chunks` equal chunks of rows, which hold whole documents.

    A ragged graph keeps the number of documents: those of other chunks are empty. Its kept scores do not shrink.
    """
    documents = shape.documents // chunks if shape.dense else shape.documents
    return replace(shape, tokens=shape.tokens // chunks, documents=documents)


# -------------------------------------------------------------------------------------------------------------- route


class Route(IntEnum):
    """Ways to accumulate dq. attention.h has the same codes and documents them."""

    ANY_ORDER = 0
    KEPT_SCORES = 1
    ORDERED = 2


@dataclass(frozen=True)
class BackwardAlgorithm:
    """A route, and the number of groups of key/value heads that the backward is split into."""

    route: Route
    groups: int = 1

    @property
    def deterministic(self) -> bool:
        return self.route is not Route.ANY_ORDER


def backward_algorithm(shape: Shape, target: Target, cudnn_version: int) -> BackwardAlgorithm:
    """Return the fastest algorithm that satisfies `target.deterministic`.

    Falls back to the nondeterministic route if the others are not available within SCORE_BYTES_LIMIT. Kept scores are
    preferred to the ordered route, in which the blocks of a head wait for each other.
    """
    is_ordered = (target.device.sm or 0) >= 100
    if target.deterministic == "false":
        kept = not is_ordered and kept_scores_are_faster(shape)
        return BackwardAlgorithm(Route.KEPT_SCORES) if kept else _in_groups(shape, Route.ANY_ORDER)
    if is_ordered or (cudnn_version >= ORDERED_CUDNN and score_bytes(shape) > SCORE_BYTES_LIMIT):
        return _in_groups(shape, Route.ORDERED)
    groups = head_groups(shape)
    return BackwardAlgorithm(Route.KEPT_SCORES, groups) if groups else _in_groups(shape, Route.ANY_ORDER)


def _in_groups(shape: Shape, route: Route) -> BackwardAlgorithm:
    """Return the fewest groups whose sums take SUM_BYTES_LIMIT at most, or as many as there are key/value heads."""
    algorithms = [BackwardAlgorithm(route, n) for n in range(1, shape.kv_heads + 1) if shape.kv_heads % n == 0]
    fits = (one for one in algorithms if algorithm_bytes(shape, one) <= SUM_BYTES_LIMIT)
    return next(fits, algorithms[-1])


def chunked_algorithm(shape: Shape, chunks: int, target: Target, cudnn_version: int) -> BackwardAlgorithm:
    """Return the algorithm of a backward in chunks of rows: that of the whole, which gives the same bits.

    A whole whose bits may differ from run to run is the exception: chunks may be small enough to keep the scores.
    """
    whole = backward_algorithm(shape, target, cudnn_version)
    return whole if whole.deterministic else backward_algorithm(of_chunk(shape, chunks), target, cudnn_version)


def kept_scores_are_faster(shape: Shape) -> bool:
    """Return whether storing the scores is the fastest route, apart from determinism.

    It saves clearing and converting dq in fp32, but its product for dq grows with the length. Backward of dense graphs
    on an H200 with cuDNN 9.19, kept scores against any order: 8 x 1,024, 28 heads of 128: 486 and 510 us; 32 x 1,024,
    12 heads of 128: 790 and 838; 2 x 2,048, 32 heads of 128: 494 and 466; 32 x 1,024, 14 heads of 64: 671 and 644.
    """
    return shape.dense and shape.seq_len <= 8 * shape.head_dim and head_groups(shape) == 1


def score_bytes(shape: Shape) -> int:
    """Bytes of the gradients of all scores in bf16, with every document at the maximum length."""
    rows, columns = -(-shape.seq_len // 64) * 64, -(-shape.seq_len // 128) * 128
    return 2 * shape.documents * shape.heads * rows * columns


def head_groups(shape: Shape) -> int:
    """Return the smallest number of equal groups of key/value heads that each fit in SCORE_BYTES_LIMIT, or 0."""
    for groups in range(1, shape.kv_heads + 1):
        if shape.kv_heads % groups == 0 and score_bytes(shape) <= groups * SCORE_BYTES_LIMIT:
            return groups
    return 0


# ---------------------------------------------------------------------------------------------------------- workspace


def packs_dkv(shape: Shape) -> bool:
    """Return whether dk and dv are written to packed workspace (attention.h).

    They are if query heads share key heads of ragged documents: cuDNN then gives its sums per query head the stride of
    dk and dv.
    """
    return shape.heads != shape.kv_heads and not shape.dense


def packs_dq(shape: Shape, algorithm: BackwardAlgorithm) -> bool:
    """Return whether q is read from, and dq written to, packed workspace: in groups of ragged documents that do not
    keep scores.

    cuDNN gives its sums in fp32 the stride of dq, which in place is the row of all heads, and finds the sums of a
    document by its offset in q.
    """
    return algorithm.groups > 1 and not shape.dense and algorithm.route is not Route.KEPT_SCORES


def forward_bytes(shape: Shape) -> int:
    """Upper bound of the forward workspace: lengths, three arrays of offsets, cuDNN's own workspace."""
    return _ragged_bytes(shape, 3) + _own_bytes(shape)


def backward_bytes(shape: Shape, target: Target, chunks: int = 1) -> int:
    """Upper bound of the backward workspace of a chunk of rows for any version of cuDNN."""
    algorithms = {chunked_algorithm(shape, chunks, target, version) for version in (MINIMUM_CUDNN, ORDERED_CUDNN)}
    return max(algorithm_bytes(of_chunk(shape, chunks), algorithm) for algorithm in algorithms)


def algorithm_bytes(shape: Shape, algorithm: BackwardAlgorithm) -> int:
    """Upper bound of the workspace of an algorithm.

    For one group of heads: packed lse, or packed dk, dv, q and dq in bf16; in cuDNN rowsum(dout * out), dk and dv of
    every query head, and either the score gradients or dq in fp32. For ragged documents, dk and dv of a query head have
    4 bytes per element and dq the row width of qkv, unless it is packed. The ordered route has a counter of 8 bytes for
    every document, head and 64 queries.
    """
    group = replace(shape, heads=shape.heads // algorithm.groups, kv_heads=shape.kv_heads // algorithm.groups)
    tokens, size = shape.tokens, shape.head_dim
    shared = 0 if shape.heads == shape.kv_heads else 2 * tokens * group.heads * size
    total = _own_bytes(shape) + 4 * tokens * group.heads
    if shape.dense:
        total += aligned(4 * tokens * group.heads) + 2 * shared
        dq_row = group.heads * size
    else:
        packed, packed_dq = packs_dkv(shape), packs_dq(shape, algorithm)
        total += _ragged_bytes(shape, 3 + packed + packed_dq) + 4 * shared
        total += 2 * aligned(2 * tokens * group.kv_heads * size) if packed else 0
        total += 2 * aligned(2 * tokens * group.heads * size) if packed_dq else 0
        dq_row = group.heads * size if packed_dq else (shape.heads + 2 * shape.kv_heads) * size
    if algorithm.route is Route.KEPT_SCORES:
        return aligned(total + score_bytes(group))
    counters = 8 * shape.documents * group.heads * -(-shape.seq_len // 64) if algorithm.route is Route.ORDERED else 0
    return aligned(total + 4 * tokens * dq_row + counters)


def _ragged_bytes(shape: Shape, tensors: int) -> int:
    """Lengths, and offsets for `tensors` different strides. Dense graphs have none."""
    return 0 if shape.dense else aligned(4 * shape.documents) + aligned(8 * tensors * (shape.documents + 1))


def _own_bytes(shape: Shape) -> int:
    return _SLACK_BYTES + aligned(_SLACK_DOCUMENT_BYTES * shape.documents)


# ------------------------------------------------------------------------------------------------------------ messages


MAY_DIFFER = "gradients may differ in their last bits from run to run. deterministic: true says what to change."


def nondeterminism_note(cudnn: str) -> str:
    """Explain why a backward by `cudnn` ("cuDNN 9.19.1") is nondeterministic, and the remedies.

    The text is the same for all shapes, so that it is shown once.
    """
    return (
        f"The attention backward of {cudnn} is deterministic only if it stores the gradients of all scores. For "
        f"batches of many or long documents this may take more than {SCORE_BYTES_LIMIT / 2**30:.0f} GiB, even for one "
        "key/value head and its query heads. To make it deterministic: "
        f"pip install --upgrade 'nvidia-cudnn-cu13>={dotted(ORDERED_CUDNN)}', or reduce per_device_train_batch_size or "
        "sequence_len, or set sample_packing: false, or set SUROGATE_ATTENTION=plain in the environment (slower)."
    )


def score_sizes(shape: Shape) -> str:
    """Return the sizes of the score gradients of a shape, for an error message."""
    group = score_bytes(shape) / shape.kv_heads / 2**30
    return (
        f"{group:.1f} GiB for each of {shape.kv_heads} groups of heads: up to {shape.documents} documents of up to "
        f"{shape.seq_len} tokens"
    )


def planned_notice(shape: Shape, target: Target, chunks: int = 1) -> str:
    """Return the notice of `surogate plan` if determinism depends on the version of cuDNN, which is not loaded yet."""
    if target.deterministic == "false" or chunked_algorithm(shape, chunks, target, MINIMUM_CUDNN).deterministic:
        return ""
    before = f"cuDNN before {dotted(ORDERED_CUDNN)}"
    if target.deterministic == "true":
        return f"deterministic: true: with {before} the run is refused. {nondeterminism_note(before)}"
    return f"deterministic: auto: with {before} {MAY_DIFFER}"


def dotted(version: int) -> str:
    """Format a version number: 91901 -> "9.19.1"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"
