"""The standard ops: shape rules, backward rules and FLOPs of the ops of decoder models.

They are registered through the same hooks as a plugin's ops. The torch reference of the same name in `reference/ops.py`
defines what each op computes. Dimensions: T tokens, C model width, H query heads, G key/value heads, D head size,
F feed-forward width, V vocabulary size, N and K rows and columns of a weight.

    embedding      (tokens [T], w [V, C])                      -> x [T, C]
    linear         (x [T, K], w [N, K], bias [N]?; dtype)      -> y [T, N]
    linear_add     (x [T, K], w [N, K], base [T, N])           -> base + linear(x, w), which may take the place of base
    linear_pair    (x [T, K], w [N, K], x2 [T, R], w2 [N, R]; dtype) -> linear(x, w) + linear(x2, w2)
    rmsnorm        (x [T, C], w [C]; eps)                      -> norm [T, C], rstd [T]
    add_rmsnorm    (x [T, C], residual [T, C], w [C]; eps)     -> norm [T, C], rstd [T], residual [T, C]
    attention      (qkv [T, (H+2G)D], cu_seqlens; n_heads, n_kv_heads, head_dim, seq_len) -> out [T, HD], lse [H, T]
    swiglu         (gate_up [T, 2F], halves [gate; up])        -> [T, F]
    lm_head_ce     (x [T, C], w [V, C], targets [T], loss_scale []; chunks) -> loss []
    all_reduce     (values; world_size, how)                   -> the values, summed over the ranks of a run
    reduce_scatter (values; world_size, how)                   -> this rank's parts of the sums
    take_part      (x; world_size)                             -> this rank's part
    all_gather     (parts; world_size, shapes)                 -> the values of which the ranks have parts
    reduce         (values; world_size, how)                   -> the sums, on the ranks that own the outputs
    broadcast      (values; world_size, shapes)                -> the values, each of its owner, put together in order
    move           (x)                                         -> x on the host (lane "to_host"), or on the device
    wait           (values)                                    -> nothing; "compute" waits for the ops that write them
"""

from __future__ import annotations

from ..program.opdef import OpDef
from .collectives import COLLECTIVES
from .elementwise import ELEMENTWISE
from .layers import LAYERS
from .products import PRODUCTS

OPS: tuple[OpDef, ...] = (*LAYERS, *PRODUCTS, *ELEMENTWISE, *COLLECTIVES)
