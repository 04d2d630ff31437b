"""The passes that make the programs of a run, in the order in which they run. A run skips those that it does not need.

All programs share params, gradients, states, inputs, and one arena. `verify` checks the result of every pass, once the
plan is chosen.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Step(NamedTuple):
    """A place in the order of passes.

    name  of the pass; some run more than once
    of    the programs that it makes or changes
    does  what it does, in a few words
    """

    name: str
    of: str
    does: str


PASSES: Final = (
    # recorded once for all plans of a run: `assemble.record`
    Step("build", "forward", "the model records its ops"),
    Step("loss", "forward", "the run's loss follows"),
    Step("adapter", "forward", "adapters rewrite the model"),
    Step("reference", "forward", "the model without adapters runs before, for losses that compare with it"),
    Step("fuse_adds", "forward", "products add"),
    Step("differentiate", "micro", "appends the backward rule of every op"),
    Step("evaluation", "evaluate", "the forward program without ops for training alone"),
    Step("outputs", "micro, evaluate", "the loss becomes a state"),
    Step("dead_code", "micro, evaluate", "drops ops that no op reads"),
    Step("fuse_adds", "micro", "products add"),
    Step("chunks", "micro", "the attention backward pass in chunks"),
    Step("derive", "derive", "what is made of params at every start"),
    Step("optimizer", "update", "the global norm, then the optimizer"),
    Step("start", "start", "masters from params"),
    Step("store", "derive", "writes frozen weights in a weight format"),
    Step("lower", "all", "the recipe chooses dtypes; may add `calibrate` and `numerics`, which are micro-steps"),
    Step("dead_code", "all", "drops ops that no op reads"),
    Step("quantize parts", "update", "ranks quantize the parts of weights that they have updated"),
    Step("read stored", "all", "reads frozen weights from the weight format"),
    Step("fuse", "micro-steps", "adapters fuse ops"),
    Step("adapter start", "adapter_start", "adapters compute their params from the loaded weights"),
    Step("read stored", "adapter_start", "reads frozen weights from the weight format"),
    # finished for each plan: `assemble.draft`
    Step("recompute", "micro-steps", "computes values again instead of keeping them"),
    Step("dead_code", "micro-steps", "drops ops that no op reads"),
    Step("offload", "all", "strategies move values, one strategy after another"),
    Step("accumulate", "micro-steps", "micro_first writes gradients, micro_next adds to them"),
    Step("scatter", "micro-steps", "ranks divide gradients"),
    Step("reduce", "the last micro-step", "sums gradients over ranks; makes micro_last, or micro_only"),
    Step("pending", "micro-steps, evaluate, update", "states of a step that may be skipped change in a copy"),
    Step("gather late", "update, micro-steps", "the first micro-step gathers what the update left in parts"),
    Step("staged", "derive", "a program for the params of a block that nothing else reads"),
    Step("divide", "all", "ranks divide weights"),
    Step("stream", "all", "copies what the host holds"),
    Step("in_place", "all", "outputs take the place of inputs"),
    Step("documents", "micro-steps, evaluate", "variants for batches of few documents"),
)
