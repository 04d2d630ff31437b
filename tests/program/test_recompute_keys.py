"""The parts of `recompute_*` keys on tiny models, in all blocks or in the first ones: bit-identical, in less memory."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from random import Random
from typing import Any

import covering
import pytest
import torch
from covering import SEED, pairwise
from models.harness import PlannedModel, random_documents, tiny_config
from torch import Tensor

from surogate_core.api import PrecisionRequest
from surogate_core.assembly.recomputed import CHOICES, PARTS, Recomputation
from surogate_core.program.labels import LABELS
from surogate_lora.adapter import LORA
from surogate_lora.options import LoraOptions

PRECISIONS = {
    "fp32": PrecisionRequest(model_dtype="fp32"),
    "bf16": PrecisionRequest(model_dtype="bf16", param_grad_dtype="bf16"),
    "fp32, bf16 products": PrecisionRequest(model_dtype="fp32", matmul_dtype="bf16", gradient_dtype="bf16"),
}
DOCUMENTS = random_documents([7, 9, 16, 3, 20], 97)
ROWS = [DOCUMENTS[:2], DOCUMENTS[2:4], DOCUMENTS[4:]]
WHOLE = ("adapter", "block")
"""Parts that include all others."""

ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "all weights": {},
    "lora": {"lora_rank": 8},
    "lora with dropout": {"lora_rank": 4, "lora_dropout": 0.3},
}


def settings(adapter: str) -> dict[str, Any]:
    options = LoraOptions.model_validate(ADAPTERS[adapter])
    return {"adapters": [(LORA, options)]} if ADAPTERS[adapter] else {}


def trained(config: Mapping[str, Any], precision: str, **changes: Any) -> tuple[dict[str, Tensor], int]:
    """Return loss and gradients of two micro-steps, and the lower bound in bytes of the first one's arena."""
    model = PlannedModel(config, 3, 20, request=PRECISIONS[precision], lmhead_chunks=4, **changes)
    generator = torch.Generator().manual_seed(0)
    for _, param in sorted(model.params.items()):
        param.copy_(0.05 * torch.randn(param.shape, generator=generator) + (param.dim() == 1))
    model.micro_step(ROWS, 0.1)
    loss = model.micro_step(ROWS[::-1], 0.1, first=False)
    values = {v.name: model.buffers.persistent(v).clone() for v in model.assembly.declared if v.role == "grad"}
    return {**values, "loss": torch.tensor(loss)}, model.assembly.memory.arenas["micro_first"].lower_bound


def different(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    assert results.keys() == expected.keys()
    return [name for name in expected if not torch.equal(results[name], expected[name])]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_key_is_bit_identical_and_saves_memory(precision: str) -> None:
    config = tiny_config(tie_word_embeddings=True, attention_bias=True)
    expected, before = trained(config, precision)
    for parts in (*(frozenset({part}) for part in PARTS), frozenset(PARTS)):
        results, after = trained(config, precision, recompute=parts)
        assert not different(results, expected), sorted(parts)
        assert after < before, sorted(parts)


QUICK = [("llama", "all weights"), ("qwen2", "lora"), ("qwen3", "lora with dropout")]
"""Every family and every adapter."""


@pytest.mark.parametrize(
    ("family", "adapter"),
    [
        pytest.param(family, adapter, marks=() if (family, adapter) in QUICK else pytest.mark.slow)
        for family in ("llama", "qwen2", "qwen3")
        for adapter in ADAPTERS
    ],
)
def test_a_pairwise_covering_array_of_the_keys_is_bit_identical(family: str, adapter: str) -> None:
    print(f"covering array of seed {SEED}")
    config = tiny_config(model_type=family, num_hidden_layers=2)
    expected, _ = trained(config, "bf16", **settings(adapter))
    for chosen in covering.settings((*PARTS, "chunks"), WHOLE):
        parts, chunks = chosen - {"chunks"}, 3 if "chunks" in chosen else 1
        results, _ = trained(config, "bf16", recompute=parts, attn_bwd_chunks=chunks, **settings(adapter))
        assert not different(results, expected), sorted(chosen)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("seed", range(3))
def test_other_parts_in_the_first_blocks_than_in_the_others_are_bit_identical(seed: int, adapter: str) -> None:
    """What `recompute: auto` chooses is of this form."""
    random = Random(f"{SEED}/{seed}/{adapter}")
    config = tiny_config(num_hidden_layers=3)
    expected, before = trained(config, "bf16", **settings(adapter))
    for count in (1, 2, 3):
        chosen = Recomputation(random.choice(CHOICES), random.choice(CHOICES[1:]), count)
        results, after = trained(config, "bf16", recompute_chosen=chosen, **settings(adapter))
        assert not different(results, expected), chosen
        assert after <= before, chosen


def test_an_adapters_key_recomputes_what_its_branches_keep_and_the_block() -> None:
    config = tiny_config()
    bound = {parts: trained(config, "bf16", recompute=parts, **settings("lora"))[1] for parts in map(frozenset, (
        {"block"}, {"adapter"}, {"block", "adapter"}
    ))}  # fmt: skip
    assert bound[frozenset({"adapter"})] == bound[frozenset({"block", "adapter"})] < bound[frozenset({"block"})]


def test_no_choice_of_the_planner_names_a_part_that_another_includes() -> None:
    for choice in CHOICES:
        assert all(not LABELS[a] <= LABELS[b] for a in choice for b in choice if a != b and {a, b} <= LABELS.keys())
        assert len(choice) == 1 or not choice & {"block", "adapter"}
    assert len(set(CHOICES)) == len(CHOICES) == 20


def test_a_covering_array_has_every_pair_of_values() -> None:
    rows = pairwise(PARTS)
    print(f"{len(rows)} rows of seed {SEED}: {[sorted(row) for row in rows]}")
    for a, b in combinations(PARTS, 2):
        assert {(a in row, b in row) for row in rows} == {(x, y) for x in (False, True) for y in (False, True)}
