"""Routes and configurations. Parity with transformers, exports and sizes are tested for all families."""

from __future__ import annotations

import math
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from models.harness import MODELS, PlannedModel, packed_documents, random_hf_model, tiny_config
from torch import Tensor
from transformers import AutoConfig

from surogate_core.api import ConfigError
from surogate_models_moe.api import Router

QWEN3_MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 3}
OLMOE: dict[str, Any] = QWEN3_MOE | {"model_type": "olmoe", "head_dim": 12, "intermediate_size": 20}
QWEN2_MOE: dict[str, Any] = QWEN3_MOE | {"model_type": "qwen2_moe", "moe_intermediate_size": 20}
GLM: dict[str, Any] = {"model_type": "glm4_moe", "moe_intermediate_size": 20, "n_routed_experts": 8}
GLM |= {"num_experts_per_tok": 3, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}


@pytest.mark.parametrize("family", [QWEN3_MOE, QWEN2_MOE, OLMOE], ids=lambda family: family["model_type"])
def test_the_routes_of_every_layer_are_those_of_transformers(family: dict[str, Any]) -> None:
    """No pair of logits is so close that the rounding of the layers before could exchange it."""
    config = tiny_config(**family, num_hidden_layers=2)
    hf = random_hf_model(config)
    found: list[list[tuple[Tensor, Tensor]]] = [[], []]
    for layer, routes in zip(hf.model.layers, found, strict=True):
        layer.mlp.gate.register_forward_hook(lambda m, ins, outs, routes=routes: routes.append((outs[0], outs[2])))
    rows = packed_documents()
    model = PlannedModel(config, batch_size=3, seq_len=24)
    model.load(hf.state_dict())
    ours = model.written([op.outs[1] for op in model.assembly.programs["evaluate"].ops if op.kind == "route"], rows)
    with torch.no_grad():
        for row in rows:
            for document in row:
                hf(input_ids=torch.tensor(document)[None])
    kept = torch.cat([torch.arange(24) < sum(map(len, row)) for row in rows])
    for experts, routes in zip(ours, found, strict=True):
        logits, theirs = (torch.cat(values) for values in zip(*routes, strict=True))
        gaps = -logits.sort(1, descending=True).values.diff(dim=1)
        assert float(gaps.min()) > 1e-4, "a tie: draw other weights"
        assert torch.equal(experts[kept].long(), theirs)


@pytest.mark.parametrize(
    "family", [QWEN3_MOE | {"mlp_only_layers": [1]}, OLMOE], ids=lambda family: family["model_type"]
)
def test_figures_are_those_of_the_routers_of_transformers(family: dict[str, Any]) -> None:
    """Of the tokens with a label of both micro-steps together, and of one evaluated batch."""
    config = tiny_config(**family, num_hidden_layers=3)
    hf = random_hf_model(config)
    routers = [layer.mlp.gate for layer in hf.model.layers if hasattr(layer.mlp, "gate")]
    assert len(routers) == (2 if "mlp_only_layers" in family else 3)
    found: list[Tensor] = []
    for router in routers:
        router.register_forward_hook(lambda module, ins, outs: found.append(outs[0][:-1]))  # the last has no label
    rows = packed_documents()
    steps = [rows, [row[:1] for row in rows]]
    model = PlannedModel(config, batch_size=3, seq_len=24, grad_accum_steps=2)
    model.load(hf.state_dict())
    for first, step in zip((True, False), steps, strict=True):
        model.micro_step(step, 1 / 100, first=first)
    model.executor.run("evaluate")  # of the second
    for batches, which in ((steps, "step"), (steps[1:], "evaluation")):
        found.clear()
        with torch.no_grad():
            for document in (document for step in batches for row in step for document in row):
                hf(input_ids=torch.tensor(document)[None])
        logits = [torch.cat(found[i :: len(routers)]) for i in range(len(routers))]
        routes = torch.stack([x.topk(3).indices.flatten().bincount(minlength=5) for x in logits]).double()
        entropy = float(torch.stack([torch.distributions.Categorical(logits=x).entropy() for x in logits]).mean())
        expected = [float((routes.max(1).values / routes.mean(1)).max()), entropy, entropy / math.log(5)]
        values = [model.buffers.persistent(getattr(one, which)).numpy() for one in model.assembly.reported[1:]]
        ours = [one.of(value) for one, value in zip(model.assembly.reported[1:], values, strict=True)]
        assert ours == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe"])
def test_missing_keys_have_the_defaults_of_transformers(family: str) -> None:
    config = {key: item for key, item in tiny_config(model_type=family).items() if "head" not in key}
    config |= {"num_attention_heads": 4}
    theirs, dims = AutoConfig.for_model(**config), MODELS[family].dims(config)
    width = theirs.moe_intermediate_size if family == "qwen3_moe" else theirs.intermediate_size
    expected = (theirs.num_experts, theirs.num_experts_per_tok, width, theirs.norm_topk_prob)
    m = dims.mixture
    assert (m.n_experts, m.k, m.d_expert, m.router.normalize) == expected and m == replace(
        m, router=Router(normalize=m.router.normalize)
    )
    assert (dims.n_kv_heads, dims.head_dim, dims.dense) == (theirs.num_key_value_heads, 12, frozenset())


@pytest.mark.parametrize("family", ["qwen2_moe", "glm4_moe"])
def test_missing_keys_of_shared_experts_have_the_defaults_of_transformers(family: str) -> None:
    config = {key: item for key, item in tiny_config(model_type=family).items() if "head" not in key}
    config |= {"num_attention_heads": 16, "hidden_size": 64}
    config.pop("rope_parameters"), config.pop("attention_bias")
    theirs, dims = AutoConfig.for_model(**config), MODELS[family].dims(config)
    m, normalize = dims.mixture, theirs.norm_topk_prob
    if family == "glm4_moe":
        experts, shared = theirs.n_routed_experts, theirs.n_shared_experts * theirs.moe_intermediate_size
        router = Router(scoring="sigmoid", epsilon=1e-20, corrected=True, wide=True, normalize=normalize)
        router = replace(router, scale=theirs.routed_scaling_factor, groups=theirs.n_group)
        assert (dims.rope.rotary_dim, dims.dense) == (2, frozenset(range(theirs.first_k_dense_replace)))
    else:
        experts, shared, router = (
            theirs.num_experts,
            theirs.shared_expert_intermediate_size,
            Router(normalize=normalize),
        )
        assert m.shared_gated and (dims.qkv_bias, dims.dense) == (theirs.qkv_bias, frozenset())
    assert (m.n_experts, m.k, m.d_expert) == (experts, theirs.num_experts_per_tok, theirs.moe_intermediate_size)
    assert (m.d_shared, m.router, dims.n_kv_heads) == (shared, router, theirs.num_key_value_heads)


def test_transformers_5_names_the_number_of_experts_as_it_likes() -> None:
    config = tiny_config(**QWEN3_MOE)
    written = AutoConfig.for_model(**config).to_dict()
    assert "num_experts" not in written and MODELS["qwen3_moe"].dims(written).mixture.n_experts == 5


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({"mlp_only_layers": [1, 3]}, {1, 3}),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, {0, 2, 3}),
    ],
    ids=str,
)
def test_layers_have_experts_where_transformers_has_them(changes: dict[str, Any], dense: set[int]) -> None:
    config = tiny_config(**QWEN3_MOE, **changes)
    layers = random_hf_model(config).model.layers
    assert {i for i, layer in enumerate(layers) if not hasattr(layer.mlp, "experts")} == dense
    assert MODELS["qwen3_moe"].dims(config).dense == dense


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (QWEN3_MOE, {"mlp_only_layers": [4]}),
        (QWEN3_MOE, {"mlp_only_layers": 2}),
        (QWEN3_MOE, {"mlp_only_layers": [True]}),
        (QWEN3_MOE, {"decoder_sparse_step": 5}),
        (QWEN3_MOE, {"use_sliding_window": True}),
        (QWEN3_MOE, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        (QWEN3_MOE, {"first_k_dense_replace": 1}),
        (QWEN3_MOE, {"vision_config": {"hidden_size": 8}}),
        (QWEN3_MOE, {"num_experts_per_tok": 6}),
        (QWEN3_MOE, {"num_local_experts": 4}),
        (QWEN3_MOE, {"output_router_logits": True}),
        (QWEN3_MOE, {"shared_expert_intermediate_size": 16}),
        (QWEN3_MOE, {"scoring_func": "sigmoid"}),
        (QWEN3_MOE, {"n_routed_experts": 4}),
        (QWEN3_MOE, {"router_jitter_noise": 0.1}),
        (QWEN3_MOE, {"moe_intermediate_size": 0}),
        (QWEN3_MOE, {"hidden_act": "gelu"}),
        (QWEN2_MOE, {"layer_types": ["full_attention", "sliding_attention"] * 2}),
        (OLMOE, {"layer_types": ["sliding_attention"] * 4}),
        (GLM, {"layer_types": "full"}),
        (QWEN2_MOE, {"use_sliding_window": True}),
        (QWEN2_MOE, {"shared_expert_intermediate_size": 0}),
        (QWEN2_MOE, {"n_group": 2}),
        (QWEN2_MOE, {"output_router_logits": True}),
        (GLM, {"n_shared_experts": 0}),
        (GLM, {"num_nextn_predict_layers": -1}),
        (GLM, {"first_k_dense_replace": 5}),
        (GLM, {"shared_expert_intermediate_size": 16}),
        (GLM, {"partial_rotary_factor": 1.5}),
        (OLMOE, {"clip_qkv": 8.0}),
        (OLMOE, {"head_dim": 16}),
        (OLMOE, {"mlp_only_layers": [0]}),
        (OLMOE, {"decoder_sparse_step": 2}),
        (OLMOE, {"norm_topk_prob": "yes"}),
    ],
    ids=str,
)
def test_errors_name_the_invalid_key(family: dict[str, Any], changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{next(iter(changes))}.*\(got .*\)"):
        MODELS[family["model_type"]].dims(tiny_config(**family | changes))


def test_glm_4_5_air_has_the_parameters_of_its_card() -> None:
    """106 billion; the layer behind the last one, which no run computes with, is not counted."""
    config = {"model_type": "glm4_moe", "hidden_size": 4096, "num_hidden_layers": 46, "num_attention_heads": 96}
    config |= {"vocab_size": 151552, "intermediate_size": 10944, "head_dim": 128, "attention_bias": True}
    model = MODELS["glm4_moe"]
    maps = model.weights(model.dims(config))
    assert sum(prod(t.shape) for m in maps for t in m.tensors if m.trained) == 106_852_245_504
    (pattern,) = model.kept_tensors(model.dims({**config, "num_nextn_predict_layers": 1}))
    assert pattern == "model.layers.46.*" and not model.kept_tensors(model.dims(config))
