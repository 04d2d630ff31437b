"""The backward pass of attention runs in chunks of rows."""

from __future__ import annotations

from dataclasses import replace

from ...errors import ConfigError
from ..draft import Draft


def run_in_chunks(draft: Draft) -> Draft:
    """Set the attribute `chunks` of ops that take it (`OpDef.takes_chunks`). Raises ConfigError if there are none."""
    inputs, program = draft.inputs, draft.programs["micro"]
    chunks = inputs.attn_bwd_chunks
    ops = tuple(
        op.changed(attrs={**op.attrs, "chunks": chunks}) if inputs.ops[op.kind].takes_chunks else op
        for op in program.ops
    )
    if ops == program.ops:
        raise ConfigError(
            f"attn_bwd_chunks: {chunks}: model {inputs.model.name} has no attention whose backward pass can "
            "run in chunks. Remove the key."
        )
    return draft.having(draft.verified(program, replace(program, ops=ops)))
