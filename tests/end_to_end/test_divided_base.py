"""Ranks divide a base that is stored quantized: each keeps its part of the codes in the files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace, losses, make_workplace, write_model
from end_to_end.several import trained as trained_together
from end_to_end.test_qlora import draw
from safetensors.torch import load_file, save_file

from surogate import run
from surogate_core.errors import ProgramError
from surogate_core.program.shards import part_of
from surogate_core.program.value import Value
from surogate_core.runtime.arena import wholes_in

ROWS = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1}
CASES = [
    ("qlora_bnb", 2, {}),
    ("qlora_bnb", 3, {"offload_quants": True, "recompute_block": True}),
    ("qlora_fp8", 3, {"quantize_lm_head": True, "quantize_embedding": True}),
    pytest.param("qlora_fp8", 2, {"recipe": "fp8-hybrid"}, marks=pytest.mark.slow),
    pytest.param("qlora_bnb", 3, {"recipe": "fp8-hybrid"}, marks=pytest.mark.slow),
    ("qlora_fp4", 2, {"recipe": "nvfp4"}),
    pytest.param("qlora_fp4", 3, {}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """A workplace whose model has an LM head of its own, and weights in bf16."""
    keys = {"from_scratch": None, "adapter": "lora", "lora_rank": 4, "learning_rate": 1e-2, "model_dtype": "bf16"}
    workplace = make_workplace(tmp_path_factory.mktemp("divided"), max_steps=2, eval_steps=2, **keys)
    draw(write_model(workplace.root / "model", tie_word_embeddings=False))
    return workplace


def quantized(place: Workplace, *keys: str) -> Path:
    """Return the model of `place`, stored in a weight format."""
    folder = place.root / "-".join(keys)
    if not folder.exists():
        run.quantize(str(place.root / "model"), folder, [f"{key}=true" for key in keys])
    return folder


def trained(place: Workplace, model: Path, ranks: int, **keys: Any) -> tuple[list[float], dict[str, bytes]]:
    """Train an adapter on some ranks, threads of this process. Return its losses and the bytes of its weights."""
    output = place.root / "out"
    shutil.rmtree(output, ignore_errors=True)
    rows = {**ROWS, "per_device_train_batch_size": 12 // ranks}
    run.train(run.load(place.write(model=str(model), ranks_per_gpu=ranks, **rows, **keys)), notice=lambda line: None)
    return losses(output), weights(output)


def weights(output: Path) -> dict[str, bytes]:
    found = load_file(output / "adapter/adapter_model.safetensors")
    return {name: x.contiguous().view(torch.uint8).numpy().tobytes() for name, x in found.items()}


@pytest.mark.parametrize(("key", "ranks", "more"), CASES)
def test_parts_of_stored_codes_train_like_whole_ones(
    place: Workplace, key: str, ranks: int, more: dict[str, Any]
) -> None:
    """And like parts of codes that are made while the weights are loaded, but in NVFP4, whose files share scales."""
    keys = {key: True, **more}
    stored = quantized(place, key, *more.keys() & {"quantize_lm_head"})
    divided = trained(place, stored, ranks, shard_weights=True, **keys)
    assert divided == trained(place, stored, ranks, **keys)
    on_load = trained(place, place.root / "model", ranks, shard_weights=True, **keys)
    assert on_load == (divided if key != "qlora_fp4" else trained(place, place.root / "model", ranks, **keys))


def test_a_block_may_hold_matrices_in_both_forms(place: Workplace) -> None:
    """Those in floating point are quantized while they are loaded, the others are not."""
    stored = quantized(place, "qlora_fp8")
    mixed = place.root / "mixed"
    shutil.copytree(stored, mixed)
    (file,) = mixed.glob("*.safetensors")
    original, tensors = load_file(place.root / "model/model.safetensors"), load_file(file)
    for name in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.o_proj"):
        for part in [part for part in tensors if part.startswith(name)]:
            del tensors[part]
        tensors[f"{name}.weight"] = original[f"{name}.weight"].bfloat16()
    save_file(tensors, file, metadata={"format": "pt"})
    divided = trained(place, mixed, 2, shard_weights=True, qlora_fp8=True)
    assert divided == trained(place, mixed, 2, qlora_fp8=True)
    assert divided == trained(place, stored, 2, qlora_fp8=True)


def test_a_process_that_reads_no_files_gets_its_parts(place: Workplace) -> None:
    """It knows from the first process which matrices are stored. A run that resumes loads the base again."""
    stored = quantized(place, "qlora_bnb")
    keys = {"model": str(stored), "qlora_bnb": True, "shard_weights": True, "max_steps": 2, "save_steps": 1, **ROWS}
    threads = trained(place, stored, 2, qlora_bnb=True)
    shutil.rmtree(place.out)
    trained_together(place, **keys)
    assert (losses(place.out), weights(place.out)) == threads
    trained_together(place, resume_from_checkpoint=1, **keys)
    assert (losses(place.out), weights(place.out)) == threads


def test_states_that_do_not_fit_in_the_place_of_their_weight_are_refused() -> None:
    part = part_of(Value("codes", (64, 64), "uint8", "state"), 2)
    memory = torch.zeros(64 * 64 - 1, dtype=torch.uint8)
    with pytest.raises(ProgramError, match=r"codes:uint8\[64,64\] has more bytes than its weight"):
        list(wholes_in(memory, [part], pytest.fail))


def test_modules_that_are_saved_with_an_adapter_stay_whole_where_ranks_divide_weights(place: Workplace) -> None:
    keys = {"lora_modules_to_save": ["embed_tokens", "lm_head"], "verify_outputs": False}
    divided = trained(place, place.root / "model", 2, zero_level=3, **keys)
    assert divided == trained(place, place.root / "model", 2, **keys)
