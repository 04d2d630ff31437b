"""A loss for Surogate: cross-entropy, and the squared log of the softmax's denominator (z-loss)"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Loss, LossContext, LossDef, Metric, OpDef, OutSpec, provides

SUROGATE_API = {"ops": 1, "losses": 1}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    acme_toy_factor: float = Field(1e-4, ge=0, description="Weight of the squared logarithm.")


def acme_toy_sum(values, scale, *, factor: float, power: int):  # type: ignore[no-untyped-def]  # tensors
    return factor * scale * (values**power).sum()


SUM = OpDef(
    kind="acme_toy_sum",
    infer=lambda ins, attrs: [OutSpec("loss", (), ins[0].dtype)],
    attrs={"factor": float, "power": int},
    reference=f"{__name__}:acme_toy_sum",
)


def build(c: LossContext) -> Loss:
    b, head, batch = c.builder, c.head, c.batch
    attrs = {"chunks": batch.lmhead_chunks, **head.attrs}
    log_probs, log_z, _ = b.emit("lm_head_tokens", head.x, head.weight, batch.targets, **attrs)
    loss = b.apply("acme_toy_sum", log_probs, batch.loss_scale, factor=-1.0, power=1)
    z = b.apply("acme_toy_sum", log_z, batch.loss_scale, factor=c.options.acme_toy_factor, power=2)
    return Loss([Metric("loss", loss), Metric("z", z)])


surogate_ops = provides([SUM])
surogate_losses = provides([LossDef(name="acme_toy", summary="z-loss", options=Options, build=build, in_nats=True)])
