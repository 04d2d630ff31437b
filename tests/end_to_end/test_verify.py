"""`surogate verify`: a correct model passes in fp32, bf16 and with an adapter; an error in a model is located."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import scaled_family
import torch
from end_to_end.planted import write_random_model
from end_to_end.product import Workplace, write_model

import surogate_models.reference as reference
import surogate_models.weight_maps as weight_maps
from surogate import run
from surogate.cli.options import RunArguments
from surogate.config.adapter import Mode
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_models.rope import Rope
from surogate_verify import needs, surogate_side, transformers_side, verification
from surogate_verify.observed import Observed
from surogate_verify.programs import Subject, in_plain_torch
from surogate_verify.report import verify_command
from surogate_verify.transformers_side import KeepFloat64, SameChoices
from surogate_verify.verification import Extent, Verification, verify


def silent(line: str) -> None:
    """Discard a notice."""


def verified(workplace: Workplace, *overrides: str, **options: Any) -> Verification:
    return verify(workplace.write(), list(overrides), Extent(**options), notice=silent)


def printed(workplace: Workplace, *overrides: str, as_json: bool = False, **options: Any) -> int:
    """Run the command and return its exit code."""
    return verify_command(RunArguments(workplace.write(), list(overrides)), Extent(**options), as_json=as_json)


@pytest.fixture
def based(here: Workplace) -> Workplace:
    return base_of(here, num_hidden_layers=3, tie_word_embeddings=False)


def base_of(here: Workplace, **model: Any) -> Workplace:
    """A bf16 checkpoint, saved after one step, as the base of other runs."""
    write_model(here.root / "model", initializer_range=0.05, **model)
    run.train(run.load(here.write(max_steps=1, warmup_steps=0, eval_steps=0), ["model_dtype=bf16"]), notice=silent)
    changes = {"model": str(here.out), "from_scratch": False, "model_dtype": None, "output_dir": str(here.root / "x")}
    return replace(here, config={**here.config, **changes})


# ---------------------------------------------------------------------------------------------------- a correct model


def test_random_weights_pass_in_fp32_on_the_data_of_the_run(
    here: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed(here) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80, out
    for words in (
        "2 x 64 from the run's data",
        "\nblock 1 ",
        "\nlayer 1\n",
        "  mlp.down_proj.weight ",
        "\npass:",
    ):
        assert words in "\n".join(line.rstrip() if "layer" in line else line for line in out.splitlines()), out
    assert not here.out.exists()


def test_a_checkpoint_passes_in_bf16_and_in_fp32(based: Workplace) -> None:
    """Errors are relative to transformers in float64, and compared with those of transformers in the same precision."""
    result = verified(based)
    assert result.in_fp32 is not None and result.in_fp32.passed, result.first_wrong
    assert (result.in_fp32.precision, result.verdict.precision) == ("fp32", "bf16")
    assert max(row.error for row in result.in_fp32.rows) < 1e-5 < max(row.error for row in result.verdict.rows)
    assert result.passed, result.first_wrong
    outputs = [row for row in result.verdict.rows if row.kind == "output"]
    assert [row.name for row in outputs] == ["embedding", "block 0", "block 1", "block 2", "logits"]
    assert result.weights == "of the checkpoint"


def test_products_of_four_bits_pass_within_the_error_that_the_recipe_names(based: Workplace) -> None:
    result = verified(based, "recipe=nvfp4")
    assert result.passed, result.first_wrong
    logits = next(row for row in result.verdict.rows if row.name == "logits")
    assert 0.05 < logits.error < 0.3
    gradients = [row for row in result.verdict.rows if row.kind == "gradient"]
    cosines = [row.cosine for row in gradients if row.cosine is not None]
    # Rounding to four bits draws that of one gradient: the lowest is 0.79 or 0.82 by the instructions of the processor.
    assert len(cosines) == len(gradients) and min(cosines) > 0.5 and fmean(cosines) > 0.88


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_an_adapter_agrees_with_peft(based: Workplace, dtype: str) -> None:
    pytest.importorskip("peft")
    result = verified(based, "lora=true", "lora_rank=4", f"model_dtype={dtype}")
    assert result.passed, result.first_wrong
    gradients = [row for row in result.verdict.rows if row.kind == "gradient"]
    assert len(gradients) == 3 * 7 * 2 and all(row.cosine is not None and row.cosine > 0.99 for row in gradients)


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_adapter_with_saved_modules_agrees_with_peft(here: Workplace, tied: bool) -> None:
    pytest.importorskip("peft")
    place = base_of(here, num_hidden_layers=1, tie_word_embeddings=tied)
    saved = "lora_modules_to_save=[embed_tokens, lm_head, k_norm]"
    result = verified(place, "lora=true", "lora_rank=4", saved, "model_dtype=fp32")
    assert result.passed, result.first_wrong
    assert len([row for row in result.verdict.rows if row.kind == "gradient"]) == 7 * 2 + 1 + (1 if tied else 2)


def test_an_adapter_of_experts_agrees_with_peft_for_equal_routes(here: Workplace) -> None:
    pytest.importorskip("peft")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    names = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    place = base_of(here, num_hidden_layers=1, **names, **experts)
    parameters = "lora_target_parameters=[mlp.experts.gate_up_proj, mlp.experts.down_proj]"
    result = verified(place, "lora=true", "lora_rank=4", parameters, "model_dtype=fp32")
    assert result.passed, result.first_wrong
    assert len([row for row in result.verdict.rows if row.kind == "gradient"]) == 6 * 2


def test_dropout_of_an_adapter_is_off_on_both_sides_and_the_output_says_so(
    based: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    overrides = ["lora=true", "lora_rank=4", "lora_dropout=0.3", "model_dtype=fp32"]
    one_layer = {"rows": 1, "length": 32, "layers": 1}
    assert printed(based, *overrides, **one_layer) == 0
    assert "\ndropout   off on both sides (lora_dropout)\n" in capsys.readouterr().out
    assert printed(based, *overrides, as_json=True, **one_layer) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["lora_dropout"]


def test_defaults_are_those_of_the_verb_that_will_train(based: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """Unless the file says otherwise, `sft` trains an adapter and `train` all weights."""
    pytest.importorskip("peft")
    recipes = []
    modes: tuple[Mode, ...] = ("train", "sft")
    for mode in modes:
        arguments = RunArguments(based.write(model_dtype="fp32"), [], mode)
        verify_command(arguments, Extent(rows=1, length=32, layers=1, random_tokens=True), as_json=True)
        recipes.append(json.loads(capsys.readouterr().out)["recipe"])
    assert recipes == ["bf16", "bf16 with lora"]


def test_only_the_first_layers_of_a_checkpoint_can_be_verified(based: Workplace) -> None:
    result = verified(based, layers=2, random_tokens=True, rows=1, length=32)
    assert result.passed, result.first_wrong
    assert max(row.layer for row in result.verdict.rows) == 1
    assert "1 x 32 random tokens" in result.tokens and "its first 2 layers" in result.model
    assert verified(based, "from_scratch=true", layers=1).passed


def test_a_run_with_a_reference_and_numerics_reports_is_verified_without_them(here: Workplace) -> None:
    overrides = ["loss=dpo", "reference=frozen", "recipe=fp8-hybrid", "numerics_report_steps=2", "model_dtype=bf16"]
    result = verified(here, *overrides, layers=1, random_tokens=True, rows=1, length=32)
    assert result.passed, result.first_wrong


@pytest.mark.parametrize("family", [pytest.param("qwen2", marks=pytest.mark.slow), "llama"])
def test_other_families_pass_without_data(here: Workplace, family: str) -> None:
    architecture = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[family]
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write_model(
        here.root / "model",
        architectures=[architecture],
        model_type=family,
        rope_parameters={**scaling, "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    )
    result = verified(replace(here, config={**here.config, "datasets": None}))
    assert result.passed, result.first_wrong
    assert "random tokens" in result.tokens


# ------------------------------------------------------------------------------------------------------ a wrong model


def first_wrong(result: Verification) -> str:
    wrong = result.first_wrong
    assert wrong is not None, [(row.name, row.error) for row in result.verdict.rows]
    return wrong.name


def test_a_weight_map_that_swaps_two_tensors_is_found_in_its_layer(
    based: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = weight_maps.mlp_weights

    def swapped(d: Any, name: str, source: str) -> list[Any]:
        maps = right(d, name, source)
        if name != "layers.1.mlp":
            return maps
        return [replace(m, tensors=m.tensors[::-1]) if m.param.endswith("gate_up") else m for m in maps]

    monkeypatch.setattr(weight_maps, "mlp_weights", swapped)
    for overrides in ([], ["model_dtype=fp32", "from_scratch=true"]):
        assert first_wrong(verified(based, *overrides)) == "block 1"


def test_a_wrong_rope_theta_is_found_in_the_first_block(
    based: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """11,000 instead of 10,000: a smaller error than rounding a single number to bf16 would permit."""
    right = Rope.attrs.fget
    assert right is not None
    monkeypatch.setattr(Rope, "attrs", property(lambda rope: right(rope) | {"theta": 1.1 * rope.theta}))
    assert first_wrong(verified(based, "model_dtype=fp32")) == "block 0"
    assert printed(based, as_json=True) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["passed"], found["first_wrong"]) == (False, "block 0")
    assert next(row for row in found["rows"] if row["name"] == "embedding")["ok"]
    assert not found["model_in_fp32"]["passed"]


def test_a_wrong_backward_op_is_found_in_the_block_that_ran_it_first(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backward pass of queries and keys is wrong by a thousandth. All that runs before it is right."""
    right = reference.qk_norm_rope_bwd

    def off(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        first, *rest = right(*args, **kwargs)
        return (first * 1.001, *rest)

    monkeypatch.setattr(reference, "qk_norm_rope_bwd", off)
    assert printed(here) == 1
    out = capsys.readouterr().out
    assert "fail: " in out and "forward pass right" in out and "model.layers.1.self_attn" in out


def test_a_wrong_scale_of_the_adapter_is_found(based: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from surogate_lora.options import LoraOptions

    right = LoraOptions.scale_of
    monkeypatch.setattr(LoraOptions, "scale_of", lambda options, module: 1.01 * right(options, module))
    assert first_wrong(verified(based, "lora=true", "model_dtype=fp32")) == "block 0"


# ------------------------------------------------------------------------------------------------- what is the truth


def test_float64_stays_where_transformers_asks_for_float32() -> None:
    """Norms and softmax stay in float64. Narrower dtypes and integers are cast to float32 as usual."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    torch.manual_seed(0)
    x = torch.randn(4, 48, dtype=torch.float64)
    norm = Qwen3RMSNorm(48, eps=1e-6).double()
    exact = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert not torch.allclose(norm(x), exact, rtol=1e-12)
    with KeepFloat64():
        torch.testing.assert_close(norm(x), exact, rtol=1e-14, atol=0)
        assert torch.softmax(x, dim=-1, dtype=torch.float32).dtype == x.float().dtype == torch.float64
        assert x.bfloat16().float().dtype == torch.arange(3).float().dtype == torch.float32


def test_experts_are_read_in_one_op_whose_gradient_is_written_once() -> None:
    """By itself, the gradient of each expert would be a tensor of all experts."""
    experts = torch.nn.Parameter(torch.ones(3, 2, 2))
    with SameChoices([], []):
        one, other = (experts[torch.tensor(index)] for index in (0, 2))
        assert experts[torch.tensor([0, 2])].shape == (2, 2, 2) and experts[0, 1].shape == (2,)
    assert one.grad_fn is not None and one.grad_fn == other.grad_fn and one.grad_fn.name() == "UnbindBackward0"
    (one + 2 * other).sum().backward()
    assert experts.grad is not None and experts.grad[:, 0, 0].tolist() == [1.0, 0.0, 2.0]


def test_the_frequencies_of_rope_are_never_rounded_to_bf16(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.to(torch.bfloat16)` would round them: angles would be off by 0.1 rad at position 50, and that would
    dominate the error of transformers in bf16."""
    dtypes: dict[torch.dtype, set[torch.dtype]] = {}
    right = transformers_side._count_padding

    def spied(model: Any) -> None:
        right(model)
        (dtype,) = {p.dtype for p in model.parameters()}
        dtypes[dtype] = {b.dtype for name, b in model.named_buffers() if "inv_freq" in name}

    monkeypatch.setattr(transformers_side, "_count_padding", spied)
    verified(here, "model_dtype=bf16", layers=1, rows=1, length=32, random_tokens=True)
    assert dtypes == {dtype: {torch.float32} for dtype in (torch.float64, torch.float32, torch.bfloat16)}


# ---------------------------------------------------------------------------------------------------- what is refused


def test_features_that_cannot_be_verified_are_refused_by_name(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, words in (({"layers": 3}, "--layers: 3"), ({"length": 65}, "--length: 65")):
        with pytest.raises(ConfigError, match=words):
            verified(here, **options)
    monkeypatch.setattr(needs, "memory_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"needs about 0.* GiB of host memory; this machine has 0.0 .*--layers 4"):
        verified(here)


def test_a_model_that_transformers_does_not_have_is_refused(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    plan_run = verification.plan_run

    def of_a_foreign_model(*args: Any) -> Plan:
        plan = plan_run(*args)
        model = replace(plan.inputs.model, in_transformers=False)
        return replace(plan, inputs=replace(plan.inputs, model=model))

    monkeypatch.setattr(verification, "plan_run", of_a_foreign_model)
    with pytest.raises(ConfigError, match="transformers has no qwen3"):
        verified(here)


def test_a_comparison_in_fp32_says_what_a_gpu_runs_in_plain_torch(here: Workplace, tmp_path: Path) -> None:
    config = json.loads((Path(__file__).parents[2] / "benchmarks/models/qwen3-30b-a3b/config.json").read_text())
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture/config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    path = here.write(model=str(tmp_path / "mixture"))
    exact = ["kernels=allow_reference", "model_dtype=fp32"]
    said = in_plain_torch(run.plan(run.load(path, exact), "h100"))
    assert said.startswith("the comparison in fp32 runs gather_rows, grouped_linear, ") and "not affected" in said
    assert (
        in_plain_torch(run.plan(run.load(path, ["model_dtype=bf16"]), "h100"))
        == in_plain_torch(run.plan(run.load(path, exact), "cpu"))
        == ""
    )


def test_a_comparison_in_plain_torch_asks_for_no_equal_bits(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not promise them on a GPU, and a run that asks for them was refused."""
    observe, asked, notices = surogate_side.observe, list[str](), list[str]()

    def recorded(subject: Subject, *more: Any) -> Observed:
        asked.append(subject.plan.target.deterministic)
        return observe(subject, *more)

    monkeypatch.setattr(surogate_side, "observe", recorded)
    monkeypatch.setattr(verification, "in_plain_torch", lambda plan: "some ops run in plain torch")
    path, extent = here.write(model_dtype="bf16", deterministic=True), Extent(1, 16, 1, random_tokens=True)
    assert verify(path, extent=extent, notice=notices.append).passed
    assert "some ops run in plain torch" in notices and asked == ["true", "false"]


def test_a_buffer_of_transformers_is_no_gradient_and_stays_in_its_dtype(here: Workplace) -> None:
    """A param in fp32 in a bf16 run, which transformers does not train."""
    write_random_model(here.root / "model", "qwen3", layers=1)
    scaled_family.scale_model(here.root / "model")
    scaled_family.in_transformers()
    own = {"plugins": [scaled_family.__file__], "from_scratch": None, "model_dtype": "bf16"}
    result = verified(replace(here, config={**here.config, **own}))
    assert result.passed, result.first_wrong
    assert result.verdict.not_compared == (scaled_family.SCALE,)
    assert scaled_family.SCALE not in {row.name for row in result.verdict.rows}
