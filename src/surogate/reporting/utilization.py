"""Model FLOPs utilization (MFU) of a run: tokens/s x FLOPs per token / peak of the devices.

FLOPs per token are those of the plan: what the ops of a micro-step compute, forward and backward, by `OpDef.flops`,
before anything is recomputed, and the update, divided by the tokens of a step without padding. An adapter has no
gradients of frozen weights, and attention counts half of the scores (causal) over whole rows. The peak is the vendor's
dense one in bf16 with sums in fp32 (`DeviceInfo.peak_flops`), whatever the dtype of a run's products.
"""

from __future__ import annotations

from dataclasses import dataclass

from surogate_core.planning.plan import Plan


@dataclass(frozen=True)
class Utilization:
    """flops_per_token: of the whole model. peak: FLOP/s of all devices together."""

    flops_per_token: float
    peak: float
    devices: str

    def of(self, tokens_per_second: float) -> float:
        return tokens_per_second * self.flops_per_token / self.peak

    def __str__(self) -> str:
        return (
            f"MFU: tokens/s x {self.flops_per_token / 1e9:.3g} GFLOPs per token (the plan's, nothing recomputed) / "
            f"{self.peak / 1e12:,.0f} TFLOP/s (dense bf16 peak of {self.devices})"
        )


def utilization(plan: Plan, devices: str) -> Utilization | None:
    """Return how a run's MFU is computed; None if the peak of its devices is not known. devices: their names."""
    report, ops = plan.report, plan.inputs.ops
    peak = report.device.peak_flops * report.devices
    if not peak:
        return None
    micro = sum(ops[op.kind].flops(op) for op in plan.assembly.micro.ops)
    update = sum(ops[op.kind].flops(op) for op in plan.assembly.only("update").ops)
    steps = plan.inputs.grad_accum_steps * plan.inputs.world_size
    return Utilization((micro * steps + update) / (plan.inputs.tokens * steps), peak, devices)
