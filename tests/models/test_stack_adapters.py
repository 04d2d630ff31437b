"""Adapters of experts that checkpoints hold as [E, K, N], against PEFT's of `GptOssForCausalLM`, in fp32."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import stacked_family
import torch
from safetensors.torch import load_file
from stacked_family import CONFIG, MODEL
from torch import Tensor

from surogate_core.api import ConfigError, WeightMap
from surogate_core.assembly.assemble import record
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions
from surogate_models.api import Interleaved, Stacked, Transposed
from surogate_optim_adamw.adamw import AdamWOptions

from . import harness
from .harness import OPS, PlannedModel, hf_loss_sum, plan_inputs, relative_error, valid_tokens

peft = pytest.importorskip("peft", reason="PEFT is what LoRA is compared with: pip install peft")

SMALL = CONFIG | {"vocab_size": 97}
ROWS = [[[*range(3, 15)], [*range(20, 30)]], [[*range(40, 64)]]]
TOLERANCE, EPSILON, STEPS = 2e-5, 1e-4, 3
BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
CASES: dict[str, dict[str, Any]] = {
    "attention and experts": {"lora_target_parameters": BOTH},
    "experts alone": {"lora_target_modules": [], "lora_target_parameters": BOTH, "lora_use_rslora": True},
    "one of one layer": {
        "lora_target_modules": ["q_proj"],
        "lora_target_parameters": ["layers.1.mlp.experts.gate_up_proj", "down_proj"],
        "lora_rank_pattern": {"gate_up_proj": 3},
    },
}


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "OPS", {**OPS, **{op.kind: op for op in stacked_family.OPS}})
    monkeypatch.setitem(harness.MODELS, "gpt_oss", MODEL)


@dataclass(frozen=True)
class Pair:
    """A model with an adapter whose B are drawn, and PEFT's of the folder that was saved of it."""

    folder: Path
    options: LoraOptions
    ours: PlannedModel
    theirs: Any
    lora: Any

    @property
    def adapter(self) -> dict[str, Tensor]:
        return {v.name: self.ours.params[v.name] for v in self.ours.assembly.trainable}


def made(folder: Path, **given: Any) -> Pair:
    options = LoraOptions(**{"lora_rank": 4, "lora_alpha": 6, **given})
    adamw = AdamWOptions(adamw_epsilon=EPSILON)
    ours = PlannedModel(SMALL, 2, 24, adapters=[(LORA, options)], optimizer_options=adamw)
    base = stacked_family.random_model(vocab_size=97)
    ours.load(base.state_dict())
    torch.manual_seed(7)
    for v in ours.assembly.trainable:
        ours.params[v.name].normal_(0, 0.1)
    base.config.save_pretrained(folder)  # where PEFT looks for the size of the vocabulary
    assert LORA.of_model is not None
    lora = LORA.of_model(LORA, ours.assembly.weights)
    (folder / "adapter").mkdir()
    lora.save({v.name: ours.params[v.name] for v in ours.assembly.trainable}, folder / "adapter", str(folder), options)
    theirs = peft.PeftModel.from_pretrained(base, folder / "adapter", is_trainable=True)
    return Pair(folder / "adapter", options, ours, theirs, lora)


def trained(pair: Pair) -> None:
    """Compare loss and gradients of each of some steps of AdamW on both sides."""
    documents = [document for row in ROWS for document in row]
    scale, used = 1 / valid_tokens(documents), AdamWOptions()
    trainable = [p for p in pair.theirs.parameters() if p.requires_grad]
    betas = (used.adamw_beta1, used.adamw_beta2)
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0, eps=EPSILON, betas=betas)
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        expected = hf_loss_sum(pair.theirs, documents) * scale
        expected.backward()
        assert pair.ours.micro_step(ROWS, scale) == pytest.approx(expected.item(), rel=TOLERANCE)
        if step == 1:
            check_gradients(pair)
        optimizer.step()
        pair.ours.update(step, lr=1e-2)


def check_gradients(pair: Pair) -> None:
    parameters = {name: p for name, p in pair.theirs.named_parameters() if p.requires_grad}
    values = {name: p.data for name, p in parameters.items()}
    for p in parameters.values():
        p.data = p.grad
    pair.theirs.save_pretrained(pair.folder.parent / "gradients")
    for name, p in parameters.items():
        p.data = values[name]
    wanted = pair.lora.load(pair.folder.parent / "gradients", pair.options)
    grads = {v.name.removeprefix("grad."): v for v in pair.ours.assembly.declared if v.role == "grad"}
    assert grads.keys() == wanted.keys() == pair.adapter.keys()
    errors = {name: relative_error(pair.ours.buffers.persistent(grads[name]), g) for name, g in wanted.items()}
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("case", CASES)
def test_three_steps_their_files_and_the_merged_model_are_pefts(case: str, tmp_path: Path) -> None:
    pair = made(tmp_path, **CASES[case])
    trained(pair)
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
    pair.lora.save(pair.adapter, tmp_path / "ours", str(tmp_path), pair.options)
    pair.theirs.save_pretrained(tmp_path / "theirs")
    one, other = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert one.keys() == other.keys()
    assert max(relative_error(one[name], other[name]) for name in one) <= TOLERANCE
    again = pair.lora.load(tmp_path / "ours", pair.options)
    assert all(torch.equal(tensor, again[name]) for name, tensor in pair.adapter.items())
    changes = pair.lora.merge(tmp_path / "ours").changes
    merged = stacked_family.random_model(vocab_size=97).eval()
    weights = merged.state_dict()
    assert changes.keys() <= weights.keys()
    for name, change in changes.items():
        weights[name].copy_(change(weights[name].clone()))
    theirs, ids = pair.theirs.merge_and_unload().eval(), torch.tensor(ROWS[1])
    changed = {name for name, w in stacked_family.random_model(vocab_size=97).state_dict().items()
               if not torch.equal(theirs.state_dict()[name], w)}  # fmt: skip
    assert changed == changes.keys()
    with torch.no_grad():
        logits = theirs(input_ids=ids).logits[0]
        assert relative_error(merged(input_ids=ids).logits[0], logits) <= TOLERANCE
    assert relative_error(pair.ours.logits(ROWS)[24:48], logits) <= TOLERANCE


def with_rows_in_turn(m: WeightMap) -> WeightMap:
    """Return the map of a program that has gate and up of an expert one above the other."""
    layout = Stacked(128, Both(Transposed(), Interleaved(2)))
    return replace(m, tensors=(replace(m.tensors[0], layout=layout),)) if m.param.endswith("gate_up") else m


@dataclass(frozen=True)
class Both:
    """Two layouts, the second of what the first loads."""

    first: Any
    second: Any

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.second.shape(self.first.shape(stored)))

    def load(self, stored: Tensor) -> Tensor:
        found: Tensor = self.second.load(self.first.load(stored))
        return found

    def save(self, rows: Tensor) -> Tensor:
        found: Tensor = self.first.save(self.second.save(rows))
        return found


def test_rows_of_experts_in_another_order_are_pefts_in_its_files(tmp_path: Path) -> None:
    plain = made(tmp_path, **CASES["experts alone"])
    assert LORA.of_model is not None
    maps = [with_rows_in_turn(m) for m in plain.ours.assembly.weights]
    turned = LORA.of_model(LORA, maps)
    name = "model.layers.0.mlp.experts.gate_up_proj.lora_B_experts"
    of_peft, ours = plain.lora.load(plain.folder, plain.options)[name], turned.load(plain.folder, plain.options)
    stacked = of_peft.view(5, 128, 4)
    assert torch.equal(ours[name].view(5, 128, 4), torch.cat([stacked[:, ::2], stacked[:, 1::2]], dim=1))
    (tmp_path / "again").mkdir()
    turned.save(ours, tmp_path / "again", str(tmp_path), plain.options)
    one, other = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "again", plain.folder))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    weights = stacked_family.random_model(vocab_size=97).state_dict()
    for key, change in turned.merge(plain.folder).changes.items():
        torch.testing.assert_close(change(weights[key]), plain.lora.merge(plain.folder).changes[key](weights[key]))


def refused(change: Any, message: str, adapter: Any = LORA, **given: Any) -> None:
    inputs = plan_inputs(SMALL)
    maps = [change(m) for m in MODEL.weights(inputs.dims)]
    options = adapter.options(**given)
    with pytest.raises(ConfigError, match=message):
        record(replace(inputs, model=replace(MODEL, weights=lambda d: maps), adapters=((adapter, options),)))


def test_what_adapters_cannot_be_of_is_refused_by_name() -> None:
    def lacking(m: WeightMap) -> WeightMap:
        class Whole(Stacked):
            leading = False

        held = [replace(t, layout=Whole(t.layout.rows, t.layout.of)) if t.leading else t for t in m.tensors]
        return replace(m, tensors=tuple(held))

    experts: dict[str, Any] = {"lora_target_parameters": BOTH}
    refused(lacking, r"experts.gate_up_proj is a stack of .* a layout without `leading`", **experts)
    unnamed = r"'mlp.experts.gate_up_proj' is no parameter .* Its package does not name them \(WeightMap.parameter\)"
    refused(lambda m: replace(m, parameter=""), unnamed, **experts)
    refused(lambda m: m, "'gate_proj' is no parameter .* It has mlp.experts.gate_up_proj, mlp.experts.down_proj",
            lora_target_parameters=["gate_proj"])  # fmt: skip
    refused(lambda m: m, "'experts' is no linear projection.* Experts are named by lora_target_parameters",
            lora_target_modules=["experts"])  # fmt: skip
    refused(lambda m: m, "'experts' is a linear projection of the blocks or of experts",
            lora_modules_to_save=["experts"])  # fmt: skip


def test_an_adapter_of_other_experts_is_refused_by_name(tmp_path: Path) -> None:
    pair = made(tmp_path, **CASES["experts alone"])
    assert LORA.of_model is not None
    six = MODEL.weights(MODEL.dims(SMALL | {"num_local_experts": 6}))
    with pytest.raises(ConfigError, match=r"down_proj is of a weight \[320, 64\] of 5 experts; the base's is \[384,"):
        LORA.of_model(LORA, six).merge(pair.folder)
    path = pair.folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_parameters": ["mlp.experts.w13"]}))
    for use in (lambda: pair.lora.merge(pair.folder), lambda: pair.lora.load(pair.folder, pair.options)):
        with pytest.raises(ConfigError, match=r"target_parameters is .*'mlp.experts.w13' is no parameter"):
            use()
