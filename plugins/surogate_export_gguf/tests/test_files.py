"""Files of every family, read back by the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file
from serving.contexts import context_of
from serving.tiny_models import MODELS, write_model
from torch import Tensor

from surogate_core.api import ConfigError
from surogate_export_gguf import plugin, values, writer

from .plain import file_of, served

PAIRED = {"llama3", "llama-biases", "mistral", "nemo", "ministral3", "smollm3", "mistral3-vision", "smolvlm-vision"}
OWN_HEAD = {"olmo2", "olmo3", "olmoe", "gpt-oss", "qwen2-moe"}
TIED = {"qwen2.5", "qwen3", "phi4-mini", "smollm3", "olmo3", "gemma2", "gemma3", "gemma3-windows", "gemma3-vision"}
OUTER = ("token_embd.weight", "output.weight")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a tiny model, written once."""
    root = tmp_path_factory.mktemp("models")
    return cache(lambda name, dtype=torch.float32: write_model(name, root / f"{name}-{dtype}", dtype))


def wanted_of(name: str, folder: Path) -> dict[str, Tensor]:
    """Return the tensors that the file should have, but those that are made."""
    return file_of(
        load_file(folder / "model.safetensors"),
        heads={"q_proj": 4, "k_proj": 2} if name in PAIRED else {},
        offset=1.0 if name.startswith(("gemma", "qwen3.5", "qwen3-next")) else 0.0,
        after=name.startswith(("gemma", "olmo2", "olmo3", "gpt-oss", "qwen3.5", "qwen3-next", "glm4")),
        tiled=name.startswith("qwen3.5"),
        tied=name in TIED,
        own_head=name in OWN_HEAD,
    )


def read(path: Path) -> tuple[Mapping[str, Any], dict[str, Tensor], dict[str, str]]:
    """Return the keys, the numbers and the types of a file."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    numbers = {
        t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()).reshape(*reversed(t.shape.tolist()))
        for t in reader.tensors
    }
    return keys, numbers, {t.name: t.tensor_type.name.lower() for t in reader.tensors}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_holds_the_numbers_of_the_model(models: Any, tmp_path: Path, name: str) -> None:
    folder = models(name)
    writer.write_model(context_of(folder, "f32"), tmp_path / "x.gguf")
    _, found, types = read(tmp_path / "x.gguf")
    wanted = wanted_of(name, folder)
    made = {key for key in found if key.startswith("rope_")}
    assert found.keys() - made == wanted.keys()
    assert all(torch.equal(found[key], x) for key, x in wanted.items())
    assert set(types.values()) == {"f32"}
    assert made == {
        "llama3": {"rope_freqs.weight"},
        "phi4-mini": {f"rope_factors_{x}.weight" for x in ("long", "short")},
    }.get(name, set())


@pytest.mark.parametrize("kind", ["bf16", "f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"])
@pytest.mark.parametrize("name", ["qwen3-moe", "llama3", "gpt-oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_are_rounded_as_ggml_rounds(
    models: Any, tmp_path: Path, name: str, kind: str, dtype: torch.dtype
) -> None:
    folder = models(name, dtype)
    writer.write_model(context_of(folder, kind), tmp_path / "x.gguf")
    _, found, types = read(tmp_path / "x.gguf")
    for key, x in wanted_of(name, folder).items():
        outer = "q8_0" if kind[1] in "45" else kind
        precise = x.ndim == 1 or "gate_inp" in key or key.endswith("_exps.bias")
        form = "f32" if precise else outer if key in OUTER else kind
        assert types[key] == form, key
        assert torch.equal(found[key], served(x, form)), key


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_experts_alone_are_in_mxfp4_and_all_else_is_in_bf16(models: Any, tmp_path: Path, name: str) -> None:
    folder = models(name, torch.bfloat16)
    writer.write_model(context_of(folder, "mxfp4"), tmp_path / "x.gguf")
    keys, found, types = read(tmp_path / "x.gguf")
    assert keys["general.file_type"] == gguf.LlamaFileType.MOSTLY_MXFP4_MOE
    for key, x in wanted_of(name, folder).items():
        precise = x.ndim == 1 or "gate_inp" in key or key.endswith("_exps.bias")
        form = "f32" if precise else "mxfp4" if key.endswith("_exps.weight") else "bf16"
        assert types[key] == form and torch.equal(found[key], served(x, form)), key


def test_mxfp4_is_refused_for_a_model_without_experts(models: Any) -> None:
    with pytest.raises(ConfigError, match=r"gguf:mxfp4: is for models with experts, .* Use gguf:q4_0"):
        writer.prepare(context_of(models("llama3"), "mxfp4"))


def test_stacks_of_experts_give_the_file_of_a_matrix_for_each(models: Any, tmp_path: Path) -> None:
    """Qwen3.5 mixtures are published with gate before up in a tensor for all experts of a layer."""
    context = context_of(models("qwen3.5-moe"), "q8_0")
    stacked = {name: x for name, x in context.tensors.items() if ".experts." not in name}
    for layer in range(4):
        mlp = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([context.tensors[f"{mlp}.{i}.{part}_proj.weight"][...] for i in range(8)])
            for part in ("gate", "up", "down")
        )
        for name, x in ((f"{mlp}.gate_up_proj", torch.cat([gate, up], dim=1)), (f"{mlp}.down_proj", down)):
            stacked[name] = Narrow(name, x)
    writer.write_model(context, tmp_path / "each.gguf")
    writer.write_model(replace(context, tensors=stacked), tmp_path / "stacks.gguf")
    one, other = (read(tmp_path / f"{name}.gguf") for name in ("each", "stacks"))
    assert one[1].keys() == other[1].keys() and all(torch.equal(x, other[1][name]) for name, x in one[1].items())


@pytest.mark.parametrize(
    ("model", "name"), [("qwen3.5", "mtp.layers.0.mlp.up_proj.weight"), ("glm4-moe", "model.layers.4.enorm.weight")]
)
def test_what_predicts_further_tokens_is_left_out_by_name(models: Any, model: str, name: str) -> None:
    told: list[str] = []
    context = context_of(models(model), "bf16", told.append)
    tensors = {**context.tensors, name: Narrow(name, torch.zeros(128, 128))}
    prepared = writer.prepare(replace(context, tensors=tensors))
    assert all(name not in target.sources for target in prepared.targets)
    part = "mtp" if model == "qwen3.5" else "model.layers.4"
    assert any(line.startswith(f"{part} is left out: it predicts further tokens") for line in told)


def test_a_stack_of_another_number_of_experts_is_refused(models: Any) -> None:
    context = context_of(models("gpt-oss"), "f32")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors = {**context.tensors, name: Narrow(name, torch.zeros(7, 256, 128))}
    with pytest.raises(ConfigError, match=rf"{name}: there are 7 experts, config.json says 8"):
        writer.prepare(context_of(models("gpt-oss"), "f32", tensors=tensors))


def test_yarn_that_llama_cpp_rounds_is_told(models: Any) -> None:
    """Published files of gpt-oss say `truncate: false`."""
    told: list[str] = []
    context = context_of(models("gpt-oss"), "f32", told.append)
    rope = {**context.config["rope_parameters"], "truncate": False}
    writer.prepare(replace(context, config={**context.config, "rope_parameters": rope}))
    assert any("llama.cpp rounds where YaRN begins and ends" in line for line in told)


def test_rows_that_blocks_do_not_divide_are_in_f16(models: Any, tmp_path: Path) -> None:
    notices: list[str] = []
    context = context_of(models("olmo2"), "q8_0", notices.append)
    name = "model.layers.2.mlp.down_proj.weight"
    narrow = torch.zeros(128, 200)
    tensors = {**context.tensors, name: Narrow(name, narrow)}
    changed = context_of(models("olmo2"), "q8_0", notices.append, tensors=tensors)
    writer.write_model(changed, tmp_path / "x.gguf")
    assert read(tmp_path / "x.gguf")[2]["blk.2.ffn_down.weight"] == "f16"
    assert notices == ["1 matrices stay in F16 because 32 does not divide their rows, such as blk.2.ffn_down.weight"]


class Narrow:
    """A tensor of the context with values of a test."""

    def __init__(self, name: str, values: Tensor) -> None:
        self.name, self.values = name, values
        self.shape, self.dtype = tuple(values.shape), values.dtype

    def __getitem__(self, rows: Any) -> Tensor:
        return self.values if rows is ... else self.values[rows]


@pytest.mark.parametrize("name", ["q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "mxfp4"])
@pytest.mark.parametrize("shape", [(7, 96), (3, 40, 1024), (300, 2048)], ids=str)
def test_pieces_have_the_bytes_that_the_package_gives_all_rows(name: str, shape: tuple[int, ...]) -> None:
    kind = values.Type[name.upper()]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = gguf.quants.quantize(x.float().numpy() + 1, kind)
    assert values.encoded(x, kind, 1.0, "x").tobytes() == expected.tobytes()


def test_threads_and_pieces_change_no_byte(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer.write_model(context_of(models("llama3"), "q4_0", threads=1), tmp_path / "one.gguf")
    monkeypatch.setattr(writer, "CHUNK", 300)
    writer.write_model(context_of(models("llama3"), "q4_0", threads=4), tmp_path / "four.gguf")
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "four.gguf").read_bytes()


KEYS: list[tuple[str, dict[str, Any]]] = [
    ("llama3", {"llama.rope.freq_base": 5e5, "llama.attention.head_count_kv": 2, "llama.vocab_size": 1024}),
    ("qwen3-moe", {"qwen3moe.expert_count": 8, "qwen3moe.expert_used_count": 2}),
    ("qwen3-moe", {"qwen3moe.expert_feed_forward_length": 96}),
    ("gpt-oss", {"gpt-oss.expert_count": 8, "gpt-oss.expert_used_count": 2, "gpt-oss.rope.scaling.type": "yarn"}),
    ("qwen3.5", {"qwen35.full_attention_interval": 2, "qwen35.ssm.group_count": 2, "qwen35.ssm.inner_size": 256}),
    ("qwen2-moe", {"qwen2moe.expert_shared_feed_forward_length": 128, "qwen2moe.expert_count": 8}),
    ("glm4-moe", {"glm4moe.leading_dense_block_count": 1, "glm4moe.expert_gating_func": 2}),
    ("gpt-oss", {"gpt-oss.expert_feed_forward_length": 256, "gpt-oss.attention.sliding_window": 64}),
    ("gemma2", {"gemma2.attention.sliding_window": 64, "gemma2.attn_logit_softcapping": 50.0}),
    ("gemma3", {"gemma3.rope.freq_base": 1e6, "gemma3.rope.freq_base_swa": 2e4, "gemma3.rope.scaling.factor": 8.0}),
    ("olmo3", {"olmo2.attention.sliding_window": 64, "olmo2.rope.scaling.type": "yarn"}),
    ("ministral3", {"mistral3.attention.temperature_scale": pytest.approx(0.1), "general.architecture": "mistral3"}),
    ("phi4-mini", {"phi3.rope.dimension_count": 24, "phi3.rope.scaling.original_context_length": 1024}),
    ("qwen3-vl", {"qwen3vl.rope.dimension_sections": [11, 11, 10, 0], "qwen3vl.n_deepstack_layers": 2}),
]


@pytest.mark.parametrize(("name", "wanted"), KEYS)
def test_keys_say_the_sizes(models: Any, tmp_path: Path, name: str, wanted: dict[str, Any]) -> None:
    writer.write_model(context_of(models(name), "bf16"), tmp_path / "x.gguf")
    keys = read(tmp_path / "x.gguf")[0]
    assert {key: keys[key] for key in wanted} == wanted


def test_attention_of_yarn_is_that_of_transformers(models: Any, tmp_path: Path) -> None:
    writer.write_model(context_of(models("ministral3"), "bf16"), tmp_path / "x.gguf")
    keys = read(tmp_path / "x.gguf")[0]
    factor = keys["mistral3.rope.scaling.attn_factor"]  # mscale and mscale_all_dim are equal: 1 in all
    assert factor * (1 + 0.1 * torch.log(torch.tensor(4.0))) == pytest.approx(1.0)


def test_the_command_has_the_types_of_the_writer() -> None:
    assert plugin.GGUF.types == tuple(values.FORMS)
    assert set(plugin.LORA.types) <= set(values.FORMS)


def test_progress_counts_tensors(models: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    context = context_of(models("llama3"), "bf16", progress=lambda done, of: seen.append((done, of)))
    writer.write_model(context, tmp_path / "x.gguf")
    assert seen == [(i, len(seen) - 1) for i in range(len(seen))]


def test_a_tower_is_left_out_by_name(models: Any, tmp_path: Path) -> None:
    notices: list[str] = []
    writer.write_model(context_of(models("qwen3-vl"), "bf16", notices.append), tmp_path / "x.gguf")
    assert "the file holds the text of Qwen3VLForConditionalGeneration, without visual" in " ".join(notices)
