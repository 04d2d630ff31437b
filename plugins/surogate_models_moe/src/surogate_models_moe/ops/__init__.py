"""Ops of a mixture of experts that drops no token.

Each of T tokens goes to k of E experts, so there are R = T k rows, whatever the routes are: all shapes are known before
the run, and the sizes of the groups stay on the device. A slot is t k + j, the j-th expert of token t. Rows are slots
in the order of their experts.

    route             (logits [T, E], [bias fp32 [E]]; k, normalize) -> weights fp32 [T, k], experts int32 [T, k]
    expert_order      (experts int32 [T, k]; n_experts E) -> order int32 [R], place int32 [R], ends int32 [E]
    gather_rows       (x [T, D], order, place) -> [R, D]       the token of each row
    sum_rows          (y [R, D], order, place; k) -> [T, D]    the sum of the rows of each token
    add_expert_bias   (y [T, D], weights, experts, bias [E, D]) -> [T, D]  + the weighted biases of each token's experts
    grouped_linear    (x [R, K], w [E N, K], ends, [bias [E, N]]) -> [R, N]  of each row with the weight of its expert
    weighted_swiglu   (gate_up [R, 2F], weights fp32 [T, k], order) -> [R, F]
    gate_rows         (x [T, D], gate [T, 1]) -> [T, D]        x sigmoid(gate), as a shared expert may have it
    router_load       (logits [T, E], experts, targets int32 [T], [before]; layer, layers L) -> fp32 [L, E + 1]

order[row] is the slot of a row, place[slot] the row of a slot, ends[e] the end of the rows of expert e. Weights of
experts are rows one above another, as q, k and v are those of one param: the first N rows are of expert 0. The rows of
gate_up are, for each expert, F of the gate and F of the value.

A router may have other rules than a softmax whose largest shares are chosen. `scoring`: "sigmoid" of each logit. bias:
added to the scores where experts are compared, not to their weights; it has no gradient. `groups`, `chosen_groups`: the
experts are of equal groups one after another, and a token goes to experts of its best groups alone, those with the
largest sum of their two best scores. `epsilon` is added to the sum by which `normalize` divides, and `scale` multiplies
the weights at last.

The gate may have the form of gpt-oss: gate sigmoid(alpha gate) (up + offset), with the gate at most `limit` and up from
-`limit` to `limit`. `interleaved`: gate and up alternate, and do not follow each other.

Adapters of experts multiply by stacks of thin matrices [E r, K] and [E N, r]. Products over at most MOST_THIN terms add
to a base, in place of an `add`: grouped_linear_add and grouped_linear_dgrad_add (the same inputs, base). If the base is
such a product too, one op computes both: grouped_linear_pair and grouped_linear_dgrad_pair (x, w, ends, x2, w2).

A run may have the weights of some experts at a time (`decoded_experts`). Then a product is several of `<kind>_part`
(base, *the same inputs; first), each of which writes the rows of its experts in the place of the base.

router_load collects what is reported of the tokens with a label (`targets` >= 0). Row `layer` has the routes of each
expert, and last the sum of the entropies in nats of the router's softmax over all experts; the others are those of
`before`, or 0. Numbers of routes are exact up to 2^24 a layer and expert.

The weights of the routes multiply what enters the down projection. That is their place because it is narrower than what
leaves it, which no backward op reads then. So the sum of the experts of a token is `sum_rows`, and its gradient
`gather_rows`, and the other way round. A bias of the down projection would have to be multiplied by them too: it is
added to the sum, of which there are k times fewer rows.
"""

from __future__ import annotations

from surogate_core.api import OpDef

from .gate import GATE
from .parts import PARTS
from .products import MOST_THIN, PRODUCTS
from .routes import ROUTES
from .rows import ROWS

__all__ = ["MOST_THIN", "OPS"]

OPS: tuple[OpDef, ...] = (*ROUTES, *ROWS, *PRODUCTS, *PARTS, *GATE)
