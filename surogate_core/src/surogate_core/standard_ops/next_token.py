"""The loss of a run that names none: the cross-entropy of the next token."""

from __future__ import annotations

from ..api import Loss, LossContext, LossDef, Metric, NoOptions


def _build(context: LossContext[NoOptions]) -> Loss:
    head, batch = context.head, context.batch
    total = context.builder.apply(
        "lm_head_ce",
        *(head.x, head.weight, batch.targets, batch.loss_scale),
        chunks=batch.lmhead_chunks,
        **head.attrs,
    )
    return Loss([Metric("loss", total)])


LOSSES: tuple[LossDef[NoOptions], ...] = (
    LossDef(
        name="next_token",
        summary="cross-entropy of the next token, mean over the labels",
        build=_build,
        in_nats=True,
    ),
)
