"""A loss of your own: focal loss, which trains less on tokens that the model knows already. This file is the plugin.

python examples/recipes/own_loss.py
"""

import surogate
from surogate_core.api import Loss, LossContext, LossDef, Metric, OpDef, OutSpec, provides

SUROGATE_API = {"ops": 1, "losses": 1}


def focal_sum(log_probs, scale):  # tensors of torch; positions without a label are 0
    return -scale * ((1 - log_probs.exp()) ** 2 * log_probs).sum()


SUM = OpDef(
    kind="focal_sum",
    infer=lambda ins, attrs: [OutSpec("loss", (), ins[0].dtype)],
    reference=f"{__name__}:focal_sum",  # what the op computes; its gradient follows from it
)


def build(c: LossContext) -> Loss:
    attrs = {"chunks": c.batch.lmhead_chunks, **c.head.attrs}
    log_probs, *_ = c.builder.emit("lm_head_tokens", c.head.x, c.head.weight, c.batch.targets, **attrs)
    return Loss([Metric("loss", c.builder.apply("focal_sum", log_probs, c.batch.loss_scale))])


surogate_ops = provides([SUM])
surogate_losses = provides([LossDef(name="focal", summary="focal loss", build=build)])

if __name__ == "__main__":
    result = surogate.pt(
        "examples/quickstart.yaml",
        plugins=[__file__],
        loss="focal",
        kernels="allow_reference",  # on a GPU torch runs the op
        max_steps=10,
        warmup_steps=2,
        sequence_len=64,
        validation_split_ratio=0,
        output_dir="output/recipes/focal",
        verify_outputs=False,
    )
    print(f"focal loss {result.losses[0]:.2f} to {result.losses[-1]:.2f}")
