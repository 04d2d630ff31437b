"""Loading and saving Hugging Face checkpoints, compared with transformers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from surogate.checkpoints import stored_weights, tensor_file
from surogate.checkpoints.hf import ModelExport, save_model
from surogate.checkpoints.stored_weights import INDEX, WEIGHTS, locate, open_weights
from surogate.hub.config_json import read_config
from surogate_core.errors import ConfigError, ProgramError, RunStopped
from surogate_core.runtime.pieces import Pieces

from .models.harness import MODELS, as_stored, random_hf_model, saved_tensors, tiny_config
from .models.supported import FAMILIES
from .outer_models import HYBRID

EXAMPLE = Path(__file__).parents[1] / "examples/tiny-qwen3"
SMALL_SHARDS = 40_000


class Model:
    """A config's weight maps with empty params."""

    def __init__(self, dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        self.config = tiny_config(**changes)
        self.definition = MODELS[self.config["model_type"]]
        self.dims = self.definition.dims(self.config)
        self.maps = self.definition.weights(self.dims)
        self.params = {
            m.param: torch.full((sum(t.rows[0] for t in m.tensors), *m.tensors[0].rows[1:]), 7.0, dtype=dtype)
            for m in self.maps
        }

    def load(self, directory: Path) -> dict[str, Tensor]:
        ignored, copies = self.definition.ignored_tensors(self.dims), self.definition.tied_copies(self.dims)
        open_weights(directory, self.maps, ignored, copies).load(self.pieces())
        return self.by_tensor()

    def pieces(self) -> dict[str, Pieces]:
        return {name: Pieces.of(param) for name, param in self.params.items()}

    def by_tensor(self) -> dict[str, Tensor]:
        return {
            t.name: t.save(part)
            for m in self.maps
            for t, part in zip(m.tensors, self.params[m.param].split([t.rows[0] for t in m.tensors]), strict=True)
        }

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the params what the tensors of a checkpoint hold."""
        for m in self.maps:
            self.params[m.param].copy_(torch.cat([t.load(tensors[t.name].detach()) for t in m.tensors]))

    def save(self, directory: Path, dtype: str = "fp32", source: Path | None = None, **settings: Any) -> None:
        given = {
            "weights": self.maps,
            "params": self.pieces(),
            "config": self.config,
            "source_dir": source,
            "dtype": dtype,
        }
        save_model(directory, ModelExport(**given, **settings))


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(20)[None]).logits


TIED = {"tie_word_embeddings": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True},
    "qwen2": {"model_type": "qwen2"},
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "olmo2": {"model_type": "olmo2"},
    "phi3": {"model_type": "phi3"},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 0, 1]},
    "mistral": {"model_type": "mistral", "sliding_window": 6},
    "gemma2": {"model_type": "gemma2", "sliding_window": 6, "tie_word_embeddings": True},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 6, "rope_parameters": None} | TIED,
    "ministral": {"model_type": "ministral", "sliding_window": 6},
    "ministral3": {"model_type": "ministral3", "rope_parameters": None},
    "olmo3": {"model_type": "olmo3", "sliding_window": 6, "rope_parameters": None},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "qwen2_moe": {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "olmoe": {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 12},
    "deepseek_v3": {
        **{"model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"n_group": 2, "topk_group": 1, "head_dim": 6, "num_key_value_heads": 4, "q_lora_rank": None},
        **{"kv_lora_rank": 12, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8},
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        **{"model_type": "glm4_moe_lite", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"head_dim": 6, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 10},
        **{"qk_rope_head_dim": 6, "v_head_dim": 16, "num_nextn_predict_layers": 0},
    },
    "glm4_moe": {
        **{"model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
        **{"num_nextn_predict_layers": 0},
    },
    "gpt_oss": {
        **{"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 20},
        **{"sliding_window": 6, "attention_bias": True, "rope_parameters": None},
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", "full_attention_interval": 2, **HYBRID},
    "qwen3_5_moe_text": {
        **{"model_type": "qwen3_5_moe_text", "full_attention_interval": 2, **HYBRID},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    },
    "qwen3_next": {
        **{"model_type": "qwen3_next", "full_attention_interval": 2, "decoder_sparse_step": 2, **HYBRID},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    },
    "scaled": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 4.0}},
}


# -------------------------------------------------------------------------------------------------------------- import


def test_every_family_is_among_the_variants() -> None:
    assert {family.variant for family in FAMILIES} <= VARIANTS.keys()


@pytest.mark.parametrize("shard", ["10GB", "40KB"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_import_of_save_pretrained_is_identical(variant: str, shard: str, tmp_path: Path) -> None:
    model = Model(**VARIANTS[variant])
    theirs = random_hf_model(model.config)
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / INDEX).exists() is (shard == "40KB")
    assert model.definition.dims(read_config(tmp_path)) == model.dims
    loaded = model.load(tmp_path)
    expected = as_stored(saved_tensors(theirs))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


@pytest.mark.parametrize("stored", [torch.float64, torch.float16, torch.bfloat16])
def test_import_converts_dtypes(stored: torch.dtype, tmp_path: Path) -> None:
    theirs = random_hf_model(tiny_config()).to(stored)
    save_file(dict(theirs.named_parameters()), tmp_path / WEIGHTS)
    for held in (torch.float32, torch.bfloat16):
        loaded = Model(held).load(tmp_path)
        assert all(torch.equal(loaded[name], p.to(held)) for name, p in theirs.named_parameters())


def test_import_ignores_tied_copies_and_legacy_buffers(tmp_path: Path) -> None:
    model = Model(tie_word_embeddings=True)
    tensors = {name: p.detach().clone() for name, p in random_hf_model(model.config).named_parameters()}
    extra = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    extra["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors | extra, tmp_path / WEIGHTS)
    loaded = model.load(tmp_path)
    assert torch.equal(loaded["model.embed_tokens.weight"], tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_tied_model_with_another_head_in_its_file_is_refused(
    sharded: bool, stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers keeps both tensors then. A run that dropped one would train and export another model."""
    monkeypatch.setattr(stored_weights, "COMPARED_ROWS", 50)
    model = Model(tie_word_embeddings=True)
    tensors = {name: p.detach().clone() for name, p in random_hf_model(model.config).named_parameters()}
    rows, columns = tensors["model.embed_tokens.weight"].shape
    head = tensors["model.embed_tokens.weight"].to(stored).clone()
    tensors["model.embed_tokens.weight"] = head.float().clone()

    def save() -> None:
        if not sharded:
            save_file(tensors | {"lm_head.weight": head}, tmp_path / WEIGHTS)
            return
        save_file(tensors, tmp_path / "a.safetensors")
        save_file({"lm_head.weight": head}, tmp_path / "b.safetensors")
        places = dict.fromkeys(tensors, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))

    save()
    model.load(tmp_path)  # equal
    head[rows - 1, 3] += 1
    save()
    with pytest.raises(ConfigError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight") as refused:
        model.load(tmp_path)
    assert f"{'b' if sharded else 'model'}.safetensors: " in str(refused.value)
    assert f"in 1 of {rows * columns:,} elements, first at [{rows - 1}, 3]" in str(refused.value)
    assert "Set tie_word_embeddings: false" in str(refused.value)
    head = head[:-1]
    save()
    with pytest.raises(ConfigError, match=rf"lm_head\.weight is \[{rows - 1}, {columns}\], expected \[{rows}, "):
        model.load(tmp_path)


def test_an_old_file_beside_newer_shards_is_refused_unless_they_are_one_model(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3)}
    save_file({"a": tensors["a"]}, tmp_path / "model-1.safetensors")
    save_file({"b": tensors["b"]}, tmp_path / "model-2.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    save_file(tensors, tmp_path / WEIGHTS)
    assert locate(tmp_path) == {tmp_path / WEIGHTS: {"a", "b"}}
    for old in ({**tensors, "a": -tensors["a"]}, {"b": tensors["b"]}, {**tensors, "a": tensors["a"].half()}):
        save_file(old, tmp_path / WEIGHTS)
        with pytest.raises(ConfigError, match=r"holds two models, model\.safetensors and the shards .* differ in a "):
            locate(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()  # the index is left of a model that is gone
    assert locate(tmp_path) == {tmp_path / WEIGHTS: {"a", "b"}}


def edit_tensors(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        tensors = load_file(directory / WEIGHTS)
        change(tensors)
        save_file(tensors, directory / WEIGHTS)

    return spoil


def edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index)
        (directory / INDEX).write_text(json.dumps(index))

    return spoil


def truncate(name: str, keep: int) -> Callable[[Path], None]:
    return lambda directory: os.truncate(directory / name, keep)


def only_pickle(directory: Path) -> None:
    (directory / WEIGHTS).unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps({"w": 1}))


UP = "model.layers.3.mlp.up_proj.weight"
FIRST_SHARD = "model-00001-of-00011.safetensors"

SPOILED_FILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (edit_tensors(lambda t: t.pop(UP)), f"lacks {UP}"),
    "unexpected tensor": (edit_tensors(lambda t: t.update(extra=torch.ones(1))), "holds extra, which"),
    "wrong shape": (
        edit_tensors(lambda t: t.update({UP: torch.ones(80, 47)})),
        rf"{UP} is \[80, 47\], expected \[80, 48\]",
    ),
    "transposed": (edit_tensors(lambda t: t.update({UP: torch.ones(48, 80)})), r"is \[48, 80\], expected"),
    "quantized": (edit_tensors(lambda t: t.update({UP: t[UP].to(torch.float8_e4m3fn)})), "stored as F8_E4M3"),
    "integers": (edit_tensors(lambda t: t.update({UP: t[UP].to(torch.int8)})), "stored as I8"),
    "truncated": (truncate(WEIGHTS, 5000), "truncated or corrupt"),
    "empty": (truncate(WEIGHTS, 0), "truncated or corrupt"),
    "no safetensors": (lambda d: (d / WEIGHTS).write_bytes(b"not at all" * 99), "truncated or corrupt"),
    "gone": (lambda d: (d / WEIGHTS).unlink(), "holds neither"),
    "a directory": (lambda d: ((d / WEIGHTS).unlink(), (d / WEIGHTS).mkdir())[0], "cannot be read"),
    "pickle": (only_pickle, "pickled weights only"),
}
SPOILED_SHARDS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing shard": (lambda d: (d / FIRST_SHARD).unlink(), f"names {FIRST_SHARD}, which"),
    "truncated shard": (truncate(FIRST_SHARD, 900), f"{FIRST_SHARD}: is truncated"),
    "index is no JSON": (lambda d: (d / INDEX).write_text("{"), "not valid JSON"),
    "index is a list": (lambda d: (d / INDEX).write_text("[]"), "must contain a JSON object"),
    "no weight_map": (edit_index(lambda i: i.pop("weight_map")), "no weight_map"),
    "outside": (
        edit_index(lambda i: i["weight_map"].update({UP: "../model.safetensors"})),
        "in the folder of the index",
    ),
    "a number": (edit_index(lambda i: i["weight_map"].update({UP: 3})), "in the folder of the index"),
    "wrong shard": (edit_index(lambda i: i["weight_map"].update({UP: FIRST_SHARD})), f"says that {UP} is in"),
    "not in index": (edit_index(lambda i: i["weight_map"].pop(UP)), f"lacks {UP}"),
}


@pytest.fixture(scope="module")
def saved() -> Model:
    model = Model()
    tensors = dict(random_hf_model(model.config).named_parameters())
    for name, part in model.by_tensor().items():
        part.copy_(tensors[name].detach())
    return model


@pytest.mark.parametrize("case", [*SPOILED_FILE, *SPOILED_SHARDS])
def test_an_invalid_checkpoint_is_refused_before_anything_is_written(case: str, saved: Model, tmp_path: Path) -> None:
    spoil, message = (SPOILED_FILE | SPOILED_SHARDS)[case]
    saved.save(tmp_path, max_shard_bytes=SMALL_SHARDS if case in SPOILED_SHARDS else 10**9)
    spoil(tmp_path)
    model = Model()
    with pytest.raises(ConfigError, match=message) as refused:
        model.load(tmp_path)
    assert str(tmp_path) in str(refused.value)
    assert all((param == 7).all() for param in model.params.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file"),
        ("", "not valid JSON"),
        ("[1]", "JSON object"),
        ("\udcff", "not valid JSON"),
        ("[" * 10**5, "not valid JSON"),
        ('{"quantization_config": "fp8"}', "quantization_config must be an object"),
    ],
    ids=["missing", "empty", "list", "not text", "deep", "quantized"],
)
def test_an_invalid_config_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


# -------------------------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("max_shard_bytes", [10**9, SMALL_SHARDS])
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_loads_in_transformers_with_equal_logits(variant: str, max_shard_bytes: int, tmp_path: Path) -> None:
    model = Model(**VARIANTS[variant])
    theirs = random_hf_model(model.config)
    tensors = as_stored(saved_tensors(theirs))
    model.fill(tensors)
    model.save(tmp_path, max_shard_bytes=max_shard_bytes)
    assert (tmp_path / INDEX).exists() is (max_shard_bytes == SMALL_SHARDS)
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not any(report.values()), report
    assert again.dtype == torch.float32
    assert torch.equal(logits(again), logits(theirs))


def test_save_load_save_is_identical(saved: Model, tmp_path: Path) -> None:
    for dtype in ("fp32", "bf16"):
        one, two = tmp_path / f"{dtype}-1", tmp_path / f"{dtype}-2"
        saved.save(one, dtype, max_shard_bytes=SMALL_SHARDS)
        again = Model()
        again.load(one)
        again.save(two, dtype, max_shard_bytes=SMALL_SHARDS)
        assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


def test_export_in_bf16_rounds_to_nearest(saved: Model, tmp_path: Path) -> None:
    saved.save(tmp_path, "bf16")
    stored = load_file(tmp_path / WEIGHTS)
    assert all(torch.equal(stored[name], part.bfloat16()) for name, part in saved.by_tensor().items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16
    with pytest.raises(ProgramError, match="e4m3"):
        saved.save(tmp_path, "e4m3")


def test_shards_stay_under_their_limit_and_the_index_covers_them(saved: Model, tmp_path: Path) -> None:
    saved.save(tmp_path, max_shard_bytes=SMALL_SHARDS)
    shards = {path.name: load_file(path) for path in tmp_path.glob("*.safetensors")}
    sizes = [sum(t.nbytes for t in tensors.values()) for tensors in shards.values()]
    assert max(sizes) <= SMALL_SHARDS
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {name: shard for shard, tensors in shards.items() for name in tensors}


def test_export_copies_tokenizer_chat_template_and_generation_config(saved: Model, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (source / name).symlink_to(EXAMPLE / name)  # as in the hub's cache
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (source / "modeling_custom.py").write_text("raise SystemExit")
    saved.save(out, source=source)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert not (out / "modeling_custom.py").exists()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.decode(tokenizer("To be, or not to be").input_ids) == "To be, or not to be"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello"
    assert GenerationConfig.from_pretrained(out).to_dict() == GenerationConfig.from_pretrained(EXAMPLE).to_dict()


def test_without_a_source_the_generation_config_has_the_special_tokens(saved: Model, tmp_path: Path) -> None:
    saved.save(tmp_path)
    generation = GenerationConfig.from_pretrained(tmp_path)
    assert (generation.eos_token_id, generation.pad_token_id) == (0, 0)


def test_export_replaces_an_older_model_and_leaves_other_files(saved: Model, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / ".saving-killed").mkdir()
    saved.save(tmp_path, max_shard_bytes=SMALL_SHARDS)
    saved.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "generation_config.json",
        "metrics.jsonl",
        "model.safetensors",
    ]


def test_a_kill_while_files_are_moved_never_leaves_a_mixture(
    saved: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop after every possible number of renames: if there is a config.json, the model is complete, old or new."""
    old = {name: part.clone() for name, part in saved.by_tensor().items()}
    new = Model()
    for count in range(12):
        out = tmp_path / str(count)
        saved.save(out, max_shard_bytes=2 * SMALL_SHARDS)
        done = renames_fail_after(count, monkeypatch)
        with contextlib.suppress(KeyboardInterrupt):
            new.save(out, max_shard_bytes=3 * SMALL_SHARDS)
        monkeypatch.undo()
        if (out / "config.json").exists():
            loaded = Model().load(out)
            expected = new.by_tensor() if done() else old
            assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())
    assert done()


def renames_fail_after(count: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Interrupt the rename after `count` others. Return a function that tells whether it was never reached."""
    left = [count]
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    return lambda: left[0] >= 0


def test_a_file_holds_tensors_of_any_dtype_each_aligned(tmp_path: Path) -> None:
    dtypes = (torch.uint8, torch.bool, torch.int8, torch.float8_e4m3fn, torch.float16, torch.int16, torch.float64)
    given = {f"{i}": torch.ones(3, dtype=dtype) for i, dtype in enumerate(dtypes)} | {"scalar": torch.tensor(2.5)}
    path = tmp_path / WEIGHTS
    tensor_file.write_safetensors(path, (tensor_file.Stored.of(name, t) for name, t in given.items()))
    loaded = load_file(path)
    assert loaded.keys() == given.keys()
    for name, tensor in given.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name].double(), tensor.double())
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert all(header[name]["data_offsets"][0] % tensor.element_size() == 0 for name, tensor in given.items())


def test_a_full_disk_leaves_the_older_model(saved: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved.save(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensor_file.Stored, "write", full)
    with pytest.raises(RunStopped, match="No space left"):
        Model().save(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
