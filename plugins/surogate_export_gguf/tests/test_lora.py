"""Adapters as GGUF files: `surogate export ADAPTER OUT --format gguf-lora`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from end_to_end.product import assert_refused, invoke
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from serving.contexts import context_of
from serving.tiny_models import MODELS, write_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from surogate_core.api import ConfigError
from surogate_export_gguf import plugin

from .plain import moved

Adapter = Callable[..., tuple[Path, Path]]


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Adapter:
    """Return the folders of a tiny model and of a random adapter of it."""
    root = tmp_path_factory.mktemp("adapters")
    models: dict[str, Path] = {}

    def made(name: str, key: str = "plain", **settings: Any) -> tuple[Path, Path]:
        model = models.setdefault(name, root / name)
        if not model.exists():
            write_model(name, model)
        torch.manual_seed(0)
        by = AutoModelForImageTextToText if MODELS[name].vision else AutoModelForCausalLM
        config = LoraConfig(init_lora_weights=False, **{"r": 4, "lora_alpha": 8, **settings})
        get_peft_model(by.from_pretrained(model), config).save_pretrained(root / f"{name}-{key}")
        return model, root / f"{name}-{key}"

    return made


def read(path: Path) -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Return keys and numbers of a file."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}


def exported(model: Path, folder: Path, out: Path, kind: str = "f32") -> tuple[Mapping[str, Any], dict[str, Tensor]]:
    """Export an adapter by the command, and return keys and numbers of the file."""
    done = invoke("export", folder, out, "--format", f"gguf-lora:{kind}", "--base", model)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in out.iterdir()] == [f"{out.name}-{kind}.gguf"]
    return read(out / f"{out.name}-{kind}.gguf")


def test_an_adapter_has_its_pairs_and_its_alpha(adapter: Adapter, tmp_path: Path) -> None:
    model, folder = adapter("llama3", target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])
    keys, found = exported(model, folder, tmp_path / "mine")
    kind = {key: keys[key] for key in ("general.type", "general.architecture", "adapter.type", "adapter.lora.alpha")}
    assert kind == {
        "general.type": "adapter",
        "general.architecture": "llama",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
    }
    stored = load_file(folder / "adapter_model.safetensors")
    assert len(found) == len(stored) == 4 * 4 * 2
    at = "base_model.model.model.layers.1."
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    heads = {"attn_q": 4, "attn_k": 2}
    for name, part in {**names, "ffn_down": "mlp.down_proj"}.items():
        a, b = (stored[f"{at}{part}.lora_{letter}.weight"] for letter in "AB")
        assert torch.equal(found[f"blk.1.{name}.weight.lora_a"], a)
        assert torch.equal(found[f"blk.1.{name}.weight.lora_b"], moved(b, heads[name]) if name in heads else b)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_numbers_are_rounded_to_the_type(adapter: Adapter, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model, folder = adapter("qwen3", target_modules=["o_proj"])
    _, found = exported(model, folder, tmp_path / "mine", kind)
    stored = load_file(folder / "adapter_model.safetensors")
    wanted = stored["base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight"]
    assert torch.equal(found["blk.0.attn_output.weight.lora_a"], wanted.to(dtype).float())


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.self_attn.v_proj": 24}},
    ],
)
def test_products_have_the_scale_of_peft(adapter: Adapter, tmp_path: Path, settings: dict[str, Any]) -> None:
    key = "-".join(settings)
    model, folder = adapter("qwen3", key, target_modules=["v_proj", "down_proj"], **settings)
    keys, found = exported(model, folder, tmp_path / "mine")
    base = AutoModelForCausalLM.from_pretrained(model)
    scales = {
        name: m.scaling["default"]
        for name, m in get_peft_model(base, LoraConfig.from_pretrained(folder)).named_modules()
        if isinstance(getattr(m, "scaling", None), dict)
    }
    stored = load_file(folder / "adapter_model.safetensors")
    for i in range(4):
        for name, part in {"attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj"}.items():
            module = f"base_model.model.model.layers.{i}.{part}"
            a, b = (found[f"blk.{i}.{name}.weight.lora_{letter}"] for letter in "ab")
            served = keys["adapter.lora.alpha"] / b.shape[1] * (b @ a)
            wanted = scales[module] * stored[f"{module}.lora_B.weight"] @ stored[f"{module}.lora_A.weight"]
            torch.testing.assert_close(served, wanted)


def test_an_adapter_of_an_outer_class_is_one_of_the_text(adapter: Adapter, tmp_path: Path) -> None:
    model, folder = adapter("gemma3-vision", target_modules=r".*language_model.*\.q_proj")
    _, found = exported(model, folder, tmp_path / "mine")
    assert len(found) == 14 and "blk.6.attn_q.weight.lora_a" in found


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora is True, which llama.cpp does not add to a model"),
    ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, "modules_to_save is ['embed_tokens']"),
]


@pytest.mark.parametrize(("settings", "line"), REFUSED, ids=["dora", "saved"])
def test_what_llama_cpp_does_not_add_is_refused(
    adapter: Adapter, tmp_path: Path, settings: dict[str, Any], line: str
) -> None:
    model, folder = adapter("llama3", line.split()[0], **settings)
    done = invoke("export", folder, tmp_path / "mine", "--format", "gguf-lora", "--base", model)
    assert_refused(done, line)
    assert "Merge it: --format gguf" in done.stderr


def test_a_model_is_no_adapter(adapter: Adapter, tmp_path: Path) -> None:
    model, _ = adapter("qwen3", target_modules=["o_proj"])
    done = invoke("export", model, tmp_path / "mine", "--format", "gguf-lora")
    assert_refused(done, "holds a model, and the format is for adapters")


def test_a_matrix_that_the_file_of_the_base_lacks_is_refused(adapter: Adapter, tmp_path: Path) -> None:
    model, folder = adapter("qwen3", target_modules=["o_proj"])
    stored = load_file(folder / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps(json.loads((folder / "adapter_config.json").read_text())))

    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors; the format is for adapters of PEFT"):
        plugin.LORA.check(context_of(model, "f16", adapter=tmp_path))

    def check(old: str, new: str) -> None:
        save_file({key.replace(old, new): x for key, x in stored.items()}, tmp_path / "adapter_model.safetensors")
        plugin.LORA.check(context_of(model, "f16", adapter=tmp_path))

    with pytest.raises(ConfigError, match="adapts lm_head, which is no matrix by itself in the file of its base"):
        check("model.layers.0.self_attn.o_proj", "lm_head")
    with pytest.raises(ConfigError, match=r"has .*lora_embedding_A; llama.cpp adds products of two matrices to linear"):
        check("lora_A.weight", "lora_embedding_A")
