"""RoPE with positions in time, height and width, as vision models have it: for text it is plain RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2_5_VLTextConfig, Qwen2VLTextConfig, Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from surogate_core.errors import ConfigError
from surogate_models.reference import angles
from surogate_models.rope import read_partial_rope, read_rope

from .harness import PlannedModel, packed_documents, relative_error, tiny_config

CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding),
    "qwen2_5_vl": (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding),
    "qwen3_vl": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
SECTIONS = {"mrope_section": [16, 24, 24]}
MAPPINGS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    # families that have it, mapping
    "default": (("qwen2_vl", "qwen2_5_vl"), {"rope_type": "default", **SECTIONS}),
    "type mrope": (("qwen2_vl", "qwen2_5_vl"), {"type": "mrope", **SECTIONS}),
    "interleaved": (
        ("qwen3_vl",),
        {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    ),
    "yarn": (("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), YARN | SECTIONS),
    "yarn, interleaved": (("qwen3_vl",), YARN | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}),
}


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for case, (families, _) in MAPPINGS.items() for family in families]
)
def test_text_has_the_cosines_and_sines_of_transformers_to_the_bit(family: str, case: str, key: str) -> None:
    """The positions of text are the same in time, height and width."""
    mapping = dict(MAPPINGS[case][1])
    config = {"hidden_size": 256, "num_attention_heads": 2, "max_position_embeddings": 2048, "rope_theta": 1e6}
    rope = read_rope(config | {key: mapping}, 128)
    made, embedding = CLASSES[family]
    theirs = embedding(made(**config, head_dim=128, **{key: dict(mapping)}))
    positions = torch.tensor([0, 1, 2, 77, 511, 512, 2047, 100_000])
    cos, sin = theirs(torch.zeros(1), positions.expand(3, 1, -1))
    expected = tuple(x[0, :, None, :64] for x in (cos, sin))
    ours = angles(positions, 128, rope.theta, rope.scaling, rope.attention_factor)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize("rope_type", ["default", "yarn"])
def test_a_text_model_of_qwen3_vl_computes_what_qwen3_does_with_its_sections(rope_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    rope |= {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 4.0} if rope_type == "yarn" else {}
    config = tiny_config(rope_parameters=rope | {"mrope_interleaved": True})
    torch.manual_seed(0)
    names = ("architectures", "model_type")
    text = Qwen3VLTextConfig(**{key: value for key, value in config.items() if key not in names})
    text._attn_implementation = "eager"
    hf = Qwen3VLTextModel(text).float().eval()
    head = torch.randn(config["vocab_size"], config["hidden_size"])
    rows = packed_documents()
    model = PlannedModel(config, batch_size=3, seq_len=24)
    model.load({f"model.{name}": tensor for name, tensor in hf.state_dict().items()} | {"lm_head.weight": head})
    logits = model.logits(rows)
    with torch.no_grad():
        states = [hf(input_ids=torch.tensor(document)[None]).last_hidden_state[0] for row in rows for document in row]
    starts = [24 * i + sum(map(len, row[:n])) for i, row in enumerate(rows) for n in range(len(row))]
    for start, state in zip(starts, states, strict=True):
        assert relative_error(logits[start : start + len(state)], state @ head.T) <= 1e-5


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"mrope_section": [16, 24, 24]}, r"mrope_section: must be three whole numbers with the sum 32 \(got \[16"),
        ({"mrope_section": [32]}, "mrope_section: must be three"),
        ({"mrope_section": 32}, r"mrope_section: must be three whole numbers with the sum 32 \(got 32\)"),
        ({"mrope_section": [8.0, 12, 12]}, "mrope_section: must be three"),
        ({"mrope_section": [True, 15, 16]}, "mrope_section: must be three"),
        ({"mrope_section": [-8, 20, 20]}, "mrope_section: must be three"),
        ({"mrope_section": "8,12,12"}, "mrope_section: must be three"),
        ({"mrope_section": [8, 12, 12], "mrope_interleaved": 1}, r"mrope_interleaved: must be true or false \(got 1\)"),
        ({"type": "mrope"}, r"mrope_section: must be three whole numbers with the sum 32 \(got None\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_sections_that_do_not_divide_a_head_are_refused_by_key(key: str, mapping: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}.{message}"):
        read_rope({"rope_theta": 1e4, "max_position_embeddings": 4096, key: mapping}, 64)


def test_sections_of_partial_rope_divide_the_elements_that_are_rotated() -> None:
    config = {"rope_theta": 1e4, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25}
    sections = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    plain = read_partial_rope(config, 256)
    assert read_partial_rope(config | {"rope_parameters": sections}, 256) == plain
    with pytest.raises(ConfigError, match=r"^rope_parameters\.mrope_section: must be three"):
        read_partial_rope(config | {"rope_parameters": {"mrope_section": [24, 20, 20]}}, 256)
