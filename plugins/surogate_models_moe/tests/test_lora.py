"""Adapters of experts against PEFT's of the same parameters, in fp32, through the files that both read."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models.harness import (
    MODELS,
    PlannedModel,
    as_stored,
    hf_loss_sum,
    packed_documents,
    random_hf_model,
    relative_error,
    tiny_config,
    valid_tokens,
)

from surogate_core.api import ConfigError
from surogate_lora.adapter import LORA
from surogate_lora.experts import parameters_of
from surogate_lora.files import load, merge, save
from surogate_lora.options import LoraOptions

peft = pytest.importorskip("peft", reason="PEFT is what LoRA is compared with: pip install peft")

TOLERANCE = 1e-5
QWEN3_MOE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 3}
OLMOE: dict[str, Any] = QWEN3_MOE | {"model_type": "olmoe", "head_dim": 12, "intermediate_size": 20}
QWEN2_MOE: dict[str, Any] = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 28}
GLM: dict[str, Any] = {"model_type": "glm4_moe", "n_routed_experts": 5, "num_experts_per_tok": 3}
GLM |= {"moe_intermediate_size": 20, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "attention and experts": (QWEN3_MOE, {"lora_target_parameters": BOTH}),
    "shared experts with a gate": (QWEN2_MOE, {"lora_target_parameters": BOTH}),
    "shared experts behind a dense layer": (GLM, {"lora_target_parameters": BOTH}),
    "experts alone": (OLMOE, {"lora_target_modules": [], "lora_target_parameters": BOTH, "lora_use_rslora": True}),
    "a dense layer": (
        QWEN3_MOE | {"mlp_only_layers": [0]},
        {
            "lora_rank_pattern": {"gate_proj": 3, "self_attn.q_proj": 5},
            "lora_alpha_pattern": {r"layers\.0\.mlp\..*": 9},
        },
    ),
    "a part of a dense layer, a router and experts": (
        QWEN3_MOE | {"mlp_only_layers": [0]},
        {
            "lora_target_modules": ["layers.0.mlp.up_proj", "layers.1.self_attn.q_proj", "gate"],
            "lora_target_parameters": BOTH,
        },
    ),
    "one of one layer": (
        QWEN3_MOE,
        {
            "lora_target_modules": "q_proj",
            "lora_target_parameters": ["layers.1.mlp.experts.gate_up_proj", "down_proj"],
            "lora_rank_pattern": {"gate_up_proj": 3},
            "lora_alpha_pattern": {"experts.down_proj": 5},
        },
    ),
}


class Pair:
    """A model with an adapter whose B are drawn, its folder, and PEFT's of the folder."""

    def __init__(self, case: str, folder: Path) -> None:
        family, options = CASES[case]
        self.folder, self.options = folder, LoraOptions(**{"lora_rank": 4, "lora_alpha": 6, **options})
        self.config = tiny_config(**family, num_hidden_layers=2)
        self.ours = PlannedModel(self.config, 3, 24, adapters=[(LORA, self.options)])
        self.ours.load(random_hf_model(self.config).state_dict())
        torch.manual_seed(7)
        self.adapter = {v.name: self.ours.params[v.name] for v in self.ours.assembly.trainable}
        for tensor in self.adapter.values():
            tensor.normal_(0, 0.1)
        folder.mkdir()
        base = random_hf_model(self.config)
        base.config.save_pretrained(folder.parent)  # where PEFT looks for the size of the vocabulary
        self.parameters = parameters_of(self.ours.assembly.weights)
        save(self.adapter, folder, str(folder.parent), self.options, parameters=self.parameters)
        self.theirs = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param, tmp_path_factory.mktemp("pair") / "adapter")


def test_losses_logits_and_every_gradient_are_pefts(pair: Pair, tmp_path: Path) -> None:
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    expected = hf_loss_sum(pair.theirs, documents) * scale
    expected.backward()
    assert pair.ours.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=TOLERANCE)
    with torch.no_grad():
        logits = pair.theirs(input_ids=torch.tensor(packed_documents()[1])).logits[0]
    assert relative_error(pair.ours.logits(packed_documents())[24:48], logits) <= TOLERANCE
    for name, parameter in pair.theirs.named_parameters():
        assert (parameter.grad is not None) == (".lora_" in name)
        if parameter.grad is not None:
            parameter.data, parameter.grad = parameter.grad, parameter.data
    pair.theirs.save_pretrained(tmp_path)
    wanted = load(tmp_path, pair.options, pair.parameters)
    grads = {v.name.removeprefix("grad."): v for v in pair.ours.assembly.declared if v.role == "grad"}
    assert grads.keys() == wanted.keys() == pair.adapter.keys()
    errors = {name: relative_error(pair.ours.buffers.persistent(grads[name]), g) for name, g in wanted.items()}
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}


def test_branches_add_to_the_products_of_frozen_experts(pair: Pair) -> None:
    """One op computes a product and its branch. What is in front of all adapters needs no gradient."""
    kinds = Counter(op.kind for op in pair.ours.assembly.programs["micro_first"].ops)
    adapted = sum(name.endswith("A_experts") for name in pair.adapter)
    assert kinds["grouped_linear_pair"] == adapted and kinds["grouped_linear_wgrad"] == 2 * adapted
    in_front = not any(".self_attn." in name for name in pair.adapter)
    assert kinds["grouped_linear_dgrad_pair"] == adapted - in_front
    assert not any(kinds[kind] for kind in ("grouped_linear_add", "grouped_linear_dgrad_add"))
    assert bool(kinds["add"]) == bool(pair.ours.dims.mixture.d_shared)  # of an expert that every token goes to


def test_what_is_saved_is_loaded_and_merged_as_by_peft(pair: Pair) -> None:
    again = load(pair.folder, pair.options, pair.parameters)
    assert again.keys() == pair.adapter.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in pair.adapter.items())
    base = as_stored(random_hf_model(pair.config).state_dict())
    if pair.options.lora_target_parameters:
        model = MODELS[pair.config["model_type"]]
        sizes = model.dims(pair.config)
        of_six = replace(sizes, mixture=replace(sizes.mixture, n_experts=6))
        other = parameters_of(model.weights(of_six))
        with pytest.raises(
            ConfigError, match=r"_proj is of a weight \[.*\] of 5 experts; the base's is .* Name its own"
        ):
            merge(pair.folder, other)
        with pytest.raises(
            ConfigError, match=r"has adapters of experts, .* no installed package builds AcmeForCausalLM"
        ):
            merge(pair.folder, None).check({"architectures": ["AcmeForCausalLM"]})
    changes = merge(pair.folder, pair.parameters).changes
    ours = {name: changes[name](tensor) if name in changes else tensor for name, tensor in base.items()}
    assert changes.keys() <= base.keys()
    fresh = peft.PeftModel.from_pretrained(random_hf_model(pair.config), pair.folder)
    theirs = as_stored(fresh.merge_and_unload().state_dict())
    assert {name for name in base if not torch.equal(theirs[name], base[name])} == changes.keys()
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in base)


def test_pefts_all_linear_of_a_mixture_is_trained_further_and_merged(tmp_path: Path) -> None:
    """It takes attention, and experts and routers as parameters, with twice the rank where two matrices are one."""
    config = tiny_config(**QWEN3_MOE, num_hidden_layers=2)
    chosen = peft.LoraConfig(r=2, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(random_hf_model(config), chosen)
    torch.manual_seed(7)
    for name, parameter in theirs.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_(0, 0.1)
    theirs.save_pretrained(tmp_path)
    (ranks, alphas) = (chosen.rank_pattern, chosen.alpha_pattern)
    assert {*chosen.target_parameters} == {"gate_up_proj", "down_proj", "gate.weight"} and [*ranks.values()] == [4]
    options = LoraOptions(
        lora_rank=2,
        lora_alpha=6,
        lora_rank_pattern=ranks,
        lora_alpha_pattern=alphas,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate"],
        lora_target_parameters=["gate_up_proj", "down_proj"],
    )
    ours = PlannedModel(config, 3, 24, adapters=[(LORA, options)])
    ours.load(random_hf_model(config).state_dict())
    parameters = parameters_of(ours.assembly.weights)
    loaded = load(tmp_path, options, parameters)
    assert loaded.keys() == {v.name for v in ours.assembly.trainable}
    for name, tensor in loaded.items():
        ours.params[name].copy_(tensor)
    with torch.no_grad():
        logits = theirs(input_ids=torch.tensor(packed_documents()[1])).logits[0]
    assert relative_error(ours.logits(packed_documents())[24:48], logits) <= TOLERANCE
    base = as_stored(random_hf_model(config).state_dict())
    changes = merge(tmp_path, parameters).changes
    wanted = as_stored(theirs.merge_and_unload().state_dict())
    assert "model.layers.1.mlp.gate.weight" in changes
    assert all(
        torch.allclose(changes[name](tensor) if name in changes else tensor, wanted[name], atol=1e-6)
        for name, tensor in base.items()
    )
