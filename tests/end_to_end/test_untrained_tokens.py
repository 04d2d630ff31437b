"""Before the first step, a run says which tokens of its data no frozen row knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from surogate import run
from surogate.checkpoints.untrained_tokens import untrained_rows

if TYPE_CHECKING:
    from end_to_end.product import Workplace

MOOD = "<mood>"


def test_a_new_token_in_the_padded_vocabulary_is_said_with_the_remedy(here: Workplace) -> None:
    """Rows are those of a trained model but for the new one, which is zero."""
    folder = here.root / "model"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([MOOD])
    tokenizer.save(str(folder / "tokenizer.json"))
    new = tokenizer.token_to_id(MOOD)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": new + 64}))
    once = {"validation_split_ratio": 0, "max_steps": 1, "warmup_steps": 0, "eval_steps": 0}
    run.train(run.load(here.write(**once)), notice=lambda line: None)
    base = here.out.rename(here.root / "base")
    data = here.root / "mood.jsonl"
    data.write_text("".join(json.dumps({"text": f"{MOOD} what say you {n}"}) + "\n" for n in range(8)))
    entry = {"path": str(data), "type": "text"}
    given = {**once, "model": str(base), "from_scratch": False, "datasets": [entry], "lora": True}

    def said(**keys: Any) -> list[str]:
        lines: list[str] = []
        shutil.rmtree(here.out, ignore_errors=True)
        run.train(run.load(here.write(**{**given, **keys})), notice=lines.append)
        return [line for line in lines if MOOD in line]

    assert said() == []  # as random as every other row: nothing tells it apart
    weights = load_file(base / "model.safetensors")
    weights["model.embed_tokens.weight"][new] = 0
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    (line,) = said()
    assert "<mood> (8 times), and nothing seems to have trained its row of model.embed_tokens.weight" in line
    assert "Set lora_modules_to_save: [embed_tokens, lm_head]" in line
    assert said(lora_modules_to_save=["embed_tokens", "lm_head"]) == []
    assert said(lora=None) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_nothing_has_trained_are_found(tmp_path: Path, dtype: torch.dtype) -> None:
    """Zero, tiny, twice, and the mean of the others as transformers draws new rows; no row beside them."""
    rows = torch.randn(10_000, 32, generator=torch.Generator().manual_seed(0)) + 0.3
    rows[-1], rows[-2] = 0, rows[5] * 1e-4
    rows[-3] = rows[-4]
    rows[-5] = rows[:9_000].mean(0) + 3e-5 * rows[7]
    save_file({"e": rows.to(dtype)}, tmp_path / "model.safetensors")
    last = list(range(9_990, 10_000))
    assert untrained_rows(tmp_path, "e", [0, 5, *last]) == last[5:]
    assert untrained_rows(tmp_path, "e", [0, 5, 20_000]) == untrained_rows(tmp_path, "e", []) == []
