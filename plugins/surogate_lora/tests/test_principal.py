"""PiSSA against PEFT, float32: how A and B start, training, the saved adapter of the original model, merging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace
from models.harness import (
    PlannedModel,
    hf_loss_sum,
    packed_documents,
    random_hf_model,
    relative_error,
    tiny_config,
    valid_tokens,
)
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from surogate import run
from surogate_core.api import ConfigError
from surogate_core.testing.ops import check_op
from surogate_lora.adapter import LORA
from surogate_lora.files import load, merge, save
from surogate_lora.ops import OPS as OPS_OF_LORA
from surogate_lora.options import LoraOptions
from surogate_lora.principal import FIRST_DOWN, FIRST_UP
from surogate_optim_adamw.adamw import AdamWOptions

peft = pytest.importorskip("peft", reason="PEFT is what PiSSA is compared with: pip install peft")

TOLERANCE = 1e-5
STEPS, EPSILON = 20, 1e-4
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CASES: dict[str, dict[str, Any]] = {
    "all-linear": {"lora_rank": 4, "lora_alpha": 4},
    "scaled": {"lora_rank": 4, "lora_alpha": 6, "lora_target_modules": ["v_proj", "up_proj", "o_proj"]},
    "rslora": {
        "lora_rank": 3,
        "lora_alpha": 2,
        "lora_use_rslora": True,
        "lora_target_modules": ["q_proj", "down_proj"],
    },
    "patterns": {
        "lora_rank": 4,
        "lora_alpha": 4,
        "lora_target_modules": ["q_proj", "up_proj"],
        "lora_rank_pattern": {"q_proj": 2},
        "lora_alpha_pattern": {"layers.1.mlp.up_proj": 5.0},
    },
}


def options_of(case: str) -> LoraOptions:
    return LoraOptions(lora_init="pissa", **CASES[case])


def peft_model(options: LoraOptions) -> Any:
    targets = options.lora_target_modules
    config = peft.LoraConfig(
        r=options.lora_rank,
        lora_alpha=options.lora_alpha,
        use_rslora=options.lora_use_rslora,
        rank_pattern=options.lora_rank_pattern,
        alpha_pattern=options.lora_alpha_pattern,
        init_lora_weights="pissa",
        target_modules=ALL if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(random_hf_model(tiny_config()), config)


def adapter_of(model: Any, grads: bool = False) -> dict[str, Tensor]:
    """PEFT's matrices, or their gradients, under our param names."""
    return {
        name.removeprefix("base_model.model.").removesuffix(".default.weight"): p.grad if grads else p.detach()
        for name, p in model.named_parameters()
        if ".lora_" in name
    }


def started(options: LoraOptions, **settings: Any) -> PlannedModel:
    """Our programs on the original weights, after the start of a fresh run."""
    model = PlannedModel(tiny_config(), 3, 24, lmhead_chunks=3, adapters=[(LORA, options)], **settings)
    model.load(random_hf_model(tiny_config()).state_dict())
    model.executor.run("start_adapter")
    model.executor.run("start")
    return model


def saved_of(model: PlannedModel) -> dict[str, Tensor]:
    """What `save` is given: the params of the adapter."""
    of_model = {m.param for m in model.assembly.weights}
    return {name: tensor for name, tensor in model.params.items() if name not in of_model}


@pytest.mark.parametrize("case", CASES)
def test_a_run_starts_and_has_the_gradients_of_pefts(case: str) -> None:
    options = options_of(case)
    theirs, ours = peft_model(options), started(options)
    wanted = adapter_of(theirs)
    assert {v.name for v in ours.assembly.trainable} == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(ours.params[name], tensor, rtol=1e-6, atol=1e-6)
        first = FIRST_DOWN if name.endswith("lora_A") else FIRST_UP
        assert torch.equal(ours.params[name.rpartition(".")[0] + first], ours.params[name])
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    expected = hf_loss_sum(theirs, documents) * scale
    expected.backward()
    assert ours.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=TOLERANCE)
    grads = {v.name.removeprefix("grad."): v for v in ours.assembly.declared if v.role == "grad"}
    gradients = adapter_of(theirs, grads=True)
    assert grads.keys() == gradients.keys()
    errors = {name: relative_error(ours.buffers.persistent(grads[name]), g) for name, g in gradients.items()}
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}


def test_twenty_steps_and_the_converted_adapter_are_pefts(tmp_path: Path) -> None:
    """PEFT's conversion writes the same tensors, of twice the rank, for the original model.

    AdamW divides by the root of its second moment: epsilon 1e-4 keeps gradients that are nearly zero from steps of full
    size in either direction.
    """
    options = options_of("all-linear")
    theirs = peft_model(options)
    theirs.peft_config["default"].init_lora_weights = True
    theirs.save_pretrained(tmp_path / "initial")
    theirs.peft_config["default"].init_lora_weights = "pissa"
    ours = started(options, weight_decay=0.1, optimizer_options=AdamWOptions(adamw_epsilon=EPSILON))
    documents = [document for row in packed_documents() for document in row]
    scale = 1 / valid_tokens(documents)
    used = AdamWOptions()
    optimizer = torch.optim.AdamW(
        [p for p in theirs.parameters() if p.requires_grad],
        lr=1e-2,
        weight_decay=0.1,
        eps=EPSILON,
        betas=(used.adamw_beta1, used.adamw_beta2),
    )
    frozen = {name: p.clone() for name, p in ours.params.items() if name not in adapter_of(theirs)}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        expected = hf_loss_sum(theirs, documents) * scale
        expected.backward()
        optimizer.step()
        assert ours.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=TOLERANCE)
        ours.update(step, lr=1e-2)
    errors = {name: relative_error(ours.params[name], tensor) for name, tensor in adapter_of(theirs).items()}
    assert max(errors.values()) <= TOLERANCE, errors
    assert all(torch.equal(ours.params[name], tensor) for name, tensor in frozen.items())
    (tmp_path / "ours").mkdir()
    save(saved_of(ours), tmp_path / "ours", "base", options)
    theirs.save_pretrained(tmp_path / "theirs", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert one.keys() == other.keys()
    assert max(relative_error(one[name], other[name]) for name in one) <= TOLERANCE
    one, other = (json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "theirs"))
    for key in ("r", "lora_alpha", "use_rslora", "init_lora_weights"):
        assert one[key] == other[key]
    assert (one["r"], one["init_lora_weights"]) == (8, True)


@pytest.mark.parametrize("case", CASES)
def test_it_is_merged_into_the_original_model_as_peft_merges_it(tmp_path: Path, case: str) -> None:
    options = options_of(case)
    theirs, ours = peft_model(options), started(options)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
                ours.params[name.removeprefix("base_model.model.").removesuffix(".default.weight")].copy_(parameter)
    save(saved_of(ours), tmp_path, "base", options)
    changes = merge(tmp_path).changes
    base, merged = random_hf_model(tiny_config()).state_dict(), theirs.merge_and_unload()
    assert changes.keys() == {f"{name.rpartition('.')[0]}.weight" for name in adapter_of(peft_model(options))}
    for name, change in changes.items():
        assert relative_error(change(base[name]), merged.state_dict()[name]) <= TOLERANCE
    again = load(tmp_path, options)
    given = saved_of(ours)
    assert again.keys() == given.keys() and all(torch.equal(again[name], given[name]) for name in given)
    on_original = peft.PeftModel.from_pretrained(random_hf_model(tiny_config()), tmp_path)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert relative_error(on_original(ids).logits, merged(ids).logits) <= 2 * TOLERANCE


def test_what_it_cannot_mean_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="must be 0 with lora_init: pissa, because it would drop"):
        LoraOptions(lora_init="pissa", lora_dropout=0.1)
    with pytest.raises(ConfigError, match=r"o_proj is \[48, 64\], which has 48 singular values, and rank 49 is more"):
        started(LoraOptions(lora_init="pissa", lora_rank=49, lora_target_modules=["o_proj"]))
    options = LoraOptions(lora_init="pissa", lora_rank=3, lora_alpha=3)
    save({"up.lora_A": torch.ones(3, 2), "up.lora_B": torch.ones(4, 3)}, tmp_path, "base", LoraOptions(lora_rank=3))
    with pytest.raises(
        ConfigError, match=r"r is 3, but lora_rank is 6 with that of the frozen part \(lora_init: pissa\)"
    ):
        load(tmp_path, options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_principal_part_is_the_best_of_its_rank(dtype: torch.dtype) -> None:
    """By Eckart and Young: the error is the singular values that are left."""
    torch.manual_seed(0)
    weight = torch.randn(9, 7).to(dtype)
    op = next(definition for definition in OPS_OF_LORA if definition.kind == "lora_principal")
    a, b, first_a, first_b = check_op(op, weight, row=2, rows=6, rank=3, scale=0.5, dtype="fp32")
    assert torch.equal(a, first_a) and torch.equal(b, first_b)
    error = weight[2:8].double() - 0.5 * b.double() @ a.double()
    left = torch.linalg.svdvals(weight[2:8].double())[3:]
    assert float(error.norm()) == pytest.approx(float(left.norm()), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose model has weights, drawn by transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    keys = {"from_scratch": None, "learning_rate": 1e-2, "max_steps": 4, "eval_steps": 0, "validation_split_ratio": 0}
    workplace = make_workplace(tmp_path_factory.mktemp("pissa"), **keys)
    torch.manual_seed(0)
    model = workplace.root / "model"
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.float32)
    drawn.save_pretrained(model)
    return workplace


PISSA = {"lora": True, "lora_rank": 4, "lora_alpha": 4, "lora_init": "pissa"}
DIVIDED = {"ranks_per_gpu": 2, "gradient_accumulation_steps": 1, "zero_level": 3}


def train(place: Workplace, name: str, **keys: Any) -> Path:
    output = place.root / name
    if not (output / "adapter").exists():
        run.train(run.load(place.write(**{**PISSA, "output_dir": str(output), **keys})), notice=lambda line: None)
    return output


def adapter(output: Path) -> dict[str, Tensor]:
    return load_file(output / "adapter/adapter_model.safetensors")


def test_recomputation_and_a_resume_change_no_bit(place: Workplace) -> None:
    straight = train(place, "straight", save_steps=2)
    recomputed = train(place, "recomputed", recompute="true")
    resumed = train(place, "resumed", resume_from_checkpoint=str(straight / "step_00000002"), save_steps=2)
    assert losses(straight) == losses(recomputed) and losses(straight)[2:] == losses(resumed)
    assert losses(straight)[-1] < losses(straight)[0]
    for other in (recomputed, resumed):
        assert all(torch.equal(tensor, adapter(other)[name]) for name, tensor in adapter(straight).items())


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(DIVIDED, id="divided"),
        pytest.param({"qlora_bnb": True}, id="nf4"),
        pytest.param({**DIVIDED, "qlora_bnb": True}, id="divided nf4", marks=pytest.mark.slow),
        pytest.param({"model_dtype": "bf16", "recipe": "fp8-hybrid"}, id="fp8", marks=pytest.mark.slow),
    ],
)
def test_a_run_starts_as_its_base_wherever_the_weights_are(place: Workplace, keys: dict[str, Any]) -> None:
    still = {"learning_rate": 0, "warmup_steps": 0, "max_steps": 1}
    name = "-".join(f"{key}={value}" for key, value in keys.items())
    pissa = train(place, name, **keys, **still)
    lora = train(place, f"{name}-lora", **keys, **still, lora_init="kaiming")
    assert losses(pissa) == pytest.approx(losses(lora), rel=1e-3 if "recipe" in keys else 2e-6)
    a = adapter(pissa)["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]
    assert a.shape == (8, 64) and torch.equal(a[:4], a[4:]) and bool(a.any())


def test_a_saved_adapter_is_trained_further_with_its_own_first_part(place: Workplace) -> None:
    straight = train(place, "straight", save_steps=2)
    still = {"learning_rate": 0, "warmup_steps": 0, "max_steps": 1}
    more = train(place, "more", adapter_path=str(straight / "adapter"), **still)
    assert all(torch.equal(tensor, adapter(more)[name]) for name, tensor in adapter(straight).items())


def test_a_gpu_lacks_the_kernel_of_the_start_alone(place: Workplace) -> None:
    planned = run.plan(run.load(place.write(**PISSA, model_dtype="bf16")), device="h100")
    assert {kind for kinds in planned.kernels.refused.values() for kind in kinds} == {"lora_principal"}
