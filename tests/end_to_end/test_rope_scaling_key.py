"""The key `rope_scaling`: accepted values, its effect on a model's config.json, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import Workplace, make_workplace
from transformers import AutoConfig

from surogate import run
from surogate.config.rope_scaling import longer_scaling, parse_rope_scaling, with_rope_scaling
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import cpu
from surogate_verify.verification import verify

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LEGAL: list[tuple[Any, dict[str, Any] | None]] = [
    ("auto", None),
    ("Linear", {"rope_type": "linear"}),
    ('{"type": "yarn", "factor": "4"}', {"rope_type": "yarn", "factor": 4.0}),
    ({"rope_type": "dynamic", "factor": 2, "truncate": None}, {"rope_type": "dynamic", "factor": 2.0}),
    ({"type": "llama3", "factor": 8, **LLAMA3}, {"rope_type": "llama3", "factor": 8.0, **LLAMA3}),
]
ILLEGAL: list[tuple[Any, str]] = [
    (7, "a type or a mapping"),
    ([], "a type or a mapping"),
    ("{", "is not JSON"),
    ({}, "one rope_type"),
    ({"factor": 2}, "one rope_type"),
    ({"rope_type": "yarn", "type": "linear"}, "one rope_type"),
    ({"rope_type": [1]}, "one rope_type"),
    ({"rope_type": "yarn", "facter": 2}, "did you mean factor"),
    ({"rope_type": "yarn", 5: 2}, "5 is not a setting"),
    ({"rope_type": "yarn", "factor": True}, "factor must be a number"),
    ({"rope_type": "yarn", "factor": "nan"}, "factor must be a number"),
    ({"rope_type": "yarn", "factor": 10**400}, "factor must be a number"),
    ({"rope_type": "yarn", "factor": {}}, "factor must be a number"),
    ({"rope_type": "yarn", "original_max_position_embeddings": 1.5}, "whole number"),
    ({"rope_type": "yarn", "truncate": 1}, "truncate must be true or false"),
]


@pytest.mark.parametrize(("value", "parsed"), LEGAL)
def test_a_type_name_a_mapping_and_json_are_accepted(value: Any, parsed: dict[str, Any] | None) -> None:
    assert parse_rope_scaling(value) == parsed


@pytest.mark.parametrize(("value", "printed"), ILLEGAL)
def test_any_other_value_is_refused(value: Any, printed: str) -> None:
    with pytest.raises(ValueError, match=printed):
        parse_rope_scaling(value)


@pytest.mark.parametrize(
    "own",
    [
        {"rope_theta": 7.0},
        {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 7.0}, "rope_scaling": None},
        {"rope_scaling": {"type": "linear", "factor": 3.0, "rope_theta": 7.0}, "rope_parameters": {"rope_theta": 5.0}},
    ],
)
def test_the_base_frequency_is_kept_and_transformers_reads_the_written_config(own: dict[str, Any]) -> None:
    config = {"max_position_embeddings": 64, "original_max_position_embeddings": 8, **own}
    made = with_rope_scaling(config, {"rope_type": "yarn", "original_max_position_embeddings": 32}, 100)
    theirs = AutoConfig.for_model("llama", **json.loads(json.dumps(made))).rope_parameters
    wanted = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 7.0}
    assert theirs == theirs | wanted
    assert made["original_max_position_embeddings"] == 32 and with_rope_scaling(config, None, 100) == config


OF_LLAMA = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}
OF_QWEN = {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32, "beta_fast": 16.0}
BY_LAYER = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("own", "made"),
    [
        ({}, {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}),
        ({"rope_scaling": OF_QWEN}, OF_QWEN | {"factor": 5.0}),
        (
            {"rope_parameters": OF_LLAMA | {"original_max_position_embeddings": 16}},
            {"rope_type": "yarn", "factor": 9.0},
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1.5}}, {"rope_type": "linear", "factor": 3.0}),
        ({"rope_parameters": BY_LAYER}, {"rope_type": "linear", "factor": 3.0}),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, None),
        ({"max_position_embeddings": None}, None),
    ],
)
def test_a_scaling_for_longer_rows_begins_at_what_the_model_was_trained_with(
    own: dict[str, Any], made: dict[str, Any] | None
) -> None:
    found = longer_scaling({"max_position_embeddings": 64, **own}, 144)
    if found is None or made is None:
        assert found is made is None
    else:
        assert found == found | {"rope_type" if key == "type" else key: value for key, value in made.items()}


def printed(workplace: Workplace, **changes: Any) -> str:
    with pytest.raises(ConfigError) as error:
        run.plan(run.load(workplace.write(**changes)), cpu())
    return str(error.value)


def test_incompatible_settings_are_refused_by_name(tmp_path: Path) -> None:
    workplace = make_workplace(tmp_path)
    assert "rope_scaling" in printed(workplace, rope_scaling="yarn") and "factor" in printed(
        workplace, rope_scaling="yarn"
    )
    assert "short_factor: must be a list of 8 numbers" in printed(workplace, rope_scaling="longrope")
    assert "linear, dynamic, yarn, llama3 or longrope" in printed(workplace, rope_scaling="ntk")
    assert "low_freq_factor" in printed(workplace, rope_scaling={"rope_type": "llama3", "factor": 8})
    assert "factor: must be at least 1" in printed(workplace, rope_scaling={"rope_type": "linear", "factor": 0.5})
    assert "rope_scaling: an adapter" in printed(
        workplace, rope_scaling={"rope_type": "yarn", "factor": 2}, lora=True, from_scratch=False
    )
    assert "sequence_len: 256" in printed(
        workplace, rope_scaling={"rope_type": "linear", "factor": 2}, sequence_len=256
    )


@pytest.mark.parametrize(
    "scaling",
    [
        pytest.param({"rope_type": "linear", "factor": 2.0}, marks=pytest.mark.slow, id="linear"),
        pytest.param({"rope_type": "yarn", "factor": 2.0}, id="yarn"),
        pytest.param({"rope_type": "llama3", "factor": 8.0, **LLAMA3}, marks=pytest.mark.slow, id="llama3"),
    ],
)
def test_a_run_trains_saves_and_verifies_with_the_given_scaling(here: Workplace, scaling: dict[str, Any]) -> None:
    length = 64 if scaling["rope_type"] == "llama3" else 128
    config = here.write(rope_scaling=scaling, sequence_len=length, max_steps=1, warmup_steps=0, eval_steps=0)
    run.train(run.load(config), notice=lambda line: None)
    written = json.loads((here.out / "config.json").read_text())["rope_parameters"]
    assert written == {**scaling, "rope_theta": 10000.0}
    saved = AutoConfig.from_pretrained(here.out).rope_parameters
    assert saved == saved | scaling | {"rope_theta": 10000.0}
    result = verify(config, notice=lambda line: None)
    assert result.verdict.passed, result.verdict.first_wrong


def test_verify_compares_with_the_files_of_the_model_and_not_with_what_the_run_made_of_them(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = here.write(rope_scaling=scaling, sequence_len=16, from_scratch=True)
    file = here.root / "model" / "config.json"
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "num_hidden_layers": 1}
    file.write_text(json.dumps(json.loads(file.read_text()) | theta))
    assert verify(config, notice=lambda line: None).passed

    def loses_the_base(config: dict[str, Any], scaling: Any, longest: int | None) -> dict[str, Any]:
        return {**config, "rope_parameters": None, "rope_theta": 10000.0, "rope_scaling": scaling}

    monkeypatch.setattr("surogate.runs.run.with_rope_scaling", loses_the_base)
    assert not verify(config, notice=lambda line: None).passed
