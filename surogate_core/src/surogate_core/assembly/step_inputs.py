"""The values that the training loop writes before a program runs, and the chunks of the LM head."""

from __future__ import annotations

from ..api import BatchInputs, Scalars
from ..dtypes import DTYPES, wider
from ..errors import ConfigError, ProgramError
from ..front_end import called
from ..program.builder import Builder
from .inputs import PlanInputs


def declare_batch(b: Builder, inputs: PlanInputs) -> BatchInputs:
    tokens, precision = inputs.tokens, inputs.precision
    of_logits = wider(precision.model, precision.matmul)
    chunks = lm_head_chunks(inputs.lmhead_chunks, tokens, inputs.dims.vocab_size, of_logits)
    group, columns = inputs.loss.group_size, inputs.loss.columns(inputs.loss_options)
    groups = ((inputs.max_documents - inputs.batch_size) // group, group) if group else ()  # of each row one is padding
    if not group and (alone := [column.name for column in columns if column.per == "document"]):
        raise ProgramError(f"loss {inputs.loss.name}: {alone[0]} is a column per document, but LossDef.group_size is 0")
    shapes = {"token": (tokens,), "document": groups}
    return BatchInputs(
        tokens=b.input("tokens", (tokens,), "int32"),
        targets=b.input("targets", (tokens,), "int32"),
        positions=b.input("positions", (tokens,), "int32"),
        cu_seqlens=b.input("cu_seqlens", (inputs.max_documents + 1,), "int32"),
        loss_scale=b.input("loss_scale", (), "fp32"),
        seq_len=inputs.seq_len,
        lmhead_chunks=chunks,
        groups=b.input("groups", (*groups, 2), "int32") if group else None,
        group_scale=b.input("group_scale", (), "fp32") if group else None,
        columns={c.name: b.input(f"column.{c.name}", (*shapes[c.per], *c.shape), c.dtype) for c in columns},
        means={name: b.input(f"mean.{name}", (), "fp32") for name in inputs.loss.prepass.means}
        if inputs.loss.prepass
        else {},
    )


def declare_scalars(b: Builder, inputs: PlanInputs) -> Scalars:
    return Scalars(
        lr=b.input("lr", (), "fp32"),
        step=b.input("step", (), "int32"),
        micro_step=b.input("micro_step", (), "int32"),
        seed=b.input("seed", (), "int64"),
        first_micro_step=b.input("first_micro_step", (), "int32") if inputs.sharding.gradients else None,
    )


LOGITS_BYTES = 512 << 20
"""`lmhead_chunks: auto` keeps the logits of a chunk at or below this size."""


def lm_head_chunks(asked: int | None, tokens: int, vocab_size: int, dtype: str) -> int:
    """Return the number of chunks: `asked`, or for None as many as `auto_lmhead_chunks` chooses.

    Raises ConfigError if `asked` does not divide the tokens of a micro-step.
    """
    chunks = asked or auto_lmhead_chunks(tokens, vocab_size, dtype)
    if tokens % chunks:
        raise ConfigError(
            f"lmhead_chunks: {chunks} does not divide {called('batch_size')} x {called('seq_len')} = {tokens} tokens. "
            "Use a divisor, or auto."
        )
    return chunks


def auto_lmhead_chunks(tokens: int, vocab_size: int, dtype: str) -> int:
    """Return the smallest number of equal chunks whose logits stay within LOGITS_BYTES each."""
    row = DTYPES[dtype].nbytes(vocab_size)
    return min(c for c in divisors(tokens) if tokens // c * row <= LOGITS_BYTES or c == tokens)


def divisors(n: int) -> list[int]:
    """Return all divisors of `n`, from its prime factors: counting up to a large prime `n` would hang."""
    every, rest, factor = [1], n, 2
    while rest > 1:
        factor = factor if factor * factor <= rest else rest
        power = 1
        found = every
        while rest % factor == 0:
            rest //= factor
            power *= factor
            every = every + [d * power for d in found]
        factor += 1
    return every
