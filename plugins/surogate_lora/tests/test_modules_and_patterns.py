"""Modules that are trained in full, ranks and alphas by pattern: against PEFT, float32, the same random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
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

from surogate_core.api import ConfigError, Value
from surogate_lora.adapter import LORA
from surogate_lora.files import load, merge, save
from surogate_lora.options import LoraOptions

from .test_lora import ALL, TOLERANCE

peft = pytest.importorskip("peft", reason="PEFT is what LoRA is compared with: pip install peft")

TIED = {"tie_word_embeddings": True}
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "head": ({}, {"lora_modules_to_save": "lm_head"}),
    "embedding": ({}, {"lora_modules_to_save": ["embed_tokens"]}),
    "both": ({"model_type": "llama"}, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied": (TIED, {"lora_modules_to_save": ["embed_tokens", "lm_head"]}),
    "all norms": ({}, {"lora_modules_to_save": ["norm"]}),
    "some norms": (
        {"model_type": "qwen2"},
        {"lora_modules_to_save": ["input_layernorm", "layers.1.post_attention_layernorm"]},
    ),
}
PATTERNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ranks": ({}, {"lora_rank_pattern": {"q_proj": 1, "layers.1.mlp.down_proj": 5}}),
    "alphas": ({}, {"lora_alpha_pattern": {"v_proj": 1, "up_proj": 2.5}}),
    "the first that fits": (
        {"model_type": "llama", "mlp_bias": True},
        {"lora_rank_pattern": {r"layers\.0\..*proj": 2, ".*k_proj": 6, r"^model.layers.1.mlp.gate_proj": 7}},
    ),
    "norms of whole projections": ({"model_type": "olmo2"}, {"lora_modules_to_save": ["q_norm", "norm"]}),
    "norms with an offset": (
        {"model_type": "gemma3_text", "rope_parameters": None, "sliding_window": 6, **TIED},
        {"lora_modules_to_save": ["norm"]},
    ),
    "fused projections": ({"model_type": "phi3"}, {"lora_rank_pattern": {"qkv_proj": 5}}),
    "sliding window": ({"model_type": "mistral", "sliding_window": 6}, {}),
    "rslora": ({}, {"lora_use_rslora": True, "lora_rank_pattern": {"k_proj": 9}, "lora_alpha_pattern": {"k_proj": 3}}),
}
CASES = WHOLE | PATTERNS
KEYS = {"lora_rank": 3, "lora_alpha": 5}


def config_of(case: str) -> dict[str, Any]:
    return tiny_config(num_hidden_layers=2, **CASES[case][0])


def options_of(case: str, **changes: Any) -> LoraOptions:
    return LoraOptions(**(KEYS | CASES[case][1] | changes))


def twins(case: str) -> tuple[PlannedModel, Any, LoraOptions]:
    """Our model and PEFT's with the same weights, all that is trained away from where it starts."""
    config, options = config_of(case), options_of(case)
    theirs = peft.get_peft_model(
        random_hf_model(config),
        peft.LoraConfig(
            r=options.lora_rank,
            lora_alpha=options.lora_alpha,
            use_rslora=options.lora_use_rslora,
            target_modules=[*ALL, "qkv_proj", "gate_up_proj"],
            rank_pattern=options.lora_rank_pattern,
            alpha_pattern=options.lora_alpha_pattern,
            modules_to_save=list(options.lora_modules_to_save) or None,
            ensure_weight_tying=case == "tied",
            task_type="CAUSAL_LM",
        ),
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    ours = PlannedModel(config, 3, 24, lmhead_chunks=3, adapters=[(LORA, options)], weight_decay=0.1)
    ours.load(random_hf_model(config).state_dict())
    tensors = {name: parameter.detach() for name, parameter in trained_of(theirs).items()}
    assert {name_of(ours, v) for v in ours.assembly.trainable} == tensors.keys()
    for value in ours.assembly.trainable:
        ours.params[value.name].copy_(tensors[name_of(ours, value)])
    return ours, theirs, options


def trained_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """PEFT's trained parameters under the names of our files."""

    def plain(name: str) -> str:
        name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
        return name.removesuffix(".default.weight") if ".lora_" in name else name

    return {plain(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def name_of(model: PlannedModel, value: Value) -> str:
    """As core names what it gives an adapter to save; whole modules are stored alone here."""
    tensors: Mapping[str, str] = {m.param: m.tensors[0].name for m in model.assembly.weights if len(m.tensors) == 1}
    return tensors.get(value.name, value.name)


def documents() -> list[list[int]]:
    return [document for row in packed_documents() for document in row]


def logits_error(ours: PlannedModel, theirs: Any) -> float:
    worst = 0.0
    for row, logits in zip(packed_documents(), ours.logits(packed_documents()).view(3, 24, -1), strict=True):
        with torch.no_grad():
            expected = torch.cat([theirs(input_ids=torch.tensor(document)[None]).logits[0] for document in row])
        worst = max(worst, relative_error(logits[: len(expected)], expected))
    return worst


def saved(model: PlannedModel, options: LoraOptions, root: Path, config: Mapping[str, Any]) -> Path:
    random_hf_model(config).save_pretrained(root / "base")
    folder = root / "adapter"
    folder.mkdir()
    trained = {name_of(model, v): model.params[v.name] for v in model.assembly.trainable}
    save(trained, folder, str(root / "base"), options)
    return folder


# ------------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_pefts(case: str) -> None:
    ours, theirs, _ = twins(case)
    scale = 1 / valid_tokens(documents())
    expected = hf_loss_sum(theirs, documents()) * scale
    expected.backward()
    assert ours.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=TOLERANCE)
    gradients = {v.name.removeprefix("grad."): v for v in ours.assembly.declared if v.role == "grad"}
    wanted = trained_of(theirs)
    errors: dict[str, float] = {}
    for value in ours.assembly.trainable:
        gradient = wanted[name_of(ours, value)].grad
        assert gradient is not None
        errors[value.name] = relative_error(ours.buffers.persistent(gradients[value.name]), gradient)
    assert max(errors.values()) <= TOLERANCE, {name: e for name, e in errors.items() if e > TOLERANCE}


@pytest.mark.parametrize("case", ["tied", "all norms"])
def test_whole_modules_train_as_pefts_and_only_matrices_decay(case: str) -> None:
    """The groups are those of transformers' Trainer: no decay of biases and norms; A, B and embeddings decay."""
    ours, theirs, _ = twins(case)
    ours.executor.run("start")
    trained = list(trained_of(theirs).values())
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2)
    scale = 1 / valid_tokens(documents())
    frozen = ours.params.keys() - {v.name for v in ours.assembly.trainable}
    before = {name: ours.params[name].clone() for name in frozen}
    for step in range(1, 5):
        optimizer.zero_grad()
        expected = hf_loss_sum(theirs, documents()) * scale
        expected.backward()
        optimizer.step()
        assert ours.micro_step(packed_documents(), scale) == pytest.approx(expected.item(), rel=1e-4)
        ours.update(step, lr=1e-2)
    assert all(torch.equal(ours.params[name], before[name]) for name in frozen)
    (adamw,) = (op for op in ours.assembly.programs["update"].ops if op.kind == "adamw")
    decays = dict(zip((v.name for v in ours.assembly.trainable), adamw.attrs["weight_decay"], strict=True))
    assert {name for name, decay in decays.items() if not decay} == {n for n in decays if n.endswith("norm")}
    assert set(decays.values()) == ({0.1} if case == "tied" else {0.1, 0.0})


# ---------------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_is_saved_with_equal_logits(tmp_path: Path, case: str) -> None:
    ours, _, options = twins(case)
    folder = saved(ours, options, tmp_path, config_of(case))
    assert logits_error(ours, peft.AutoPeftModelForCausalLM.from_pretrained(folder)) <= TOLERANCE
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["modules_to_save"] == (list(options.lora_modules_to_save) or None)
    assert config.get("ensure_weight_tying", False) == (case == "tied")
    assert (config["rank_pattern"], config["alpha_pattern"]) == (options.lora_rank_pattern, options.lora_alpha_pattern)


@pytest.mark.parametrize("case", CASES)
def test_pefts_files_and_ours_are_read_to_the_bit(tmp_path: Path, case: str) -> None:
    ours, theirs, options = twins(case)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = {name: parameter.detach() for name, parameter in trained_of(theirs).items()}
    for folder in (tmp_path / "theirs", saved(ours, options, tmp_path, config_of(case))):
        tensors = load(folder, options)
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_pefts(tmp_path: Path, case: str) -> None:
    ours, theirs, options = twins(case)
    config = config_of(case)
    found = merge(saved(ours, options, tmp_path, config))
    found.check(config)
    base, expected = random_hf_model(config).state_dict(), theirs.merge_and_unload().state_dict()
    assert found.changes.keys() == {name for name in base if not torch.equal(base[name], expected[name])}
    for name, change in found.changes.items():
        assert relative_error(change(base[name]), expected[name]) <= 1e-6, name
        assert change(base[name].bfloat16()).dtype == torch.bfloat16
    assert set(found.may_lack) == ({"lm_head.weight"} if case == "tied" else set())


def test_ends_that_were_trained_apart_are_not_merged_into_a_tied_base(tmp_path: Path) -> None:
    """PEFT unties them unless told otherwise; a model that ties them would use one for both."""
    ours, _, options = twins("head")
    folder = saved(ours, options, tmp_path, config_of("head"))
    merge(folder).check({"tie_word_embeddings": False})
    with pytest.raises(ConfigError, match=r"lm_head\.weight was trained apart from its other end"):
        merge(folder).check(TIED)


def test_an_adapter_continues_only_with_its_own_modules_and_patterns(tmp_path: Path) -> None:
    ours, _, options = twins("embedding")
    folder = saved(ours, options, tmp_path, config_of("head"))
    with pytest.raises(ConfigError, match=r"lacks lm_head\.weight, which lora_modules_to_save names"):
        load(folder, options_of("both"))
    with pytest.raises(ConfigError, match=r"rank_pattern is \{\}, but lora_rank_pattern is \{'q_proj': 2\}"):
        load(folder, options_of("embedding", lora_rank_pattern={"q_proj": 2}))
    with pytest.raises(ConfigError, match=r"alpha_pattern is \{\}, but lora_alpha_pattern is \{'q_proj': 2\}"):
        load(folder, options_of("embedding", lora_alpha_pattern={"q_proj": 2}))


@pytest.mark.parametrize(
    ("change", "printed"),
    [
        ({"modules_to_save": None}, r"embed_tokens\.weight is neither a matrix of a LoRA adapter .* modules_to_save"),
        ({"modules_to_save": [3]}, r"modules_to_save is \[3\]"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern is \{'q_proj': 0\}"),
        ({"rank_pattern": {"q_proj": 2}}, r"q_proj has no lora_A .* of rank 2"),
        ({"alpha_pattern": {"(": 2}}, r"alpha_pattern is \{'\(': 2\}: .* no regular expression"),
    ],
)
def test_a_config_that_does_not_fit_its_tensors_is_named(tmp_path: Path, change: dict[str, Any], printed: str) -> None:
    ours, _, options = twins("embedding")
    path = saved(ours, options, tmp_path, config_of("head")) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=printed):
        merge(path.parent)


# -------------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("config", "options", "printed"),
    [
        ({}, {"lora_modules_to_save": ["head"]}, None),
        ({}, {"lora_modules_to_save": ["wte"]}, "'wte' is no module .* embed_tokens, input_layernorm, .* lm_head"),
        ({}, {"lora_modules_to_save": ["mlp"]}, "'mlp' is no module with a weight of its own"),
        ({}, {"lora_modules_to_save": ["layers.0"]}, "'layers.0' is no module with a weight of its own"),
        (
            {},
            {"lora_modules_to_save": ["lm_head", "up_proj"]},
            "'up_proj' is a linear projection .*lora_target_modules",
        ),
        (
            TIED,
            {"lora_modules_to_save": ["lm_head"]},
            "lm_head shares its weight .* Name both, embed_tokens and lm_head",
        ),
        (TIED, {"lora_modules_to_save": ["embed_tokens"]}, "model.embed_tokens shares its weight"),
        ({}, {"lora_rank_pattern": {"query": 2}}, "lora_rank_pattern: 'query' .* q_proj, k_proj, v_proj, .* down_proj"),
        ({}, {"lora_alpha_pattern": {"proj": 2}}, "lora_alpha_pattern: 'proj' is the first pattern to fit no"),
        ({}, {"lora_rank_pattern": {".*_proj": 2, "q_proj": 4}}, "'q_proj' .* before the pattern that hides it"),
        (
            {},
            {"lora_rank_pattern": {"q_proj": 2}, "lora_target_modules": ["k_proj"]},
            "lora_rank_pattern: 'q_proj' .* Those are k_proj of",
        ),
    ],
)
def test_what_cannot_be_trained_as_peft_would_is_refused(
    config: dict[str, Any], options: dict[str, Any], printed: str | None
) -> None:
    def planned() -> None:
        PlannedModel(tiny_config(**config), 1, 8, adapters=[(LORA, LoraOptions(**options))])

    if printed is None:  # any end of a name, as PEFT has it
        planned()
        return
    with pytest.raises(ConfigError, match=printed):
        planned()


@pytest.mark.parametrize(
    "wrong",
    [
        {"lora_modules_to_save": [" "]},
        {"lora_modules_to_save": 3},
        {"lora_rank_pattern": {"q_proj": 0}},
        {"lora_rank_pattern": ["q_proj"]},
        {"lora_rank_pattern": {"(": 3}},
        {"lora_rank_pattern": {"(?i)Q_proj": 3}},
        {"lora_alpha_pattern": {"q_proj": -1}},
        {"lora_alpha_pattern": {"q_proj": "much"}},
    ],
)
def test_options_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        LoraOptions(**wrong)
