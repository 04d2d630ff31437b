"""Keys on the memory of device and host: limits, what is recomputed, and what runs in parts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .values import Bytes, BytesOrAuto, Flag, FlagOrAuto, Int, Keys, count_or_auto, recompute_word


class MemoryKeys(Keys):
    """Memory"""

    device_memory_limit: Bytes | None = Field(
        None,
        description="Memory that the run may take of each device, such as 24GiB or 24GB. The plan, `recompute: auto` "
        "and the check before the first step treat the device as one with this much; null: all of it.",
    )
    host_memory_limit: Bytes | None = Field(
        None,
        description="Host memory that the run may pin for offloading, on all its GPUs together, such as 128GiB. A run "
        "that needs more is refused. null: what is available on this machine when the run is planned, less 2 GiB; for "
        "a device of another machine (`--device`) it is not checked.",
    )
    recompute: Annotated[Literal["auto", "true", "false"], BeforeValidator(recompute_word)] = Field(
        "auto",
        description="What is recomputed in the backward pass besides the parts whose `recompute_*` key is true. auto: "
        "nothing if the run fits into the device's memory, else the cheapest that makes it fit; on a CPU only with "
        "`device_memory_limit`. true: everything. false: nothing. No setting changes the results by a bit.",
    )
    recompute_swiglu: Flag = Field(False, description="Recompute the SwiGLU output in the backward pass.")
    recompute_rmsnorm: Flag = Field(False, description="Recompute the outputs of the norms.")
    recompute_ffn: Flag = Field(False, description="Recompute the feed-forward part; includes swiglu.")
    recompute_qkv: Flag = Field(False, description="Recompute the q, k, v projections.")
    recompute_att: Flag = Field(False, description="Recompute attention; includes qkv. Alias `recompute_attention`.")
    recompute_block: Flag = Field(False, description="Recompute whole blocks; includes att, ffn and rmsnorm.")
    recompute_pairs: Flag = Field(
        False,
        description="Recompute what enters every second block too, from the block before, whose forward pass runs once "
        "more for it; includes block. `offload_residual` then holds half of the blocks' residuals.",
    )
    recompute_lora: Flag = Field(
        False,
        description="Recompute what the adapter adds to a block too; includes block. No effect without an adapter.",
    )
    row_tiles: Annotated[int | Literal["auto"], BeforeValidator(count_or_auto(0))] = Field(
        "auto",
        description="Rows, that is tokens, of a micro-step on which norms, products and feed-forward parts run at a "
        "time, a multiple of 128; 0: all. auto: all, or at most 16 tiles if `sequence_len` is above 16384 and the run "
        "would not fit otherwise, or be slower.",
    )
    decoded_experts: BytesOrAuto = Field(
        "auto",
        description="Most memory, such as 256MiB, for a weight of a layer's experts that is decoded from a `qlora_*` "
        "format, which is then decoded a few experts at a time; 0: all. auto: all, or 256MiB if the run would not fit "
        "otherwise, or be slower.",
    )
    lmhead_chunks: Annotated[int | Literal["auto"], BeforeValidator(count_or_auto(1))] = Field(
        "auto",
        description="Chunks in which the logits are computed; divides batch size x `sequence_len`. On a GPU, chunks "
        "beyond the labels of a micro-batch are skipped.",
    )
    attn_bwd_chunks: Int = Field(
        1,
        ge=1,
        description="Chunks of rows in which the attention backward pass runs, one after another in the workspace of "
        "one; divides `per_device_train_batch_size`.",
    )
    use_zero_copy: FlagOrAuto = Field(
        "auto",
        description="The update reads and writes what an offload strategy keeps in host memory where it is, over the "
        "link, instead of copying it to the device and back. auto: that of the embedding and the LM head alone.",
    )
    use_cuda_graphs: Flag = Field(
        True,
        description="Replay a step as CUDA graphs, unless its ops are so long that launches take no time beside them. "
        "No effect on a CPU.",
    )
