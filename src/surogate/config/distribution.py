"""Keys on the devices and processes of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .values import Flag, Int, Keys, Number, Text, Word


class DistributionKeys(Keys):
    """Distribution"""

    gpus: Int = Field(
        1, ge=0, description="GPUs of this machine to train on; 0: all visible ones. Without a GPU the CPU trains."
    )
    ranks_per_gpu: Int = Field(
        1,
        ge=1,
        description="Ranks on each GPU, or on the CPU. More than 1 trains as on that many GPUs, slowly, to test what "
        "runs on several.",
    )
    transport: Annotated[Literal["auto", "nccl", "copies", "gloo"], Word] = Field(
        "auto",
        description="What exchanges gradients between ranks. copies: threads of one process read each other's memory. "
        "gloo: by way of the host, slowly. auto: nccl between GPUs, copies or gloo where ranks share one or on CPUs.",
    )
    launcher: Text = Field(
        "auto",
        description="Starts the processes of a run, or joins those that are started; from an installed plugin. auto: "
        "the one whose environment variables are set or whose own key is given, else local: one process.",
    )
    stall_seconds: Number = Field(
        60,
        gt=0,
        description="A run of several ranks ends when none comes further for so long. Start, first step and saves may "
        "take longer.",
    )
    max_restarts: Int = Field(
        0,
        ge=0,
        description="How often a run continues from its last complete checkpoint after a device or a process was lost. "
        "torchrun and Slurm restart by themselves (--max-restarts, --requeue).",
    )
    zero_level: Int = Field(
        1,
        ge=1,
        le=3,
        description="What ranks divide, so that each holds a part (ZeRO). 1: masters and states of the optimizer. 2: "
        "the sums of gradients too. 3: weights too.",
    )
    shard_gradients: Flag | None = Field(
        None, description="Divide the sums of gradients among the ranks. Default: with zero_level 2 and 3."
    )
    shard_weights: Flag | None = Field(
        None,
        description="Divide the weights among the ranks, which gather each block ahead of its use. Default: with "
        "zero_level 3.",
    )
    whole_blocks: Int = Field(
        0,
        ge=0,
        description="With divided weights: the first blocks, as many as this, stay whole on every rank, which gathers "
        "the others alone.",
    )
