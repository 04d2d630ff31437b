"""gpt-oss: configurations as they are published, refusals, and short runs. Parity with transformers is tested for all
families, adapters, divided runs and weight formats in `tests/end_to_end/test_stacks.py`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace
from fp8_model import Model
from models.harness import tiny_config
from models.test_parity import GPT_OSS as TINY
from safetensors.torch import load_file
from stacked_family import write_base
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from surogate import run
from surogate_core.api import ConfigError
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_models_gptoss.gpt_oss import GPT_OSS, GptOssDims
from surogate_qlora_mxfp4.format import MXFP4

PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
"""The keys of the published config.json of 20B."""


# -------------------------------------------------------------------------------------------------------------- config


def test_the_keys_of_a_published_file_are_read() -> None:
    d = GPT_OSS.dims(PUBLISHED)
    assert isinstance(d, GptOssDims)
    assert d.windows == (128, 0) * 12 and (d.q_rows, d.kv_rows) == (4096, 512) and d.qkv_bias and d.o_bias
    m = d.mixture
    assert (m.n_experts, m.k, m.d_expert, m.biased, m.router.biased) == (32, 4, 2880, True, True)
    assert m.router.attrs == {"normalize": True}
    assert m.gate.attrs == {"alpha": 1.702, "limit": 7.0, "offset": 1.0, "interleaved": True}
    assert d.norm_eps == 1e-5 and d.max_positions == 131072
    shapes = {t.name: t.shape for m in GPT_OSS.weights(d) for t in m.tensors}
    assert shapes["model.layers.23.mlp.experts.gate_up_proj"] == (32, 2880, 5760)
    assert shapes["model.layers.23.self_attn.sinks"] == (64,)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 20_914_757_184


def test_keys_that_are_missing_have_the_defaults_of_transformers() -> None:
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    given = {key: PUBLISHED[key] for key in needed} | {"num_local_experts": 32}
    full = {key: value for key, value in PUBLISHED.items() if key != "rope_scaling"}
    yarn = {**PUBLISHED["rope_scaling"], "rope_theta": 150000.0}
    assert GPT_OSS.dims(given) == GPT_OSS.dims(PUBLISHED) == GPT_OSS.dims({**full, "rope_parameters": yarn})


def test_yarn_without_truncation_has_the_frequencies_of_transformers() -> None:
    """Whole numbers of rotations, as other families have, give others."""
    found = GPT_OSS.dims(PUBLISHED).rope
    rounded = GPT_OSS.dims({**PUBLISHED, "rope_scaling": {**PUBLISHED["rope_scaling"], "truncate": True}}).rope
    wanted, scale = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**PUBLISHED), "cpu")
    assert found != rounded and found.attention_factor == pytest.approx(scale)
    yarn: Any = found.scaling
    pairs = torch.arange(32).float()
    ramp = 1 - ((pairs - yarn.first) / (yarn.last - yarn.first)).clamp(0, 1)
    plain = 150000.0 ** -(pairs / 32)
    ours = plain / 32 * (1 - ramp) + plain * ramp
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, r"layer_types: must be 3 times full_attention or sliding_attention"),
        ({"sliding_window": 0}, r"sliding_window: must be .*got 0"),
        ({"num_experts_per_tok": 6}, r"num_experts_per_tok: must be at most the number of experts 5 \(got 6\)"),
        ({"output_router_logits": True}, r"output_router_logits: .* not supported yet; must be false \(got True\)"),
        ({"swiglu_limit": -1}, r"swiglu_limit: must be .*got -1"),
        ({"swiglu_alpha": "x"}, r"swiglu_alpha: must be .*got 'x'"),
        ({"hidden_act": "gelu"}, r"hidden_act: must be silu \(got 'gelu'\)"),
        ({"attention_dropout": 0.1}, r"attention_dropout: dropout is not supported yet"),
        ({"head_dim": 15}, r"head_dim: must be even"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads: must divide num_attention_heads 4 \(got 3\)"),
        ({"num_shared_experts": 1}, r"num_shared_experts: shared experts are not supported by this model"),
    ],
)  # fmt: skip
def test_a_config_that_the_program_does_not_compute_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT_OSS.dims(tiny_config(**TINY | changes))


# ---------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    keys: dict[str, Any] = {"from_scratch": None, "max_steps": 2, "warmup_steps": 0, "validation_split_ratio": 0}
    sizes = {"sequence_len": 32, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "eval_steps": 0}
    root = tmp_path_factory.mktemp("gptoss")
    workplace = make_workplace(root, **keys, **sizes, learning_rate=1e-2)
    shutil.rmtree(root / "model")
    write_base(root / "model", num_hidden_layers=4)
    return workplace


def train(place: Workplace, name: str, **keys: Any) -> Path:
    """Train into the folder `name`, unless that is done, and return the folder."""
    output = place.root / name
    if not output.exists():
        run.train(run.load(place.write(output_dir=str(output), **keys), mode="train"), notice=lambda line: None)
    return output


@pytest.mark.parametrize(
    "keys",
    [
        {"recompute": True},
        {"recompute_block": True, "offload_residual": True},
        {"offload_optimizer": True, "offload_grads": True},
    ],
    ids=str,
)
def test_memory_is_saved_without_a_change_of_a_bit(place: Workplace, keys: dict[str, Any]) -> None:
    plain, other = train(place, "plain", optimizer="adamw"), train(place, f"saving {keys}", optimizer="adamw", **keys)
    one, same = (load_file(folder / "model.safetensors") for folder in (plain, other))
    assert losses(plain) == losses(other) and all(torch.equal(tensor, same[name]) for name, tensor in one.items())


def test_preferences_are_trained_by_an_adapter_of_attention_and_experts(place: Workplace) -> None:
    rows = [{"prompt": "Who goes?", "chosen": "A friend of you.", "rejected": "Nobody at all."} for _ in range(4)]
    data = place.root / "pairs.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: dict[str, Any] = {
        "loss": "dpo",
        "lora": True,
        "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "datasets": [{"path": str(data), "type": "preference", "text_as": "text"}],
        "sequence_len": 64,
        "max_steps": 3,
    }
    folder = train(place, "dpo", **keys)
    assert losses(folder)[0] == pytest.approx(0.6931, abs=1e-3) and losses(folder)[-1] < losses(folder)[0]


@pytest.mark.parametrize("recipe", ["fp8-hybrid", "nvfp4"])
def test_recipes_in_fewer_bits_train_a_model_of_all_weights(place: Workplace, recipe: str) -> None:
    folder = train(place, recipe, recipe=recipe, model_dtype="bf16", max_steps=3, learning_rate=2e-3)
    assert losses(folder)[-1] < losses(folder)[0]


LORA_OF_EXPERTS: dict[str, Any] = {
    "lora_rank": 8,
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.parametrize(("stored", "dtype"), [({}, "e4m3"), ({"weight_format": (MXFP4, MXFP4.options())}, "e5m2")])
def test_fp8_products_of_experts_add_their_bias_and_read_mxfp4_in_e5m2(stored: dict[str, Any], dtype: str) -> None:
    config = tiny_config(**TINY | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2})
    adapter = (LORA, LoraOptions.model_validate(LORA_OF_EXPERTS))
    model = Model(config, adapters=[adapter], **stored)
    ops = model.assembly.programs["micro_first"].ops
    products = [op for op in ops if op.kind == "fp8_grouped_linear"]
    assert [op.ins[1].dtype for op in products] == [dtype] * 8, "gate_up and down of two layers, forward and backward"
    biased = [op.ins[5].name for op in products if len(op.ins) == 6 and op.phase == "forward"]
    assert biased == ["layers.0.mlp.gate_up_bias", "layers.1.mlp.gate_up_bias"]
    gates = [op for op in ops if "swiglu" in op.kind]
    assert {op.kind for op in gates} == {"fp8_weighted_swiglu", "fp8_weighted_swiglu_bwd"}
    assert all(op.attrs["interleaved"] and op.attrs["limit"] == TINY["swiglu_limit"] for op in gates)
    written = {op.outs[0] for op in gates}
    assert sum(op.ins[0] in written for op in products) == 4, "of down forward, and of gate_up backward"
    wide = Model(config, fp8=False, adapters=[adapter], **stored)
    assert [model.step() for _ in range(2)] == pytest.approx([wide.step() for _ in range(2)], rel=2e-2)
