"""Weights of experts that are stored in a weight format are decoded a few experts at a time."""

from __future__ import annotations

from ...errors import ConfigError
from ...front_end import called
from ...program.op import Program
from ...program.passes.decode_some import can_decode_some, decode_some
from ..draft import Draft


def decodes_experts(draft: Draft) -> bool:
    """Return whether products of experts read weights that can be decoded a few experts at a time."""
    return can_decode_some(draft.programs["evaluate"], draft.inputs.ops)


def decode_some_experts(draft: Draft) -> Draft:
    """Divide what decodes more than `decoded_experts` bytes of a weight.

    Raises ConfigError if the run has no such weight of any size.
    """
    most, b = draft.inputs.decoded_experts, draft.builder
    assert most
    if not decodes_experts(draft):
        raise ConfigError(
            f"{called('decoded_experts')}: no product of experts in this run reads weights that a weight format can "
            "decode a few experts at a time. Remove the key."
        )

    def decoded(program: Program) -> Program:
        after = decode_some(program, most, b)
        return program if after is program else draft.verified(program, after)

    return draft.changing_micro_steps(decoded).having(decoded(draft.programs["evaluate"]))
