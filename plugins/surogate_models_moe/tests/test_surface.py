"""The surface for other packages: the mixture of gpt-oss, written with it, is that of transformers.

GLM-4-MoE and Qwen2-MoE, whole families of this package, are written with nothing else. `tests/models` compares them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fp8_model import Model, kinds
from models import harness
from oss_mixture import MODEL, dims
from torch import Tensor, nn
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP, GptOssRMSNorm

import surogate_models_moe
from surogate_core.api import (
    BatchInputs,
    Builder,
    ConfigError,
    ModelDef,
    PrecisionRequest,
    ProgramError,
    WeightMap,
)
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_models.api import ResidualStream, decoder, weight_map
from surogate_models_moe import api
from surogate_models_moe.api import (
    Gate,
    Mixture,
    MixtureDims,
    Router,
    expert_weights,
    metrics,
    mixture_or_mlp,
    read_corrected_router,
    read_first_dense_layers,
    read_mixture,
    router_weights,
    stacked_expert_weights,
)
from surogate_qlora_nf4.format import NF4

EXPERTS, LAYERS = 5, 2
CONFIG = {
    "architectures": ["OssMixtureForCausalLM"],
    "model_type": "oss_mixture",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.1,
}
ROWS = [[[5, 9, 2, 7, 33], [3, 3, 8]], [[1, 6, 2, 40, 2, 11], [17, 4]]]


class Theirs(nn.Module):
    """The same of the modules of transformers."""

    def __init__(self) -> None:
        super().__init__()
        config = GptOssConfig(**{k: v for k, v in CONFIG.items() if k != "model_type"}, swiglu_limit=0.6)
        config._experts_implementation = "eager"
        width = config.hidden_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.model.layers = nn.ModuleList(nn.Module() for _ in range(LAYERS))
        for layer in self.model.layers:
            layer.post_attention_layernorm = GptOssRMSNorm(width, config.rms_norm_eps)
            layer.mlp = GptOssMLP(config)
        self.model.norm = GptOssRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        draw = torch.Generator().manual_seed(3)
        for parameter in self.parameters():
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=draw)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = x + layer.mlp(layer.post_attention_layernorm(x)[None])[0][0]
        return self.lm_head(self.model.norm(x))


def planned(
    monkeypatch: pytest.MonkeyPatch, model: ModelDef = MODEL, config: Mapping[str, Any] = CONFIG, **settings: Any
) -> harness.PlannedModel:
    monkeypatch.setitem(harness.MODELS, "oss_mixture", model)
    return harness.PlannedModel(config, 2, 16, request=PrecisionRequest(model_dtype="fp32"), **settings)


# ------------------------------------------------------------------------------------------------------------ the proof


def test_the_mixture_of_gpt_oss_has_the_logits_and_every_gradient_of_transformers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = planned(monkeypatch), Theirs()
    named = dict(theirs.named_parameters())
    for m in ours.assembly.weights:
        ours.params[m.param].copy_(torch.cat([t.load(named[t.name].detach()) for t in m.tensors]))
    documents = [document for row in ROWS for document in row]
    scale = 1 / harness.valid_tokens(documents)
    total = torch.zeros(())
    for document in documents:
        tokens = torch.tensor(document)
        total = total + F.cross_entropy(theirs(tokens)[:-1], tokens[1:], reduction="sum")
    (total * scale).backward()
    assert ours.micro_step(ROWS, scale) == pytest.approx(total.item() * scale, rel=1e-6)
    gradients = ours.gradients
    assert gradients.keys() == named.keys()
    errors = {name: harness.relative_error(gradients[name], p.grad) for name, p in named.items() if p.grad is not None}
    assert len(errors) == len(named) and max(errors.values()) < 1e-5, errors
    limited = torch.cat([layer.mlp.experts.gate_up_proj.flatten() for layer in theirs.model.layers])
    assert float(limited.detach().abs().max()) > 0.6  # the limit matters
    with torch.no_grad():
        wanted = torch.cat([theirs(torch.tensor(document)) for document in ROWS[0]])
    assert harness.relative_error(ours.logits(ROWS)[: len(wanted)], wanted) < 1e-5


# ------------------------------------------------------------------------------------------ what is made of biased ones


def by_expert(d: MixtureDims, name: str, source: str) -> list[WeightMap]:
    """Weight maps with a matrix for each expert, which adapters of experts know."""
    mlp, module = f"{name}.mlp", f"{source}.mlp"
    stacks = stacked_expert_weights(d, mlp, f"{module}.experts", transposed=True)
    return [
        weight_map(f"{mlp}.norm", (f"{source}.post_attention_layernorm.weight", d.d_model)),
        *router_weights(d, mlp, f"{module}.gate"),
        *expert_weights(replace(d, mixture=replace(d.mixture, biased=False)), mlp, f"{module}.experts"),
        *(m for m in stacks if m.param.endswith("_bias")),
    ]


BY_EXPERT = decoder(
    name="oss_mixture",
    summary="the same with a matrix for each expert",
    architecture="OssMixtureForCausalLM",
    dims=dims,
    block=mixture_or_mlp,
    block_weights=by_expert,
)
TARGETS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
WIDE = {**CONFIG, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}


def test_a_branch_of_an_adapter_adds_no_bias_a_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its B is zero at first, so the logits are those of the base; then they are those of merged weights."""
    base = planned(monkeypatch, BY_EXPERT)
    draw = torch.Generator().manual_seed(5)
    for name in sorted(base.params):
        base.params[name].copy_(0.3 * torch.randn(base.params[name].shape, generator=draw))
    options = LoraOptions(lora_rank=4, lora_alpha=8, lora_target_modules=[], lora_target_parameters=TARGETS)
    ours = planned(monkeypatch, BY_EXPERT, adapters=[(LORA, options)])
    for name, tensor in base.params.items():
        ours.params[name].copy_(tensor)
    adapter = {name: tensor for name, tensor in ours.params.items() if name not in base.params}
    assert len(adapter) == 4 * LAYERS
    for name, tensor in adapter.items():
        tensor.zero_() if "lora_B" in name else tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draw))
    assert harness.relative_error(ours.logits(ROWS), base.logits(ROWS)) < 1e-6
    for name, tensor in adapter.items():
        if "lora_B" in name:
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=draw))
            down, up = adapter[name.replace("lora_B", "lora_A")], tensor
            deltas = [b @ a for a, b in zip(down.chunk(EXPERTS), up.chunk(EXPERTS), strict=True)]
            layer, which = name.split(".")[2], name.split(".")[5].removesuffix("_proj")
            base.params[f"layers.{layer}.mlp.{which}"] += 2 * torch.cat(deltas)
    assert harness.relative_error(ours.logits(ROWS), base.logits(ROWS)) < 1e-5
    found = kinds(ours.assembly.programs["micro_first"])
    assert found["grouped_linear_pair"] == LAYERS  # of the down projection, which has no bias of its own op


def test_biases_of_experts_are_vectors_by_the_ops_that_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their two dimensions would make them matrices, which weight formats store."""
    options = LoraOptions(lora_target_modules=[], lora_target_parameters=TARGETS)
    given = {"weight_format": (NF4, NF4.options()), "adapters": [(LORA, options)]}
    ours = planned(monkeypatch, BY_EXPERT, WIDE, **given)
    layer = "layers.0.mlp."
    assert {name for name in ours.assembly.stored if name.startswith(layer)} == {f"{layer}gate_up", f"{layer}down"}


def test_fp8_multiplies_experts_with_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product adds its bias. The gate writes the codes that products read, in the form that the model has."""
    monkeypatch.setitem(harness.MODELS, "oss_mixture", MODEL)
    model = Model(WIDE)
    found = kinds(model.assembly.programs["micro_first"])
    assert found["fp8_grouped_linear"] == 4 * LAYERS and not found["grouped_linear"] + found["weighted_swiglu"]
    products = [op for op in model.assembly.programs["micro_first"].ops if op.kind == "fp8_grouped_linear"]
    assert [len(op.ins) for op in products if op.phase == "forward"] == [6, 5] * LAYERS
    form = MODEL.dims(WIDE).mixture.gate.attrs.items()
    gates = [op for op in model.assembly.programs["micro_first"].ops if op.kind.startswith("fp8_weighted_swiglu")]
    assert len(gates) == 2 * LAYERS and all(form <= op.attrs.items() for op in gates)
    plain = Model(WIDE, fp8=False)
    ours, theirs = [model.step() for _ in range(3)], [plain.step() for _ in range(3)]
    assert ours == pytest.approx(theirs, rel=2e-2)


def test_a_block_that_loses_what_routers_report_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics would be those of the last layer alone."""

    def block(b: Builder, d: MixtureDims, batch: BatchInputs, i: int, stream: ResidualStream) -> ResidualStream:
        return mixture_or_mlp(b, d, batch, i, ResidualStream(stream.residual, stream.pending))

    losing = decoder(
        name="oss_mixture",
        summary="the same with a block that passes on less",
        architecture="OssMixtureForCausalLM",
        dims=dims,
        block=block,
        block_weights=by_expert,
        metrics=metrics,
    )
    with pytest.raises(ProgramError, match=r"layer 1: the stream has lost .* replace\(stream, residual"):
        planned(monkeypatch, losing)


# ---------------------------------------------------------------------------------------------------------- the reading

GLM: dict[str, Any] = {"num_experts_per_tok": 2, "n_routed_experts": 8}


def glm(**changes: Any) -> Mixture:
    config = {**GLM, **changes}
    router = read_corrected_router(config, groups=1, chosen_groups=1, scale=1.0)
    reads = (*api.CORRECTED_KEYS, "n_shared_experts")
    return read_mixture(config, n_experts=4, d_expert=8, count="n_routed_experts", router=router, reads=reads)


def test_a_router_that_is_read_gives_an_op_what_differs_from_its_defaults() -> None:
    assert Router().attrs == {"normalize": True} and Gate().attrs == {}
    read = glm(n_group=4, topk_group=2, routed_scaling_factor=2.5).router
    assert read.corrected and read.attrs == {
        **{"normalize": True, "scoring": "sigmoid", "epsilon": 1e-20, "scale": 2.5},
        **{"groups": 4, "chosen_groups": 2},
    }
    assert "epsilon" not in glm(norm_topk_prob=False).router.attrs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"n_group: must divide the number of experts 8 .*\(got 3\)"),
        ({"n_group": 8, "topk_group": 2}, r"n_group: must divide .* into groups of two or more \(got 8\)"),
        ({"n_group": 2, "topk_group": 3}, r"topk_group: must be at most n_group 2 \(got 3\)"),
        ({"n_group": 4, "num_experts_per_tok": 3}, r"topk_group: must be at least 2, .*\(got 1\)"),
        ({"scoring_func": "softmax"}, r"scoring_func: must be sigmoid.*\(got 'softmax'\)"),
        ({"topk_method": "greedy"}, r"topk_method: must be noaux_tc.*\(got 'greedy'\)"),
        ({"routed_scaling_factor": 0}, r"routed_scaling_factor: must be a positive number \(got 0\)"),
        ({"num_local_experts": 7}, r"num_local_experts: must be n_routed_experts, which is 8 \(got 7\)"),
        ({"swiglu_limit": 7.0}, r"swiglu_limit: clamped activations are not supported.*\(got 7.0\)"),
        ({"router_jitter_noise": 0.1}, r"router_jitter_noise: noisy routers"),
    ],
    ids=str,
)
def test_what_a_router_is_not_is_an_error_that_names_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        glm(**changes)


@pytest.mark.parametrize("first", [-1, 4, True, "1", None])
def test_dense_first_layers_are_layers_of_the_model(first: Any) -> None:
    """All of them in what `verify --layers` compares."""
    assert read_first_dense_layers({}, 3, default=2) == {0, 1}
    assert read_first_dense_layers({"first_k_dense_replace": 3}, 3, default=2) == {0, 1, 2}
    with pytest.raises(ConfigError, match=r"first_k_dense_replace: must be a number of layers, from 0 to 3 \(got"):
        read_first_dense_layers({"first_k_dense_replace": first}, 3, default=2)


def test_biases_of_experts_in_tensors_of_their_own_are_refused() -> None:
    with pytest.raises(ProgramError, match="biases of experts in a tensor for each are not supported"):
        expert_weights(dims(CONFIG), "layers.0.mlp", "model.layers.0.mlp.experts")


def test_a_router_of_sigmoids_reports_its_imbalance_alone() -> None:
    load: Any = SimpleNamespace()
    for router, names in (
        (Router(), ["expert_imbalance", "router_entropy", "router_entropy_share"]),
        (Router(scoring="sigmoid"), ["expert_imbalance"]),
    ):
        mixture = Mixture(n_experts=4, k=2, d_expert=8, router=router)
        assert [metric.name for metric in metrics(SimpleNamespace(mixture=mixture), load)] == names  # type: ignore[arg-type]


def test_families_of_this_package_that_others_may_take_as_examples_use_its_surface() -> None:
    """Each name that they take from the package is one of the surface."""
    folder = Path(surogate_models_moe.__file__).parent
    for name in ("glm4_moe", "qwen2_moe", "qwen3_moe", "olmoe"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        taken = {
            a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level for a in node.names
        }
        assert taken and taken <= {*api.__all__}, taken - {*api.__all__}
        assert len((folder / f"{name}.py").read_text().splitlines()) < 100
