"""Whole runs: full training and adapters, of files that transformers writes, into files that it and PEFT load."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from end_to_end.product import MODEL_CONFIG, Workplace, losses, make_workplace, records, write_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from surogate import run
from surogate_core.api import ConfigError, Value
from surogate_models_moe.api import Mixture, metrics
from surogate_verify.verification import Extent, verify

KEYS: dict[str, Any] = {"from_scratch": None, "max_steps": 3, "warmup_steps": 0, "verify_outputs": False}
KEYS |= {"eval_steps": 0, "validation_split_ratio": 0}
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "initializer_range": 0.1,
}
LORA = {"lora": True, "lora_rank": 4, "learning_rate": 1e-2}
EXPERTS = {"lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
ATTENTION = {f"{x}_proj" for x in "qkvo"}


def drawn(root: Path, **model_config: Any) -> Workplace:
    """Return a workplace whose model transformers has drawn and written."""
    workplace = make_workplace(root, **KEYS)
    torch.manual_seed(0)
    model = write_model(workplace.root / "model", **MODEL_CONFIG | MOE | model_config)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32).save_pretrained(model)
    return workplace


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    return drawn(tmp_path_factory.mktemp("moe"))


def train(place: Workplace, name: str, **keys: Any) -> Path:
    """Train into the folder `name`, unless that is done, and return the folder."""
    output = place.root / name
    if not output.exists():
        given = {"output_dir": str(output), **keys}
        run.train(run.load(place.write(**given), mode="train"), notice=lambda line: None)
    return output


def weights(folder: Path, name: str = "model") -> dict[str, Tensor]:
    return load_file(folder / f"{name}.safetensors")


def figures(folder: Path, kind: str = "step") -> list[dict[str, float]]:
    return [record["metrics"] for record in records(folder, kind)]


def test_weights_are_read_and_written_without_a_change_of_a_bit(place: Workplace) -> None:
    before, after = weights(place.root / "model"), weights(train(place, "still", learning_rate=0, max_steps=1))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("optimizer", ["adamw_8bit", "normuon"])
def test_every_optimizer_trains_experts_and_routers(place: Workplace, optimizer: str) -> None:
    """transformers loads what was trained: every matrix of an expert has changed."""
    folder = train(place, optimizer, optimizer=optimizer, learning_rate=1e-2)
    assert losses(folder)[-1] < losses(folder)[0]
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    began = AutoModelForCausalLM.from_pretrained(place.root / "model").state_dict()
    for name in (name for name in began if ".mlp." in name):
        changed = (loaded[name] != began[name]).flatten(1).any(1)
        assert changed.all(), name


@pytest.mark.slow
def test_parts_of_experts_on_two_ranks_train_as_whole_ones(place: Workplace) -> None:
    """ZeRO 1 and 3 divide the experts' elements."""
    keys: dict[str, Any] = {"ranks_per_gpu": 2, "gradient_accumulation_steps": 1, "optimizer": "adamw"}
    whole = train(place, "two ranks", **keys)
    for level in (1, 3):
        parts = train(place, f"level {level}", **keys, zero_level=level)
        assert losses(parts) == losses(whole)
        one, other = weights(parts), weights(whole)
        assert all(torch.equal(one[name], other[name]) for name in other), level


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "normuon", "normuon_adapters": True}], ids=str)
def test_parts_of_adapters_of_experts_on_two_ranks_train_as_whole_ones(
    place: Workplace, optimizer: dict[str, Any]
) -> None:
    keys: dict[str, Any] = {**LORA, **EXPERTS, "ranks_per_gpu": 2, "gradient_accumulation_steps": 1, **optimizer}
    whole, parts = (train(place, f"shards {on} {len(optimizer)}", **keys, shard_weights=on) for on in (False, True))
    one, other = (weights(folder / "adapter", "adapter_model") for folder in (whole, parts))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_offloaded_experts_have_the_bits_of_others(place: Workplace) -> None:
    keys: dict[str, Any] = {"optimizer": "adamw", "recompute_block": True}
    plain, offloaded = (train(place, f"offload {on}", **keys, offload_optimizer=on) for on in (False, True))
    assert losses(plain) == losses(offloaded)
    assert all(torch.equal(tensor, weights(plain)[name]) for name, tensor in weights(offloaded).items())


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"lora_modules_to_save": ["gate"]}, id="routers", marks=pytest.mark.slow),
        pytest.param({"qlora_bnb": True}, id="nf4"),
    ],
)
def test_an_adapter_of_all_projections_is_one_of_attention(place: Workplace, keys: dict[str, Any]) -> None:
    """As PEFT's all-linear: experts and routers are no linear modules. PEFT's model is the merged one."""
    from peft import PeftModel

    folder = train(place, f"lora {' '.join(keys)}", **LORA, **keys, merge_adapter=True)
    assert losses(folder)[-1] < losses(folder)[0]
    names = weights(folder / "adapter", "adapter_model")
    assert {name.split(".")[-3] for name in names if ".lora_" in name} == ATTENTION
    assert any(name.endswith("mlp.gate.weight") for name in names) == ("lora_modules_to_save" in keys)
    base = AutoModelForCausalLM.from_pretrained(place.root / "model")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(folder / "merged")(tokens).logits
        theirs = PeftModel.from_pretrained(base, folder / "adapter")(tokens).logits
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("stored", [{}, {"qlora_bnb": True}, {"qlora_fp8": True}, {"qlora_fp4": True}], ids=str)
def test_an_adapter_of_experts_is_pefts_and_merged(place: Workplace, stored: dict[str, Any]) -> None:
    """With any form of the frozen experts. PEFT's model on the base is the merged one."""
    from peft import PeftModel

    folder = train(place, f"experts {' '.join(stored)}", **LORA, **EXPERTS, **stored, merge_adapter=True)
    assert losses(folder)[-1] < losses(folder)[0]
    base = AutoModelForCausalLM.from_pretrained(place.root / "model")
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        before = base(tokens).logits
        ours = AutoModelForCausalLM.from_pretrained(folder / "merged")(tokens).logits
        theirs = PeftModel.from_pretrained(base, folder / "adapter")(tokens).logits
    assert torch.allclose(ours, theirs, atol=1e-4) and not torch.allclose(before, theirs, atol=1e-3)


@pytest.mark.parametrize(
    "keys",
    [
        {"recompute": True, "recompute_lora": True},
        pytest.param({"recompute_block": True, "offload_optimizer": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_memory_is_saved_without_a_change_of_a_bit(place: Workplace, keys: dict[str, Any]) -> None:
    plain, other = (train(place, f"bits {each}", **LORA, **EXPERTS, **each) for each in ({}, keys))
    one, same = (weights(folder / "adapter", "adapter_model") for folder in (plain, other))
    assert losses(plain) == losses(other) and all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert figures(plain) == figures(other)


def test_routers_are_reported_of_whole_steps_and_of_evaluations(place: Workplace) -> None:
    """The same of two micro-steps, of two ranks, and of one batch."""
    keys: dict[str, Any] = {"max_steps": 1, "eval_steps": 1, "validation_split_ratio": 0.1}
    ways: list[dict[str, Any]] = [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "ranks_per_gpu": 2},
    ]
    whole, *others = (train(place, f"figures {i}", **keys, **way) for i, way in enumerate(ways))
    for kind in ("step", "eval"):
        (expected,) = figures(whole, kind)
        assert expected["expert_imbalance"] > 1 and 0 < expected["router_entropy_share"] < 1
        assert expected["router_entropy"] == pytest.approx(expected["router_entropy_share"] * math.log(4))
        for other in others:
            assert figures(other, kind) == [pytest.approx(expected)]


def test_a_run_says_once_that_a_router_has_collapsed(place: Workplace) -> None:
    """The router of one layer is zero, so its tokens go to the first experts."""
    base = weights(place.root / "model")
    name = "model.layers.1.mlp.gate.weight"
    collapsed = place.root / "collapsed model"
    shutil.copytree(place.root / "model", collapsed)
    save_file(base | {name: torch.zeros_like(base[name])}, collapsed / "model.safetensors", {"format": "pt"})
    notices: list[str] = []
    keys = {"model": str(collapsed), "max_steps": 22, "output_dir": str(place.root / "doubted"), **LORA}
    run.train(run.load(place.write(**keys), mode="train"), notice=notices.append)
    assert sum(line.startswith("expert_imbalance: in most steps so far, one expert") for line in notices) == 1, notices


@pytest.mark.parametrize(
    ("routes", "collapsed"),
    [
        ([64, 64, 0, 0], True),
        ([64, 62, 2, 0], True),
        ([60, 60, 4, 4], False),
        ([15, 15, 0, 0], False),
        ([32, 32, 32, 32], False),
    ],
)
def test_a_router_has_collapsed_if_an_expert_gets_95_percent_of_32_tokens_or_more(
    routes: list[int], collapsed: bool
) -> None:
    """Of 4 experts, 2 for each token, in one of two layers."""
    table = np.array([[32.0, 32.0, 32.0, 32.0, 10.0], [*routes, 10.0]])
    load = Value("load", (2, 5), "fp32", "act")
    (imbalance, *others) = metrics(SimpleNamespace(mixture=Mixture(n_experts=4, k=2, d_expert=8)), load)
    assert bool(imbalance.doubt(table)) == collapsed and not any(metric.doubt(table) for metric in others)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_stopped(place: Workplace) -> None:
    """Of experts alone, without an adapter of attention."""
    keys: dict[str, Any] = {**LORA, **EXPERTS, "lora_target_modules": [], "save_steps": 2, "lora_dtype": "bf16"}
    straight = train(place, "straight", **keys)
    resumed = train(place, "resumed", **keys, resume_from_checkpoint=str(straight / "step_00000002"))
    one, same = (weights(folder / "adapter", "adapter_model") for folder in (straight, resumed))
    assert {name.split(".")[-3] for name in one} == {"experts", "base_layer"}
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    still = {**keys, "learning_rate": 0, "max_steps": 1}
    further = train(place, "further", **still, adapter_path=str(straight / "adapter"))
    assert all(torch.equal(tensor, weights(further / "adapter", "adapter_model")[name]) for name, tensor in one.items())


def test_a_base_that_is_stored_in_nf4_trains_as_one_that_the_run_stores(place: Workplace) -> None:
    """transformers 5 does not load such experts, which a notice says."""
    told: list[str] = []
    stored = place.root / "nf4"
    run.quantize(str(place.root / "model"), stored, ["qlora_bnb=true", "model_dtype=fp32"], notice=told.append)
    assert "transformers 5 holds the experts of a layer in one tensor" in " ".join(told)
    plain = train(place, "lora qlora_bnb", **LORA, qlora_bnb=True, merge_adapter=True)
    again = train(place, "lora of nf4", **LORA, qlora_bnb=True, model=str(stored))
    assert losses(plain) == losses(again)


def test_nf4_stores_every_expert_and_no_router(place: Workplace) -> None:
    loaded = run.load(place.write(**LORA, qlora_bnb=True), mode="train")
    states = {v.name for v in run.plan(loaded).assembly.declared if v.role == "state"}
    stored = {name.rpartition(".")[0] for name in states if name.endswith(".codes")}
    block = {"attn.qkv", "attn.o", "mlp.gate_up", "mlp.down"}
    assert stored == {f"layers.{i}.{name}" for i in range(2) for name in block}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**LORA, "lora_target_modules": ["gate_proj"]}, "is no linear projection .* It has q_proj, k_proj, v_proj"),
        ({**LORA, "lora_target_modules": ["router"]}, "is no linear projection"),
        ({**LORA, "lora_modules_to_save": ["up_proj"]}, "is a linear projection of the blocks or of experts"),
        (
            {**LORA, "lora_target_parameters": ["mlp.experts.up_proj"]},
            "'mlp.experts.up_proj' is no parameter .* It",
        ),
        ({**LORA, **EXPERTS, "lora_dropout": 0.1}, "lora_target_parameters: .*needs lora_dropout: 0"),
        ({**LORA, **EXPERTS, "lora_init": "pissa"}, "lora_target_parameters: .*needs lora_init: kaiming"),
        (
            {"adapter": "dora", "dora_target_parameters": ["down_proj"]},
            "set lora_target_parameters, with adapter",
        ),
        ({"ep_size": 2}, "ep_size.*expert parallelism"),
        ({"router_aux_loss_coef": 0.01}, "router_aux_loss_coef"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_by_name(place: Workplace, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.plan(run.load(place.write(**keys), mode="train"))


def test_a_run_in_fp8_calibrates_evaluates_and_resumes_to_the_bit(place: Workplace) -> None:
    keys = {
        "recipe": "fp8-hybrid",
        "model_dtype": "bf16",
        "save_steps": 1,
        "eval_steps": 1,
        "validation_split_ratio": 0.1,
    }
    straight = train(place, "fp8", **keys)
    resumed = train(place, "fp8 resumed", **keys, resume_from_checkpoint=str(straight / "step_00000001"))
    assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in weights(straight).items())
    assert [figures(straight, kind)[-2:] for kind in ("step", "eval")] == [
        figures(resumed, kind)[-2:] for kind in ("step", "eval")
    ]


@pytest.mark.slow
def test_an_adapter_of_a_mixture_with_a_dense_layer_is_written_and_checked_by_loading_it_in_peft(
    tmp_path: Path,
) -> None:
    """Names of dense MLPs must not make PEFT expect adapters of experts."""
    pytest.importorskip("peft")
    dense = drawn(tmp_path, mlp_only_layers=[0])
    adapter = train(dense, "dense", **LORA, max_steps=1, verify_outputs=True) / "adapter"
    adapted = {name.split("layers.")[1].split(".lora_")[0] for name in weights(adapter, "adapter_model")}
    assert {name for name in adapted if ".mlp." in name} == {f"0.mlp.{x}_proj" for x in ("gate", "up", "down")}


GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "num_hidden_layers": 2,
    "n_routed_experts": 4,
    "num_nextn_predict_layers": 0,
}


def predicting(root: Path) -> tuple[Workplace, dict[str, Tensor]]:
    """Return a workplace with a GLM-4-MoE, and the tensors of a layer that predicts further tokens, behind its last."""
    place = drawn(root, **GLM)
    model = place.root / "model"
    tensors = weights(model)
    behind = {name.replace(".layers.1.", ".layers.2."): x + 1 for name, x in tensors.items() if ".layers.1." in name}
    behind["model.layers.2.eh_proj.weight"] = torch.randn(4, 8)
    save_file({**tensors, **behind}, model / "model.safetensors", {"format": "pt"})
    config = model / "config.json"
    config.write_text(config.read_text().replace('"num_nextn_predict_layers": 0', '"num_nextn_predict_layers": 1'))
    return place, behind


@pytest.mark.slow
def test_a_layer_that_predicts_further_tokens_is_in_every_output_and_the_correction_is_as_it_was(
    tmp_path: Path,
) -> None:
    """Each output is loaded in transformers, which ignores such layers."""
    place, behind = predicting(tmp_path)
    base, correction = weights(place.root / "model"), "model.layers.1.mlp.gate.e_score_correction_bias"
    checked = {"max_steps": 1, "verify_outputs": True}
    whole = weights(train(place, "whole", **checked, model_dtype="bf16"))
    merged = weights(train(place, "adapter", **checked, **LORA, merge_adapter=True) / "merged")
    for tensors in (whole, merged):
        assert tensors.keys() == base.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in behind.items())
        assert torch.equal(tensors[correction], base[correction]) and tensors[correction].dtype == torch.float32
    assert whole["model.layers.1.mlp.gate.weight"].dtype == torch.bfloat16
    (figure,) = {tuple(record) for record in figures(place.root / "whole")}
    assert "expert_imbalance" in figure and "router_entropy" not in figure


def test_a_router_with_a_correction_is_adapted_and_not_saved_whole(tmp_path: Path) -> None:
    place = drawn(tmp_path, **GLM)
    with pytest.raises(ConfigError, match=r"'gate' has model\.layers\.1\.mlp\.gate\.e_score_correction_bias, which is"):
        run.plan(run.load(place.write(**LORA, lora_modules_to_save=["gate"]), mode="train"))
    adapter = train(place, "gate", **LORA, lora_target_modules=["gate"], max_steps=1) / "adapter"
    names = {name.split("layers.")[1] for name in weights(adapter, "adapter_model")}
    assert names == {f"1.mlp.gate.lora_{which}.weight" for which in "AB"}


def test_a_base_without_the_layer_that_its_config_names_is_one_that_transformers_saved(tmp_path: Path) -> None:
    """transformers has no class for these layers, drops them, and writes the config.json of before."""
    place, behind = predicting(tmp_path)
    model = place.root / "model/model.safetensors"
    held = {name: x for name, x in load_file(model).items() if name not in behind}
    save_file(held, model, {"format": "pt"})
    assert weights(train(place, "trained", max_steps=1)).keys() == held.keys()


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, None])
def test_verify_compares_the_first_layers_of_a_model_with_one_behind_its_last(
    layers: int | None, tmp_path: Path
) -> None:
    """The first layer is dense, so that it has no router."""
    place, _ = predicting(tmp_path)
    found = verify(place.write(), (), Extent(rows=2, length=32, layers=layers), notice=lambda line: None)
    assert found.passed, found.first_wrong
    assert {row.layer for row in found.verdict.rows} == ({-1, 0} if layers else {-1, 0, 1})
