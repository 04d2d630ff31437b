"""The `recompute_*` keys on a Qwen3, each alone and all together: bit-identical results in less memory."""

from __future__ import annotations

import pytest
import torch
from models.harness import PlannedModel, random_documents, tiny_config
from torch import Tensor

from surogate_core.api import PrecisionRequest
from surogate_core.planning.recomputed import PARTS

PRECISIONS = {
    "fp32": PrecisionRequest(model_dtype="fp32"),
    "bf16": PrecisionRequest(model_dtype="bf16", param_grad_dtype="bf16"),
    "fp32, bf16 products": PrecisionRequest(model_dtype="fp32", matmul_dtype="bf16", gradient_dtype="bf16"),
}
DOCUMENTS = random_documents([7, 9, 16, 3, 20], 97)
ROWS = [DOCUMENTS[:2], DOCUMENTS[2:4], DOCUMENTS[4:]]


def trained(precision: str, keys: frozenset[str]) -> tuple[dict[str, Tensor], int]:
    """Return loss and gradients of two micro-steps, and the lower bound in bytes of the first one's arena."""
    config = tiny_config(tie_word_embeddings=True, attention_bias=True)
    model = PlannedModel(config, 3, 20, request=PRECISIONS[precision], recompute=keys, lmhead_chunks=4)
    generator = torch.Generator().manual_seed(0)
    for _, param in sorted(model.params.items()):
        param.copy_(0.05 * torch.randn(param.shape, generator=generator) + (param.dim() == 1))
    model.micro_step(ROWS, 0.1)
    loss = model.micro_step(ROWS[::-1], 0.1, first=False)
    results = {name: gradient.clone() for name, gradient in model.gradients.items()}
    return {**results, "loss": torch.tensor(loss)}, model.assembly.memory.arenas["micro_first"].lower_bound


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_key_is_bit_identical_and_saves_memory(precision: str) -> None:
    expected, before = trained(precision, frozenset())
    for keys in (*(frozenset({key}) for key in PARTS), frozenset(PARTS)):
        results, after = trained(precision, keys)
        for name, value in results.items():
            assert torch.equal(value, expected[name]), f"{name} with {sorted(keys)}"
        assert after < before, sorted(keys)
