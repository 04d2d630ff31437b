"""Row tiles on the GPU: the bits of LoRA without them, and gradients of all weights but for the order of sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .harness import SMALL, Setup
from .test_worker import BF16

pytestmark = pytest.mark.gpu

ROWS = 32_768
WIDE = SMALL | {
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": ROWS,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
}
"""Products whose algorithms are those of real models."""
LORA: dict[str, Any] = {"lora_rank": 16, "lora_alpha": 32}
MIXTURE = WIDE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}


def after_a_step(config: dict[str, Any] = WIDE, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    given: dict[str, Any] = {"batch_size": 1, "seq_len": ROWS, "max_documents": 2049, "deterministic": "false"}
    setup = Setup(config, **given, **BF16, **settings)
    worker = setup.gpu(poison=True)
    generator = torch.Generator().manual_seed(5)
    for name, param in sorted(worker.params().items()):
        if "lora_B" in name:
            param.copy_(0.1 * torch.randn(param.shape, generator=generator))
    result = setup.step(worker, 1, lr=0.0), setup.gradients(worker)
    worker.close()
    torch.cuda.empty_cache()
    return result


@pytest.mark.parametrize(
    ("recipe", "recompute", "dropout"),
    [
        ("bf16", frozenset(), 0.0),
        ("bf16", frozenset({"block"}), 0.0),
        ("fp8-hybrid", frozenset({"block"}), 0.0),
        ("nvfp4", frozenset({"block"}), 0.0),
        ("bf16", frozenset({"block"}), 0.1),
    ],
    ids=["kept", "recomputed", "fp8", "nvfp4", "dropout"],
)
def test_lora_has_the_bits_of_a_run_without_tiles(recipe: str, recompute: frozenset[str], dropout: float) -> None:
    """In front of the last attention's backward pass: there cuDNN adds in any order (before 9.25), which is sometimes
    the same in two runs. Behind it gradients are near: three such passes, whose results are rounded to bf16 (2^-8)."""
    adapter = LORA | {"lora_dropout": dropout}
    keys: dict[str, Any] = {"adapter": adapter, "recipe": recipe, "recompute": recompute}
    expected, gradients = after_a_step(**keys)
    repeated, again = after_a_step(**keys)
    losses, tiled = after_a_step(**keys, row_tiles=16_384)
    assert losses[0] == expected[0] == repeated[0]
    last = {name for name in gradients if ".2." in name and ("mlp" in name or "o_proj" in name)}
    assert last
    assert {name for name in last if not torch.equal(gradients[name], again[name])} == set()
    assert {name for name in last if not torch.equal(gradients[name], tiled[name])} == set()
    for name, gradient in gradients.items():
        assert float((tiled[name] - gradient).norm()) < 2.0**-6 * float(gradient.norm()), name


@pytest.mark.parametrize("recipe", ["bf16", "fp8-hybrid", "nvfp4"])
def test_all_weights_have_the_loss_of_a_run_without_tiles_and_near_gradients(recipe: str) -> None:
    keys: dict[str, Any] = {"recipe": recipe, "recompute": frozenset({"block"})}
    expected, gradients = after_a_step(**keys)
    losses, tiled = after_a_step(**keys, row_tiles=16_384, offload=["residual"])
    assert losses[0] == expected[0]
    for name, gradient in gradients.items():
        assert float((tiled[name] - gradient).norm()) < 2.0**-7 * float(gradient.norm()), name


def test_nvfp4_has_the_loss_of_its_parts_whatever_is_recomputed() -> None:
    """Two parts of a row, each with its own magnitudes: not those of a row that is quantized at once."""
    expected, gradients = after_a_step(recipe="nvfp4")
    losses, recomputed = after_a_step(recipe="nvfp4", recompute=frozenset({"swiglu", "qkv", "rmsnorm"}))
    assert losses[0] == expected[0]
    for name, gradient in gradients.items():
        assert float((recomputed[name] - gradient).norm()) < 2.0**-7 * float(gradient.norm()), name


STACKS = LORA | {"lora_target_parameters": ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")}


@pytest.mark.parametrize("adapter", [{}, {"adapter": STACKS}], ids=["all weights", "adapters"])
def test_experts_in_tiles_have_the_loss_of_a_run_without_and_near_gradients(adapter: dict[str, Any]) -> None:
    """The order of experts, and where their rows end, are those of a tile."""
    expected, gradients = after_a_step(MIXTURE, recompute=frozenset({"block"}), **adapter)
    losses, tiled = after_a_step(MIXTURE, recompute=frozenset({"block"}), row_tiles=16_384, **adapter)
    assert losses[0] == expected[0]
    for name, gradient in gradients.items():
        assert float((tiled[name] - gradient).norm()) < 2.0**-7 * float(gradient.norm()), name
