"""`loss: reward` as a whole run: transformers and PEFT score with its files, and it is resumed and divided."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from surogate import run
from surogate_core.errors import ConfigError
from surogate_loss_preference import reference
from surogate_verify.verification import Extent, verify

from .planted import write_random_model
from .product import Workplace

PROMPT, CHOSEN, REJECTED = "to be", "or not", "that is"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and with a file of one pair, many times: every step reports its scores."""
    place = tmp_path_factory.mktemp("reward")
    write_random_model(place / "model", "llama", layers=2, hidden_size=512)  # ranks divide matrices of 512
    row = json.dumps({"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED})
    (place / "pairs.jsonl").write_text(f"{row}\n" * 40)
    return place


def keys_of(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    dataset = {"path": str(folder / "pairs.jsonl"), "type": "preference", "text_as": "text", "prompt_field": "prompt"}
    config = {
        "model": str(folder / "model"),
        "model_dtype": "fp32",
        "loss": "reward",
        "datasets": [dataset],
        "sequence_len": 64,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "verify_outputs": False,
        "output_dir": str(folder / name),
        **keys,
    }
    return {key: value for key, value in config.items() if value is not None}


def train(folder: Path, name: str, **keys: Any) -> tuple[Path, list[dict[str, Any]]]:
    """Return the output of a run, and its steps."""
    out = folder / name
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(keys_of(folder, name, **keys)))
    run.train(run.load(folder / f"{name}.yaml"))
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return out, [record for record in records if record["log"] == "step"]


def test_verify_compares_scores_the_loss_and_gradients_with_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all weights on the run's pairs, and of an adapter on random ones. Wrong scores are found."""
    config = {**keys_of(folder, "verified"), "reward_center": 0.1}
    path = folder / "verified.yaml"
    for changes, extent in (({}, Extent()), ({"lora": True}, Extent(rows=1, length=32, random_tokens=True))):
        path.write_text(yaml.safe_dump({**config, **changes}))
        result = verify(path, extent=extent, notice=lambda line: None)
        assert result.passed, result.first_wrong
        names = [row.name for row in result.verdict.rows]
        assert {"embedding", "block 0", "block 1", "logits", "loss"} < set(names) and not result.verdict.not_compared
        assert any("score" in name for name in names)
    right = reference.document_scores
    monkeypatch.setattr(
        reference, "document_scores", lambda *ins, **attrs: (1.01 * right(*ins, **attrs)[0], right(*ins, **attrs)[1])
    )
    wrong = verify(path, extent=Extent(rows=1, length=32), notice=lambda line: None).first_wrong
    assert wrong is not None and wrong.name == "logits" and wrong.error == pytest.approx(0.01, rel=1e-3)


@pytest.mark.slow
def test_verify_passes_with_the_instructions_of_another_processor(folder: Path) -> None:
    """Sums in another order round otherwise on both sides, and bounds must not depend on it."""
    place = Workplace(folder, keys_of(folder, "elsewhere"))
    done = place.surogate("verify", place.write(), "--rows", "1", "--length", "32", ATEN_CPU_CAPABILITY="default")
    assert done.returncode == 0 and "\npass:" in done.stdout, done.stdout + done.stderr


def scores(folder: Path, model: Any) -> dict[str, float]:
    """The scores that transformers computes of the pair, in a padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{PROMPT}{answer}" for answer in (CHOSEN, REJECTED)]
    encoded = [tokenizer(PROMPT).input_ids + tokenizer(answer).input_ids for answer in (CHOSEN, REJECTED)]
    assert [tokenizer.decode(ids) for ids in encoded] == texts
    documents = [[*ids, tokenizer.eos_token_id] for ids in encoded]
    longest = max(map(len, documents))
    padding = model.config.pad_token_id
    batch = torch.tensor([[*ids, *[padding] * (longest - len(ids))] for ids in documents])
    with torch.no_grad():
        chosen, rejected = model(batch, attention_mask=(batch != padding).long()).logits[:, 0].tolist()
    return {"rewards/chosen": chosen, "rewards/rejected": rejected}


def test_a_trained_model_is_one_of_transformers_with_equal_scores_and_trains_further(folder: Path) -> None:
    out, steps = train(folder, "full")
    margins = [step["metrics"]["margin"] for step in steps]
    assert margins[1] > margins[0]
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"] and config["num_labels"] == 1
    model, report = AutoModelForSequenceClassification.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and model.num_labels == 1
    _, further = train(folder, "further", model=str(out), max_steps=1)
    found = scores(out, model)
    assert {name: further[0]["metrics"][name] for name in found} == pytest.approx(found, rel=1e-5, abs=1e-6)
    with pytest.raises(ConfigError, match=r"architectures \['LlamaForSequenceClassification'\]"):
        train(folder, "as-lm", model=str(out), loss="orpo")


def test_an_adapter_holds_the_head_and_peft_loads_it(folder: Path) -> None:
    peft = pytest.importorskip("peft", reason="PEFT loads the adapter: pip install peft")
    lora = {"lora": True, "lora_rank": 4, "learning_rate": 1e-2}
    out, _ = train(folder, "lora", **lora)
    config = json.loads((out / "adapter/adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    base = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    model = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    model.config.pad_token_id = AutoTokenizer.from_pretrained(out / "adapter").pad_token_id
    found = scores(out / "adapter", model)
    _, further = train(folder, "lora-further", adapter_path=str(out / "adapter"), max_steps=1, **lora)
    assert {name: further[0]["metrics"][name] for name in found} == pytest.approx(found, rel=1e-5, abs=1e-6)
    refused = {
        "adapter dora does not save": {"adapter": "dora", "lora": None, "lora_rank": None},
        "merge_adapter: true: is not": {"merge_adapter": True},
    }
    for problem, keys in refused.items():
        with pytest.raises(ConfigError, match=problem):
            train(folder, "refused", **{**lora, **keys})
    with pytest.raises(ConfigError, match=r"task_type is SEQ_CLS: only language models are merged"):
        run.merge(out / "adapter", folder / "merged")


@pytest.mark.slow
def test_resumed_recomputed_quantized_and_divided_runs_are_the_same(folder: Path) -> None:
    out, steps = train(folder, "straight", save_steps=1)
    weights = load_file(out / "model.safetensors")
    for name, keys in {
        "resumed": {"resume_from_checkpoint": str(out / "step_00000001")},
        "recomputed": {"recompute": "true", "check_finite": True},
    }.items():
        other, found = train(folder, name, **keys)
        assert found[-1]["loss"] == steps[-1]["loss"], name
        assert all(torch.equal(x, weights[n]) for n, x in load_file(other / "model.safetensors").items()), name
    _, divided = train(folder, "divided", ranks_per_gpu=2, gradient_accumulation_steps=1, zero_level=3)
    assert [r["loss"] for r in divided] == pytest.approx([r["loss"] for r in steps], rel=1e-5)
    quantized, found = train(folder, "quantized", lora=True, lora_rank=4, qlora_fp8=True, learning_rate=1e-2)
    assert found[1]["loss"] < found[0]["loss"]
    assert "base_model.model.score.weight" in load_file(quantized / "adapter/adapter_model.safetensors")


def test_margins_are_read_from_data_that_have_them_and_asked_for_elsewhere_are_refused(folder: Path) -> None:
    pair = {"prompt": PROMPT, "chosen": CHOSEN, "rejected": REJECTED}
    (folder / "margins.jsonl").write_text("".join(json.dumps({**pair, "margin": m}) + "\n" for m in (3, 3)))
    entry = {"path": str(folder / "margins.jsonl"), "type": "preference_with_margin", "text_as": "text"}
    entry |= {"prompt_field": "prompt"}
    _, with_margins = train(folder, "margins", datasets=[entry], reward_margins=True, max_steps=1)
    _, without = train(folder, "no-margins", datasets=[entry], max_steps=1)
    assert with_margins[0]["metrics"] == without[0]["metrics"]
    assert with_margins[0]["loss"] == pytest.approx(math.log1p(math.exp(3 - without[0]["metrics"]["margin"])), rel=1e-5)
    with pytest.raises(
        ConfigError, match=r"type: preference has no margin .* fit loss: reward: preference_with_margin"
    ):
        train(folder, "asked", reward_margins=True)
