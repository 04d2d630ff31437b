"""`surogate export FOLDER OUT --format gguf:TYPE`."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from end_to_end.product import assert_refused, invoke
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from serving.tiny_models import write_model
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Llama."""
    return write_model("llama3", tmp_path_factory.mktemp("models") / "llama3")


def tensor_of(path: Path, name: str) -> torch.Tensor:
    """Return a tensor of a file."""
    (found,) = [t for t in gguf.GGUFReader(path).tensors if t.name == name]
    return torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())


def test_a_model_becomes_a_file_and_a_modelfile(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "served"
    done = invoke("export", model, out, "--format", "gguf")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"exported {model}: {out}\n"
    assert sorted(path.name for path in out.iterdir()) == ["Modelfile", "served-bf16.gguf"]
    wanted = load_file(model / "model.safetensors")["model.embed_tokens.weight"].bfloat16().float()
    assert torch.equal(tensor_of(out / "served-bf16.gguf", "token_embd.weight"), wanted)
    assert_refused(invoke("export", model, out, "--format", "gguf"), "is not empty")
    assert invoke("export", model, out, "--format", "gguf:q8_0", "--overwrite").returncode == 0
    assert {path.name for path in out.iterdir()} >= {"Modelfile", "served-q8_0.gguf"}


def test_an_adapter_is_merged_on_the_way(model: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    adapted.save_pretrained(tmp_path / "adapter")
    done = invoke("export", tmp_path / "adapter", tmp_path / "served", "--format", "gguf:f32", "--base", model)
    assert done.returncode == 0, done.stderr
    base = AutoModelForCausalLM.from_pretrained(model)
    merged = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    wanted = merged.model.layers[2].mlp.down_proj.weight.detach()
    found = tensor_of(tmp_path / "served/served-f32.gguf", "blk.2.ffn_down.weight")
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert not torch.equal(wanted, load_file(model / "model.safetensors")["model.layers.2.mlp.down_proj.weight"])


def test_what_cannot_be_written_leaves_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "served"
    done = invoke("export", model, out, "--format", "gguf:q4_k_m")
    assert_refused(done, "gguf has no type 'q4_k_m'. Use one of gguf:bf16, gguf:f16, gguf:f32, gguf:q8_0")
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in model.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    (bad / "tokenizer.json").unlink()
    assert_refused(invoke("export", bad, out, "--format", "gguf"), "has no tokenizer.json")
    assert not out.exists() or not any(out.iterdir())
