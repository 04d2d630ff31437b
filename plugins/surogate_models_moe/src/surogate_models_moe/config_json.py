"""The keys of `config.json` that several families of mixtures have. Errors read "key: what is wrong (got value)"."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from surogate_models.api import invalid, is_given, read_bool, read_int, read_positive

from .sizes import SWIGLU, Gate, Mixture, Router

_UNSERVED = {
    "shared_expert_intermediate_size": "shared experts",
    "num_shared_experts": "shared experts",
    "n_shared_experts": "shared experts",
    "shared_intermediate_size": "shared experts",
    "n_routed_experts": "routed experts beside shared ones",
    "scoring_func": "other routers than softmax",
    "topk_method": "other routers than softmax",
    "router_jitter_noise": "noisy routers",
    "first_k_dense_replace": "dense layers by another key than mlp_only_layers",
    "n_group": "groups of experts",
    "topk_group": "groups of experts",
    "routed_scaling_factor": "scaled routes",
    "swiglu_limit": "clamped activations",
}
"""Keys of mixtures that a family may not read, and what they ask for."""


def read_mixture(
    config: Mapping[str, Any],
    *,
    n_experts: int,
    d_expert: int,
    k: int = 8,
    count: str = "num_experts",
    router: Router | None = None,
    gate: Gate = SWIGLU,
    biased: bool = False,
    d_shared: int = 0,
    shared_gated: bool = False,
    reads: Collection[str] = (),
) -> Mixture:
    """Read the experts of a layer. `n_experts` and `k` are the defaults of the family.

    Raises ConfigError for a key of other mixtures that the family does not read, since the program would differ.

    count   the key of the number of experts, which may also be num_local_experts, as transformers 5 writes it
    router  as the family reads it; None: a softmax with `norm_topk_prob`, which is false if the key is missing
    reads   keys that the family reads itself, for the arguments that are fields of `Mixture`
    """
    for key, what in _UNSERVED.items():
        if config.get(key) and key not in (*reads, count):
            raise invalid(key, f"{what} are not supported by this model", config[key])
    if read_bool(config, "output_router_logits"):
        reason = "the loss of the router that transformers then adds is not supported yet; must be false"
        raise invalid("output_router_logits", reason, True)
    counts = [key for key in (count, "num_local_experts") if is_given(config, key)]
    experts = read_int(config, counts[0] if counts else count, default=n_experts)
    if len(counts) == 2 and read_int(config, counts[1]) != experts:
        raise invalid("num_local_experts", f"must be {count}, which is {experts}", config["num_local_experts"])
    chosen = read_int(config, "num_experts_per_tok", default=k)
    if chosen > experts:
        raise invalid("num_experts_per_tok", f"must be at most the number of experts {experts}", chosen)
    router = router or Router(normalize=read_normalize(config))
    _check_groups(router, experts, chosen)
    return Mixture(
        n_experts=experts,
        k=chosen,
        d_expert=d_expert,
        router=router,
        gate=gate,
        biased=biased,
        d_shared=d_shared,
        shared_gated=shared_gated,
    )


def _check_groups(router: Router, experts: int, k: int) -> None:
    if router.groups == 1:
        return
    size, rest = divmod(experts, router.groups)
    if rest or size < 2:
        reason = f"must divide the number of experts {experts} into groups of two or more"
        raise invalid("n_group", reason, router.groups)
    if k > router.chosen_groups * size:
        reason = f"must be at least {-(-k // size)}, since groups have {size} experts and num_experts_per_tok is {k}"
        raise invalid("topk_group", reason, router.chosen_groups)


def read_normalize(config: Mapping[str, Any], *, default: bool = False) -> bool:
    """Read whether the weights of a token's routes add up to 1: `norm_topk_prob`."""
    if "norm_topk_prob" in config and not is_given(config, "norm_topk_prob"):
        raise invalid("norm_topk_prob", "must be true or false; transformers loads no null", None)
    return read_bool(config, "norm_topk_prob", default=default)


CORRECTED_KEYS = ("scoring_func", "topk_method", "n_group", "topk_group", "routed_scaling_factor")
"""Keys that `read_corrected_router` reads, for `read_mixture(reads=...)`."""


def read_corrected_router(config: Mapping[str, Any], *, groups: int, chosen_groups: int, scale: float) -> Router:
    """Read the router of DeepSeek-V3, which GLM-4-MoE and Kimi have too: sigmoids, groups, a correction bias.

    The arguments are the defaults of the family. Files may name the rule (`scoring_func`, `topk_method`), which
    transformers does not read.
    """
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if config.get(key) not in (None, only):
            raise invalid(key, f"must be {only}, the rule that transformers computes", config[key])
    n_group = read_int(config, "n_group", default=groups)
    taken = read_int(config, "topk_group", default=chosen_groups)
    if taken > n_group:
        raise invalid("topk_group", f"must be at most n_group {n_group}", taken)
    return Router(
        scoring="sigmoid",
        normalize=read_normalize(config, default=True),
        epsilon=1e-20 if read_normalize(config, default=True) else 0.0,
        scale=read_positive(config, "routed_scaling_factor", default=scale),
        corrected=True,
        groups=n_group,
        chosen_groups=taken,
        wide=True,
    )


def read_dense_layers(config: Mapping[str, Any], n_layers: int, *, without: str) -> frozenset[int]:
    """Read the layers that have an MLP: those of `mlp_only_layers`, and all but each `decoder_sparse_step`-th one.

    without: the family that a model is whose layers are all such, for the error.
    """
    named = config.get("mlp_only_layers") or ()
    if not isinstance(named, list | tuple) or any(type(i) is not int or not 0 <= i < n_layers for i in named):
        raise invalid("mlp_only_layers", f"must be a list of numbers of layers, from 0 to {n_layers - 1}", named)
    step = read_int(config, "decoder_sparse_step", default=1)
    dense = frozenset(i for i in range(n_layers) if i in named or (i + 1) % step)
    if len({*named}) == n_layers:
        raise invalid("mlp_only_layers", f"leaves no layer with experts. Such a model is a {without}", named)
    if len(dense) == n_layers:
        raise invalid("decoder_sparse_step", f"leaves no layer with experts. Such a model is a {without}", step)
    return dense


def read_first_dense_layers(config: Mapping[str, Any], n_layers: int, *, default: int) -> frozenset[int]:
    """Read the layers that have an MLP: the first `first_k_dense_replace`."""
    key, first = "first_k_dense_replace", config.get("first_k_dense_replace", default)
    if isinstance(first, bool) or not isinstance(first, int) or not 0 <= first <= n_layers:
        raise invalid(key, f"must be a number of layers, from 0 to {n_layers}", first)
    return frozenset(range(first))
