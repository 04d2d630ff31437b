"""Samples of a run on a GPU: the text of its own weights, and no other bit of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import Workplace, make_workplace, records, write_model
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

PROMPTS = ["ROMEO: but soft", "JULIET:", "What is in a name? That which we call"]
KEYS: dict[str, Any] = {
    "model_dtype": "bf16",
    "deterministic": "true",
    "max_steps": 6,
    "save_steps": 3,
    "eval_steps": 0,
}
SAMPLES: dict[str, Any] = {"sample_prompts": PROMPTS, "sample_every": 3, "sample_max_new_tokens": 8}
LORA: dict[str, Any] = {"from_scratch": False, "lora": True, "lora_rank": 4}


def trained(place: Workplace, name: str, **keys: Any) -> Path:
    output = place.root / name
    done = place.surogate("train", place.write(output_dir=str(output), **keys), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def written(place: Workplace, folder: Path, **environ: str) -> list[str]:
    """Return what `surogate generate` writes after all prompts at once, as samples are."""
    asked = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    size = ("--max-new-tokens", "8", "--batch-size", "4")
    done = place.surogate("generate", folder, *asked, *size, "--raw", "--json", timeout=300, **environ)
    assert done.returncode == 0, done.stderr
    return [answer["text"] for answer in json.loads(done.stdout)["answers"]]


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("where", ["device", "host"])
def test_a_run_with_samples_has_the_bits_of_one_without_and_its_weights_write_them(
    tmp_path: Path, where: str, lora: bool
) -> None:
    place = make_workplace(tmp_path, **KEYS)
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    keys = LORA | {"model": str(trained(place, "base", max_steps=2))} if lora else {}
    plain = trained(place, "plain", **keys)
    sampled = trained(place, "sampled", **keys, **SAMPLES, sample_on=where)
    losses = [[(r["step"], r["loss"], r["norm"]) for r in records(folder, "step")] for folder in (plain, sampled)]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    files = sorted(path.relative_to(plain) for path in plain.rglob("*.safetensors"))
    assert files and files == sorted(path.relative_to(sampled) for path in sampled.rglob("*.safetensors"))
    for file in files:
        one, other = load_file(plain / file), load_file(sampled / file)
        assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one), file
    found = records(sampled, "sample")
    assert [(r["step"], r["index"]) for r in found] == [(step, i) for step in (0, 3, 6) for i in range(len(PROMPTS))]
    assert all(r["tokens"] == 8 or r["finish"] == "stop" for r in found)
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if where == "host" else {}
    for step, folder in ((3, sampled / "step_00000003"), (6, sampled / ("adapter" if lora else ""))):
        assert [r["text"] for r in found if r["step"] == step] == written(place, folder, **hidden)
