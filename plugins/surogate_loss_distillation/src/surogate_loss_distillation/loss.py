"""The loss `distillation`: cross-entropy and the divergence from a teacher, each a mean over the labels of the step."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.api import Column, ConfigError, Loss, LossContext, LossDef, Metric, PrepareContext, Prepared

from .options import DistillationOptions


def columns(options: DistillationOptions) -> Sequence[Column]:
    k = options.distillation_top_k
    return Column("teacher_ids", shape=(k,), dtype="int32"), Column("teacher_log_probs", shape=(k + 1,))


def build(context: LossContext[DistillationOptions]) -> Loss:
    b, head, batch, o = context.builder, context.head, context.batch, context.options
    _refuse_no_teacher(o)
    vocabulary = head.weight.shape[0]
    if o.distillation_top_k > vocabulary:
        raise ConfigError(
            f"distillation_top_k: {o.distillation_top_k} is more than the vocabulary of the model, {vocabulary:,} "
            "tokens. Use that or less."
        )
    loss, cross_entropy, divergence = b.emit(
        "lm_head_distill",
        head.x,
        head.weight,
        batch.targets,
        *(batch.columns[column.name] for column in columns(o)),
        batch.loss_scale,
        chunks=batch.lmhead_chunks,
        weight=o.distillation_weight,
        temperature=o.distillation_temperature,
        reverse=o.distillation_kl == "reverse",
        **head.attrs,
    )
    return Loss(
        [Metric("loss", loss)], metrics=[Metric("cross_entropy", cross_entropy), Metric("divergence", divergence)]
    )


def prepare(context: PrepareContext[DistillationOptions]) -> Prepared:
    from .teacher import prepared_by  # with numpy, which a plan does not need

    _refuse_no_teacher(context.options)
    return prepared_by(context)


def _refuse_no_teacher(options: DistillationOptions) -> None:
    if not options.distillation_teacher:
        raise ConfigError(
            "loss: distillation needs a teacher. Set distillation_teacher to a model with the same tokenizer."
        )


DISTILLATION: LossDef[DistillationOptions] = LossDef(
    name="distillation",
    summary="cross-entropy and KL divergence from the cached top-k probabilities of a teacher",
    options=DistillationOptions,
    build=build,
    columns=columns,
    prepare=prepare,
)
