"""`surogate verify` of a run that stores its base in a weight format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import Workplace
from end_to_end.test_verify import base_of, printed, verified
from fp8_checkpoints import write_fp8
from safetensors.torch import load_file, save_file

from surogate import run
from surogate_core.errors import ConfigError
from surogate_verify import transformers_side

LORA = ("lora=true", "lora_rank=4")


@pytest.fixture
def based(here: Workplace) -> Workplace:
    return base_of(here, num_hidden_layers=2)


@pytest.mark.parametrize("key", ["qlora_bnb", "qlora_fp8", "qlora_fp4"])
def test_the_adapter_s_gradients_are_those_of_peft_on_the_same_base(based: Workplace, key: str) -> None:
    result = verified(based, *LORA, "model_dtype=fp32", f"{key}=true")
    assert result.passed, result.first_wrong
    assert {row.name: row.error for row in result.verdict.rows if row.error > 1e-5} == {}
    assert [matrix.layer for matrix in result.stored] == [0] * 7 + [1] * 7
    low, high = {"qlora_bnb": (19, 22), "qlora_fp8": (30, 33), "qlora_fp4": (19.5, 22.5)}[key]
    assert all(low < matrix.snr < high for matrix in result.stored), result.stored
    assert all(0 < matrix.worst < 0.3 for matrix in result.stored)


def test_the_report_is_printed_and_in_the_json(based: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(based, *LORA, "qlora_bnb=true") == 0
    out = capsys.readouterr().out
    assert "stored weights" in out and "lowest SNR" in out and " dB " in out, out
    assert printed(based, *LORA, "qlora_bnb=true", as_json=True) == 0
    stored = json.loads(capsys.readouterr().out)["stored"]
    assert len(stored) == 14 and stored[0]["name"] == "model.layers.0.self_attn.q_proj.weight"


def test_a_stored_embedding_is_outside_the_layers(based: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(based, *LORA, "qlora_fp8=true", "quantize_embedding=true") == 0
    _, _, table = capsys.readouterr().out.partition("stored weights")
    assert "outside the layers" in table and "layer -1" not in table


def test_a_base_that_is_stored_quantized_has_nothing_to_be_compared_with(based: Workplace) -> None:
    folder = based.root / "nf4"
    run.quantize(str(based.config["model"]), folder, ["qlora_bnb=true"])
    with pytest.raises(ConfigError, match="surogate verify compares with the weights before that: use the original"):
        verified(based, *LORA, "qlora_bnb=true", f"model={folder}")


@pytest.mark.parametrize("block", [[48, 40], None])
def test_a_base_in_fp8_is_compared_as_the_run_reads_it(based: Workplace, block: list[int] | None) -> None:
    """With all weights, an adapter, a base that the run stores in another format, and the first layers alone."""
    folder = write_fp8(Path(str(based.config["model"])), based.root / "fp8", block)
    for overrides, extent in (
        (["lora=false", "recipe=bf16"], {}),
        ([*LORA, "model_dtype=fp32"], {"layers": 1}),
        ([*LORA, "qlora_bnb=true"], {}),
    ):
        result = verified(based, *overrides, f"model={folder}", **extent)
        assert result.passed, (overrides, result.first_wrong)
        assert bool(result.stored) == ("qlora_bnb=true" in overrides)


def test_a_step_has_the_loss_and_the_gradients_of_bitsandbytes_and_peft(
    based: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers loads what `surogate quantize` wrote, and bitsandbytes multiplies in fp32."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    from transformers import AutoModelForCausalLM

    weights = Path(based.config["model"]) / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(weights).items()}, weights, metadata={"format": "pt"})
    folder = based.root / "nf4"
    run.quantize(str(based.config["model"]), folder, ["qlora_bnb=true", "model_dtype=fp32"])
    loaded: list[str] = []

    def load(subject: object, scratch: object, dtype: object) -> object:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        for module in model.modules():
            if type(module).__name__ == "Linear4bit":
                module.compute_dtype = torch.float32
                loaded.append(type(module).__name__)
        return model.train()

    monkeypatch.setattr(transformers_side, "_load", load)

    def in_training(model: Any, *given: object) -> None:
        model.eval = model.train  # bitsandbytes multiplies in bf16 on a CPU in the mode for evaluation

    monkeypatch.setattr(transformers_side, "_convert", in_training)
    result = verified(based, *LORA, "model_dtype=fp32", "qlora_bnb=true")
    assert len(loaded) % 14 == 0 < len(loaded)
    assert {row.kind for row in result.verdict.rows} >= {"output", "loss", "gradient"}
    assert {row.name: row.error for row in result.verdict.rows if row.error > 1e-5} == {}
