"""Selection of the params and states of a run that the host holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from surogate_core.api import ConfigError, OffloadContext, Programs, Value

SMALLEST_BYTES = 64 << 10
"""Smaller values stay on the device if there are larger ones: at 55 GB/s a copy of them takes 1 us, less than it takes
to start."""


def optimizer_states(programs: Programs, context: OffloadContext) -> Sequence[Value]:
    """Return the states of the optimizer."""
    return _some(
        context.optimizer_states,
        "offload_optimizer: true: the optimizer of this run has no states. Remove the key.",
    )


def masters(programs: Programs, context: OffloadContext) -> Sequence[Value]:
    """Return the masters that are not the weights themselves."""
    return _some(
        (p.master for p in context.params.values() if p.master is not None and p.master.role == "state"),
        "offload_master: true: this run has no master weights besides the weights, which are trained in place. Remove "
        "the key; offload_weights and offload_quants keep weights in host memory that micro-steps read.",
    )


def gradients(programs: Programs, context: OffloadContext) -> Sequence[Value]:
    """Return the gradients of params in blocks, or this rank's parts of them."""
    trained = [p for p in context.params.values() if p.grad is not None and p.param.block >= 0]
    if any(p.grad_part is not None and p.grad_part.inside for p in trained):
        raise ConfigError(
            "offload_grads: true: each of several ranks would hold all gradients. Set shard_gradients: true (or "
            "zero_level: 2), so that it holds a part."
        )
    return _some(
        (p.grad_part or p.grad for p in trained if p.grad is not None),
        "offload_grads: true: this run trains no weights of blocks. Remove the key.",
    )


def weights(programs: Programs, context: OffloadContext) -> Sequence[Value]:
    """Return the model's matrices in the chosen blocks that micro-steps read."""
    read = {value for op in programs.micro.ops for value in op.ins}
    matrices = [param for param, p in context.params.items() if p.of_model and p.kind == "matrix" and param.block >= 0]
    found = _some(
        (param for param in matrices if param in read),
        "offload_weights: the micro-steps of this run read no matrices of blocks, but quantized copies of them. Use "
        "offload_quants, or remove the key.",
    )
    return _of_blocks(found, context.options.offload_weights)


def quantized_weights(programs: Programs, context: OffloadContext) -> Sequence[Value]:
    """Return the quantized weights in the chosen blocks: states that are made of params and that micro-steps read."""
    read = dict.fromkeys(value for op in programs.micro.ops for value in op.ins)
    found = _some(
        (value for value in read if value.role == "state" and value.derived and value.block >= 0),
        "offload_quants: this run keeps no quantized weights. Remove the key, choose a recipe that keeps them, such as "
        "fp8-hybrid, or store frozen weights quantized (qlora_bnb, qlora_fp8, qlora_fp4).",
    )
    return _of_blocks(found, context.options.offload_quants)


def embedding(programs: Programs, context: OffloadContext) -> Sequence[Value]:
    """Return the embedding, of which micro-steps read some rows alone."""
    found = [p for p in context.params.values() if p.of_model and p.kind == "embedding"]
    readers = [op for op in programs.micro.ops if not {p.param for p in found}.isdisjoint(op.ins)]
    reason = ""
    if any(p.grad is not None for p in found):
        reason = "this run trains the embedding"
    elif not readers:
        reason = "the micro-steps of this run read no embedding, but what it is stored as (quantize_embedding)"
    elif not all(context.builder.ops[op.kind].zero_copy for op in readers):
        reason = "the LM head of this model is its embedding, which each micro-step reads as a whole"
    if reason:
        raise ConfigError(f"offload_embedding: true: {reason}. Remove the key.")
    return [p.param for p in found]


def _some(values: Iterable[Value], without: str) -> Sequence[Value]:
    """Return those of `values` that are worth a copy; all of them if none is, so that a config can be tried on a tiny
    model. Raises ConfigError with the text `without` if there are no values.
    """
    values = list(values)
    if not values:
        raise ConfigError(without)
    return [value for value in values if value.nbytes >= SMALLEST_BYTES] or values


def _of_blocks(values: Sequence[Value], wanted: bool | int) -> Sequence[Value]:
    """Return the values of `wanted` blocks; True: of all. The blocks are spread evenly, so that copies have the time of
    the blocks in between."""
    blocks = sorted({value.block for value in values})
    count = len(blocks) if wanted is True else min(int(wanted), len(blocks))
    chosen = {blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count)}
    return [value for value in values if value.block in chosen]
