"""Labels that a model adds to the keys of recomputation: each key drops them, prices them and changes no bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import routed_family
import torch
from models import harness
from routed_family import CONFIG, MODEL, write_config

from surogate import run
from surogate_core.api import ModelDef, Program
from surogate_core.errors import PluginError
from surogate_core.planning.plan import Plan
from surogate_core.planning.recompute_ladder import ladder
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.given import with_given
from surogate_core.program.labels import LABELS, labels_of

LABEL = "router_logits"
ROWS = [[[5, 9, 2, 7], [3, 3, 8]], [[1, 6, 2, 40, 2, 11], [17, 4]]]
Recompute = dict[str, frozenset[str]]


def kept(program: Program) -> set[str]:
    """Return the labels of the values of blocks that the forward pass keeps for the backward pass."""
    written = {v for op in program.ops if op.phase == "forward" and op.block >= 0 for v in op.outs if v.role == "act"}
    return {v.label for op in program.ops if op.phase != "forward" for v in op.ins if v in written}


def planned(monkeypatch: pytest.MonkeyPatch, model: ModelDef, *parts: str) -> harness.PlannedModel:
    """Return the family with random weights, after two micro-steps."""
    ops = {definition.kind: definition for definition in routed_family.OPS}
    monkeypatch.setattr(harness, "OPS", {**harness.OPS, **ops})
    monkeypatch.setitem(harness.MODELS, "acme_routed", model)
    found = harness.PlannedModel({**CONFIG, "vocab_size": 61}, 1, 16, recompute=frozenset(parts))
    draw = torch.Generator().manual_seed(0)
    for param in found.params.values():
        param.copy_(torch.randn(param.shape, generator=draw))
    for index, row in enumerate(ROWS):
        found.micro_step([row], 0.1, first=index == 0)
    return found


def test_a_key_drops_the_labels_of_the_model_and_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, with_it = planned(monkeypatch, MODEL), planned(monkeypatch, MODEL, "ffn")
    one, other = (kept(found.assembly.programs["micro_first"]) for found in (plain, with_it))
    assert LABEL in one and LABEL not in other
    without = planned(monkeypatch, replace(MODEL, recompute={}), "ffn")
    assert LABEL in kept(without.assembly.programs["micro_first"])
    for name, gradient in plain.gradients.items():
        assert torch.equal(gradient, with_it.gradients[name]), name


@pytest.mark.parametrize(
    ("key", "dropping"), [("qkv", {"qkv", "att"}), ("att", {"att"}), ("swiglu", {"swiglu", "ffn"})]
)
def test_a_part_that_includes_another_drops_its_labels_too(key: str, dropping: set[str]) -> None:
    labels = labels_of({f"recompute_{key}": frozenset({LABEL})})
    assert {part for part, found in labels.items() if LABEL in found} == dropping
    assert all(labels[part] - {LABEL} == LABELS[part] for part in LABELS)


def plan(folder: Path, **keys: Any) -> Plan:
    return run.plan(run.open_run(run.load(write_config(folder, **keys))), "cpu")


def test_the_memory_report_and_the_choices_of_auto_know_them(tmp_path: Path) -> None:
    plain, dropping = plan(tmp_path), plan(tmp_path, recompute_ffn=True)
    assert plain.report.activations_by_label[LABEL] > 0 == dropping.report.activations_by_label.get(LABEL, 0)
    levels = ladder(plain.recording, plain.inputs)
    assert "ffn" in levels[1].recomputation.parts and levels[1].kept < levels[0].kept
    unknown = replace(plain.inputs, model=replace(MODEL, recompute={}), recompute=frozenset({"rmsnorm"}))
    assert not any("ffn" in level.recomputation.parts for level in ladder(plain.recording, unknown))


@pytest.mark.parametrize(
    ("recompute", "says"),
    [
        (
            {"recompute_gdn": frozenset({"states"})},
            "has the key 'recompute_gdn', expected recompute_att, recompute_ffn, ",
        ),
        ({"recompute_block": frozenset({"states"})}, "has the key 'recompute_block', expected recompute_att, "),
        ({"recompute_lora": frozenset({"states"})}, "has the key 'recompute_lora', expected recompute_att, "),
        (
            {"recompute_ffn": frozenset({"rope"})},
            "recompute_ffn has the label 'rope', which core has for recompute_qkv, recompute_att; a model",
        ),
        (
            {"recompute_att": frozenset({"residual"})},
            "recompute_att has the label 'residual', which core has for what",
        ),
        ({"recompute_att": frozenset({"weight"})}, "recompute_att has the label 'weight', which core has for what"),
        ({"recompute_att": "states"}, "ModelDef.recompute.recompute_att is 'states', expected a frozenset"),
    ],
)
def test_a_key_or_label_that_is_no_addition_is_refused_by_name(recompute: Recompute, says: str) -> None:
    with pytest.raises(PluginError, match=says):
        with_given(load_registry(), [replace(MODEL, recompute=recompute)])
