"""Every value of a field of PEFT's `LoraConfig` has PEFT's effect on the logits, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from models.harness import random_hf_model, relative_error, tiny_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate_core.api import ConfigError
from surogate_lora.fields import FIELDS, OFF
from surogate_lora.files import CONFIG_FILE, TENSORS_FILE, load, merge
from surogate_lora.options import LoraOptions

peft = pytest.importorskip("peft", reason="PEFT is what adapters are compared with: pip install peft")

TOLERANCE = 1e-5
GIVEN = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"}
Q, UP = "self_attn.q_proj", "mlp.up_proj"


@dataclass(frozen=True)
class Same:
    """PEFT writes an adapter with these fields, loads it again, and the merged model has its logits."""

    given: dict[str, Any] = field(default_factory=dict)
    edit: dict[str, Any] = field(default_factory=dict)  # keys of the file, changed after PEFT has written it

    def __repr__(self) -> str:
        return repr(self.given | self.edit)


@dataclass(frozen=True)
class Refused:
    """A value of the field that is refused by the field's name, with this in the message."""

    value: Any
    printed: str = ""


CHANGES_BASE = "path_initial_model_for_weight_conversion"

CASES: dict[str, tuple[Same | Refused, ...]] = {
    "task_type": (Same({"task_type": None}), Refused("SEQ_2_SEQ_LM", "an adapter of another task")),
    "peft_type": (Refused("LOHA"),),
    "auto_mapping": (Same(edit={"auto_mapping": {"base_model_class": "Qwen3ForCausalLM", "parent_library": "x"}}),),
    "peft_version": (Same(edit={"peft_version": "0.7.1"}),),
    "base_model_name_or_path": (Same(edit={"base_model_name_or_path": None}),),
    "revision": (Same(edit={"revision": "main"}), Same(edit={"revision": "v2"})),  # merge: test_continue.py
    "inference_mode": (Same({"inference_mode": True}),),
    "r": (Same({"r": 3}), Refused(0), Refused(True)),
    "lora_alpha": (Same({"lora_alpha": 9}), Refused("x")),
    "target_modules": (
        Same({"target_modules": "all-linear"}),
        Same({"target_modules": ["model.layers.1.mlp.up_proj", "lm_head"]}),  # without its base_layer: see `written`
        Same({"target_modules": r".*\.1\..*(q|gate)_proj"}),
        Refused(None),
        Refused([]),
        Refused(["q_proj"], "up_proj"),  # PEFT would leave the others out
        Refused("(", "no regular expression"),
    ),
    "exclude_modules": (
        Same({"exclude_modules": ["layers.0.self_attn.q_proj"]}),
        Same({"exclude_modules": r".*\.0\..*"}),
        Refused(["q_proj"], "q_proj"),
        Refused("(", "no regular expression"),
    ),
    "layers_to_transform": (
        Same({"layers_to_transform": [1]}),
        Same({"layers_to_transform": 0}),
        Refused([1], "layers.0"),
        Refused("1"),
    ),
    "layers_pattern": (
        Same({"layers_to_transform": [1], "layers_pattern": "layers"}),
        Same({"layers_to_transform": 1, "layers_pattern": ["h", "layers"]}),
        Refused({"a": 1}),
    ),
    "lora_dropout": (Same({"lora_dropout": 0.5}),),
    "fan_in_fan_out": (Refused(True),),
    "bias": (Refused("all"), Refused("lora_only")),
    "use_rslora": (Same({"use_rslora": True}),),
    "modules_to_save": (
        Same({"modules_to_save": ["lm_head", "norm"]}),
        Same({"modules_to_save": ["up_proj"]}),
        Refused([3]),
    ),
    "init_lora_weights": (
        *(Same({"init_lora_weights": how}) for how in (False, "gaussian", "eva", "orthogonal", "mica")),
        *(Refused(how, CHANGES_BASE) for how in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga")),
        Refused("loftq", "quantized"),
        Refused("of-tomorrow"),
    ),
    "rank_pattern": (Same({"rank_pattern": {"q_proj": 2}}), Refused({"q_proj": 0})),
    "alpha_pattern": (Same({"alpha_pattern": {r"layers\.1.*": 2}}), Refused({"(": 2})),
    "megatron_config": (Refused({"hidden_size": 8}),),
    "megatron_core": (Same({"megatron_core": "other.core"}),),
    "trainable_token_indices": (Refused([1, 2]), Refused({"embed_tokens": [3]})),
    "loftq_config": (Same(edit={"loftq_config": {"loftq_bits": 4}}),),
    "eva_config": (Same(edit={"eva_config": {"rho": 2.0}}),),
    "corda_config": (Same(edit={"corda_config": {"corda_method": "ipm"}}),),
    "lora_ga_config": (Same(edit={"lora_ga_config": {"direction": "ArB2r"}}),),
    "use_dora": (Refused(True),),
    "velora_config": (Refused({"num_groups": 2}),),
    "alora_invocation_tokens": (Refused([1, 2], "depends on the text"),),
    "use_qalora": (Refused(True),),
    "qalora_group_size": (Same({"qalora_group_size": 8}),),
    "monteclora_config": (Refused({"num_samples": 2}),),
    "layer_replication": (Refused([[0, 2], [1, 2]]),),
    "runtime_config": (Same({"runtime_config": peft.LoraRuntimeConfig(ephemeral_gpu_offload=True)}),),
    "lora_bias": (Refused(True),),
    "target_parameters": (Refused(["mlp.up_proj.bias"]), Refused("down_proj")),
    "use_bdlora": (Refused({"nblocks": 2}),),
    "arrow_config": (Refused({"top_k": 2}),),
    "kasa_config": (Refused({"num_iters": 2}),),
    "ensure_weight_tying": (Same({"ensure_weight_tying": True}),),
}

EACH = [pytest.param(name, case, id=f"{name}-{i}") for name, cases in CASES.items() for i, case in enumerate(cases)]
TOKENS = torch.tensor([[5, 9, 2, 61, 17, 40, 3, 8]])


def base_model() -> Any:
    return random_hf_model(tiny_config(num_hidden_layers=2, tie_word_embeddings=False))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=TOKENS).logits
        return found


def written(folder: Path, **given: Any) -> None:
    """The files of an adapter by PEFT, with all that it trains away from where it starts."""
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base_model(), peft.LoraConfig(**GIVEN | given))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name or parameter.requires_grad:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder, save_embedding_layers=False)  # else the base's own head is in the file too


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that every field leaves at its default, to be copied."""
    folder = tmp_path_factory.mktemp("plain")
    written(folder)
    return folder


def change_config(folder: Path, **keys: Any) -> None:
    path = folder / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def of_peft(folder: Path) -> Tensor:
    """The logits of the adapter in `folder`, as PEFT reads it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits(peft.PeftModel.from_pretrained(base_model(), folder))


def merged(folder: Path) -> Tensor:
    """The logits of a model into which the adapter in `folder` was merged by this package."""
    model = base_model()
    weights = model.state_dict()
    for name, changed in merge(folder).changes.items():
        weights[name].copy_(changed(weights[name]))
    return logits(model)


def names(config: type) -> Iterator[str]:
    return (f.name for f in dataclasses.fields(config))


def test_every_field_of_the_installed_peft_is_in_the_table_and_has_a_case() -> None:
    theirs = set(names(peft.LoraConfig))
    assert theirs - FIELDS.keys() == set(), "new fields: say in fields.py what becomes of them"
    assert theirs - CASES.keys() == set(), "new fields: compare their values with PEFT here"


def test_every_field_that_selects_a_variant_of_the_forward_pass_is_refused_unless_off() -> None:
    """PEFT marks them itself: `is_lora_variant`, and the values of `init_lora_weights` in `lora_variants`."""
    for f in dataclasses.fields(peft.LoraConfig):
        if f.metadata.get("is_lora_variant"):
            assert not FIELDS[f.name].is_known({"any": 1}) and all(map(FIELDS[f.name].is_known, OFF)), f.name


@pytest.mark.parametrize(("name", "case"), EACH)
def test_a_value_has_pefts_effect_or_is_refused_by_name(
    tmp_path: Path, plain: Path, name: str, case: Same | Refused
) -> None:
    if isinstance(case, Refused):
        shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
        change_config(tmp_path, **{name: case.value})
        for use in (lambda: merge(tmp_path), lambda: load(tmp_path, LoraOptions(lora_rank=4, lora_alpha=6))):
            with pytest.raises(ConfigError) as refused:
                use()
            assert name in str(refused.value) and case.printed in str(refused.value)
        return
    written(tmp_path, **case.given)
    change_config(tmp_path, **case.edit)
    expected = of_peft(tmp_path)
    assert relative_error(expected, logits(base_model())) > 0.01  # the adapter does something
    assert relative_error(merged(tmp_path), expected) <= TOLERANCE


@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_an_adapter_of_a_changed_base_is_merged_once_peft_has_converted_it(tmp_path: Path, how: str) -> None:
    """The remedy that the refusal names."""
    torch.manual_seed(3)
    model = peft.get_peft_model(base_model(), peft.LoraConfig(**GIVEN, init_lora_weights=how))
    model.save_pretrained(tmp_path / "initial")
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = logits(model)
    model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ConfigError, match=f"init_lora_weights is '{how}'"):
        merge(tmp_path / "plain")
    model.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert relative_error(merged(tmp_path / "converted"), expected) <= 1e-4  # of PEFT's own conversion


def test_an_adapter_that_peft_trains_otherwise_is_merged_and_not_continued(tmp_path: Path) -> None:
    written(tmp_path, init_lora_weights="mica")
    with pytest.raises(ConfigError, match="init_lora_weights is 'mica': PEFT trains lora_A alone"):
        load(tmp_path, LoraOptions(lora_rank=4, lora_alpha=6))


def test_a_field_of_a_later_peft_is_refused_by_name_unless_it_is_off(tmp_path: Path, plain: Path) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    for value in OFF:
        change_config(tmp_path, of_tomorrow=value)
        merge(tmp_path)
    change_config(tmp_path, of_tomorrow=0.5)
    with pytest.raises(ConfigError, match=r"of_tomorrow is 0\.5: a key that is not known"):
        merge(tmp_path)


@pytest.mark.parametrize(
    ("extra", "printed"),
    [
        (f"base_model.model.model.layers.0.{Q}.lora_magnitude_vector.weight", "lora_magnitude_vector"),
        (f"base_model.model.model.layers.0.{Q}.lora_B.bias", r"lora_B\.bias"),
        (f"base_model.model.model.layers.0.{Q}.base_layer.weight", "base_layer"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "trainable_tokens_delta"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A"),
        ("base_model.model.model.embed_tokens.weight", r"embed_tokens\.weight"),
        (f"base_model.model.model.layers.0.{Q}.lora_A", "there twice"),
        (f"model.layers.0.{UP}.lora_A.weight", r"does not begin with base_model\.model\."),
        ("base_model.model.model.layers.0.mlp.down_proj.lora_A.weight", r"down_proj, which .* does not select"),
    ],
)
def test_a_tensor_that_would_be_left_out_is_refused_by_name(
    tmp_path: Path, plain: Path, extra: str, printed: str
) -> None:
    shutil.copytree(plain, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / TENSORS_FILE)
    save_file({**tensors, extra: torch.ones(4, 4)}, tmp_path / TENSORS_FILE, metadata={"format": "pt"})
    for use in (lambda: merge(tmp_path), lambda: load(tmp_path, LoraOptions(lora_rank=4, lora_alpha=6))):
        with pytest.raises(ConfigError, match=rf"{TENSORS_FILE}: .*{printed}"):
            use()


def test_an_adapter_of_a_tied_head_is_not_merged(tmp_path: Path) -> None:
    """The merged head would differ from the embedding, and one weight serves both."""
    for tying in (False, True):
        written(tmp_path, target_modules=["q_proj", "lm_head"], ensure_weight_tying=tying)
        with pytest.raises(ConfigError, match=r"lm_head\.weight was trained apart"):
            merge(tmp_path).check({"tie_word_embeddings": True})
