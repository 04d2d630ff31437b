"""The inputs of the programs of a run, which the training loop writes before a program runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .value import Value


@dataclass(frozen=True)
class BatchInputs:
    """The input values of a micro-step of T tokens: rows of `seq_len`, flattened.

    tokens         int32 [T]
    targets        int32 [T]: the label of each position, already shifted; -100 for none
    positions      int32 [T]: restart at 0 in each document
    cu_seqlens     int32 [max_documents + 1]: ascending offsets of the documents in [0, T]; unused entries are T. The
                   documents cover [0, T]: padding is a document without labels. Batches of few documents run with a
                   shorter one, so no output of an op may depend on its length.
    loss_scale     fp32 []: 1 / number of labels in the whole optimizer step
    seq_len        tokens per row; no document is longer
    lmhead_chunks  number of chunks into which ops of the LM head divide the T rows to limit the memory of the logits
    groups         int32 [G, n, 2]: start and stop of the n documents of each group, each with a label; unused entries
                   are 0
    group_scale    fp32 []: 1 / number of groups in the whole optimizer step
    columns        by name: [T], the number of the token that is the label of a position, 0 without a label, or
                   [T, *shape], its numbers; or [G, n], that of each document of a group
    means          by name, fp32 []: means of metrics over the whole optimizer step (`Prepass`)

    The last four are what the run's loss asks for (`LossDef`).
    """

    tokens: Value
    targets: Value
    positions: Value
    cu_seqlens: Value
    loss_scale: Value
    seq_len: int
    lmhead_chunks: int = 1
    groups: Value | None = None
    group_scale: Value | None = None
    columns: Mapping[str, Value] = field(default_factory=dict)
    means: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Scalars:
    """Scalars in device memory, so that a captured graph does not contain their values as constants.

    lr          fp32 []
    step        int32 []: number of the optimizer step, from 1
    micro_step  int32 []: number of the micro-step in the whole run
    seed        int64 []
    first_micro_step
                int32 []: `micro_step` of rank 0; None unless ranks divide gradients
    rates       by factor, fp32 []: `lr` times it, of params that an adapter trains at other rates (`AdapterDef.rate`)
    """

    lr: Value
    step: Value
    micro_step: Value
    seed: Value
    first_micro_step: Value | None = None
    rates: Mapping[float, Value] = field(default_factory=dict)
