"""The inputs of every family of programs: what the training loop writes before a program runs."""

from __future__ import annotations

from dataclasses import dataclass

from .value import Value


@dataclass(frozen=True)
class BatchInputs:
    """The input values of a micro-step of T tokens: rows of `seq_len`, flattened.

    tokens      int32 [T]
    targets     int32 [T]: the label of each position, already shifted; -100 where there is none
    positions   int32 [T]: restart at every document
    cu_seqlens  int32 [max_documents + 1]: offsets of the documents in [0, T], ascending; unused entries repeat T.
                Documents tile [0, T]: padding is a document without labels.
    loss_scale  fp32 []: 1 / valid tokens of the whole optimizer step
    seq_len     tokens a row: no document is longer
    lmhead_chunks  into how many pieces `lm_head_ce` divides the T rows, to keep its logits small
    """

    tokens: Value
    targets: Value
    positions: Value
    cu_seqlens: Value
    loss_scale: Value
    seq_len: int
    lmhead_chunks: int = 1


@dataclass(frozen=True)
class Scalars:
    """Device scalars that the loop writes before a program runs, so that a captured graph never bakes one in.

    lr          fp32 []
    step        int32 []: 1 at the first optimizer step
    micro_step  int32 []: counts micro-steps over the whole run
    seed        int64 []
    """

    lr: Value
    step: Value
    micro_step: Value
    seed: Value
