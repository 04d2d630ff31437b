"""The outputs of a run are loaded by transformers. One that does not load is named and kept."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from end_to_end.product import write_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from surogate.outputs import check as output_check
from surogate.outputs.check import device_for
from surogate.outputs.check_process import check_loads, check_model
from surogate_core.api import CAUSAL_LM
from surogate_core.errors import RunStopped

WEIGHTS = "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(params=[True, False], ids=["loaded", "without data"])
def saved(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a tiny model that transformers has saved; `without data`: as if it did not fit into memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setattr(output_check, "available_memory_bytes", lambda: 2**33 if request.param else 1)
    model = write_model(tmp_path / "model")
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)
    return model


def check(folder: Path, base: Path | None = None) -> None:
    check_loads(folder, "transformers", lambda path: check_model(path, CAUSAL_LM, base, device_for(path)))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def refusal(folder: Path) -> str:
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunStopped) as caught:
        check(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "nothing is deleted"
    text = str(caught.value)
    assert str(folder) in text and "transformers" in text and "Nothing was deleted" in text
    return text


def test_a_model_is_loaded_with_its_data_if_they_fit(saved: Path, request: pytest.FixtureRequest) -> None:
    assert device_for(saved) == (None if "loaded" in request.node.callspec.id else "meta")


def test_a_complete_model_loads_and_nothing_is_printed(saved: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check(saved)
    assert capfd.readouterr() == ("", "")


def test_a_missing_weight_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.pop(NORM))
    assert f"missing keys: {NORM}" in refusal(saved)


def test_an_unexpected_weight_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update(extra=torch.ones(2)))
    assert "unexpected keys: extra" in refusal(saved)


def test_a_weight_of_another_shape_is_named(saved: Path) -> None:
    change(saved, lambda tensors: tensors.update({NORM: torch.ones(3)}))
    assert NORM in refusal(saved)


def test_a_truncated_file_is_detected(saved: Path) -> None:
    os.truncate(saved / WEIGHTS, 5000)
    assert "safetensors" in refusal(saved).lower() or "header" in refusal(saved).lower()


def test_a_tokenizer_larger_than_the_model_is_detected(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))
    change(saved, lambda t: t.update({k: v[:100].clone() for k, v in t.items() if "embed" in k or "lm_head" in k}))
    assert "the tokenizer has" in refusal(saved)


def test_a_tokenizer_as_large_as_the_base_models_is_accepted(saved: Path, tmp_path: Path) -> None:
    (saved / "added_tokens.json").write_text(json.dumps({f"<added {n}>": 9000 + n for n in range(3000)}))
    assert "the tokenizer has" in refusal(saved)
    base = tmp_path / "base"
    base.mkdir()
    for path in saved.iterdir():
        if "token" in path.name or path.name == "config.json":
            (base / path.name).write_bytes(path.read_bytes())
    check(saved, base)
    (base / "added_tokens.json").unlink()
    with pytest.raises(RunStopped, match="the tokenizer has"):
        check(saved, base)
