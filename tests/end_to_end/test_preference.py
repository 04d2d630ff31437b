"""`loss: dpo` as a whole run: resumed, on two ranks, and checked op by op."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from surogate import run
from surogate_core.errors import ConfigError
from surogate_profile.profiling import profile

from .planted import write_random_model

WORDS = ["to be", "or not", "that is", "the question", "whether", "nobler", "in the mind", "to suffer"]


PROMPT = {"prompt_field": "prompt"}
ELSEWHERE = {"recompute": "true", "offload_weights": 1, "offload_optimizer": True}
"""Keys that change where values are kept, and no bit of them."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("preference")
    write_random_model(place / "model", "qwen3", layers=2)
    rows = [{"prompt": WORDS[i % 8], "chosen": WORDS[(i + 1) % 8], "rejected": WORDS[(i + 3) % 8]} for i in range(40)]
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers = [{"prompt": WORDS[i % 8], "completion": WORDS[(i + i // 8) % 8], "label": i % 3 > 0} for i in range(48)]
    (place / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    return place


def train(folder: Path, name: str, **keys: Any) -> tuple[Path, list[dict[str, Any]]]:
    out = folder / name
    config = {
        "model": str(folder / "model"),
        "model_dtype": "fp32",
        "lora": True,
        "lora_rank": 4,
        "loss": "dpo",
        "datasets": [{"path": str(folder / "pairs.jsonl"), "type": "preference", "text_as": "text"} | PROMPT],
        "sequence_len": 64,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "verify_outputs": False,
        "output_dir": str(out),
        **keys,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))
    run.train(run.load(folder / f"{name}.yaml"))
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return out, [record for record in records if record["log"] in ("step", "eval")]


@pytest.fixture(scope="module")
def straight(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    return train(folder, "straight")


def adapter(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "adapter/adapter_model.safetensors")


def test_a_run_reports_pairs_and_rewards_of_steps_and_evaluations(straight: tuple[Path, list[dict[str, Any]]]) -> None:
    steps = [record for record in straight[1] if record["log"] == "step"]
    (evaluation,) = (record for record in straight[1] if record["log"] == "eval")
    assert steps[0]["loss"] == pytest.approx(0.6931472) and steps[0]["metrics"]["rewards/margins"] == 0
    assert all(record["groups"] > 1 for record in (*steps, evaluation)) and not evaluation["in_nats"]
    rewards = {"rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"}
    assert set(evaluation["metrics"]) == rewards | {"logps/chosen", "logps/rejected"}
    assert steps[-1]["loss"] < 0.69


@pytest.mark.slow
def test_a_resumed_run_and_one_checked_op_by_op_have_the_same_bits(
    folder: Path, straight: tuple[Path, list[dict[str, Any]]]
) -> None:
    out, records = straight
    saved = str(out / "step_00000002")
    for name, keys in {
        "resumed": {"resume_from_checkpoint": saved},
        "checked": {"check_finite": True},
        "recomputed": {"recompute": "true"},
    }.items():
        other, found = train(folder, name, **keys)
        assert [r["loss"] for r in found] == [r["loss"] for r in records[-len(found) :]], name
        assert all(torch.equal(x, adapter(out)[n]) for n, x in adapter(other).items()), name
    with pytest.raises(ConfigError, match=r"was saved with .*loss: dpo \(this run: .*orpo"):
        train(folder, "other", loss="orpo", resume_from_checkpoint=saved)


def test_a_cached_reference_is_computed_once_and_gives_the_losses_of_one_that_runs(
    folder: Path,
    straight: tuple[Path, list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    out, found = train(folder, "cached", reference="cached")
    lines = capsys.readouterr().out
    assert "reference: computing 72 documents, once" in lines and "reference: computing 8 documents" in lines
    assert found[0]["loss"] == pytest.approx(0.6931472) and len(found) == len(straight[1])
    for ours, theirs in zip(found, straight[1], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-4, abs=1e-5)
    _, resumed = train(folder, "cached-on", reference="cached", resume_from_checkpoint=str(out / "step_00000002"))
    assert "reference: computing" not in capsys.readouterr().out
    assert [record["loss"] for record in resumed] == [record["loss"] for record in found[-len(resumed) :]]
    train(folder, "cached-beta", reference="cached", dpo_beta=0.2, learning_rate=1e-3)
    assert "reference: computing" not in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"was saved with .*reference: cached"):
        train(folder, "cached-not", resume_from_checkpoint=str(out / "step_00000002"))
    files = sorted(
        tmp_path.glob("surogate/tokens/references/reference_log_prob.*"), key=lambda path: path.stat().st_size
    )
    assert [path.stat().st_size for path in files] == [16 + 8 * 4, 16 + 72 * 4]
    content = bytearray(files[1].read_bytes())
    content[99] ^= 1
    files[1].write_bytes(content)
    _, again = train(folder, "cached-anew", reference="cached")
    lines = capsys.readouterr().out
    assert f"{files[1]} is damaged" in lines and "reference: computing 72" in lines and "computing 8" not in lines
    assert [record["loss"] for record in again] == [record["loss"] for record in found]
    files[1].write_bytes(content)
    with pytest.raises(ConfigError, match=r"reference_log_prob.* is gone or damaged, and the model has been trained"):
        train(folder, "cached-lost", reference="cached", resume_from_checkpoint=str(out / "step_00000002"))


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """Another model, of the sizes of the one that is trained."""
    write_random_model(folder / "other", "qwen3", layers=2, seed=7)
    return folder / "other"


@pytest.mark.parametrize("lora", [True, False])
def test_another_model_is_the_reference_of_an_adapter_and_of_all_weights(folder: Path, other: Path, lora: bool) -> None:
    """Rewards are beta times the difference of the log-probabilities that both models report."""
    keys: dict[str, Any] = {"lora": lora, "learning_rate": 1e-3}
    name = f"referred-{lora}"
    out, found = train(folder, name, reference_model=str(other), **keys)
    _, theirs = train(
        folder, f"simpo-{lora}", loss="dpo", reference="frozen", lora=False, model=str(other), max_steps=1
    )
    ours, reference = found[0]["metrics"], theirs[0]["metrics"]
    for of in ("chosen", "rejected"):
        assert ours[f"rewards/{of}"] == pytest.approx(0.1 * (ours[f"logps/{of}"] - reference[f"logps/{of}"]), rel=1e-4)
    assert abs(ours["rewards/chosen"]) > 1e-3
    _, two = train(folder, f"{name}-ranks", reference_model=str(other), max_steps=1, ranks_per_gpu=2,
                   gradient_accumulation_steps=1, **keys)  # fmt: skip
    assert two[0]["metrics"] == pytest.approx(ours, rel=1e-5, abs=1e-6)
    saved = str(out / "step_00000002")
    _, resumed = train(folder, f"{name}-on", reference_model=str(other), resume_from_checkpoint=saved, **keys)
    assert [record["loss"] for record in resumed] == [record["loss"] for record in found[-len(resumed) :]]
    with pytest.raises(ConfigError, match=r"was saved with .*reference_model"):
        train(folder, f"{name}-self", reference_model=str(folder / "model"), resume_from_checkpoint=saved, **keys)


def test_a_reference_that_does_not_fit_is_refused(folder: Path, other: Path) -> None:
    write_random_model(folder / "larger", "qwen3", layers=3)
    with pytest.raises(ConfigError, match=r"reference_model: .*larger is qwen3 of other sizes than the qwen3"):
        train(folder, "larger-reference", reference_model=str(folder / "larger"))
    with pytest.raises(ConfigError, match=r"reference_model: .*neither a directory"):
        train(folder, "no-reference", reference_model="/nowhere/at/all")
    with pytest.raises(ConfigError, match="loss: orpo reads no reference"):
        train(folder, "unread-reference", loss="orpo", reference_model=str(other))
    with pytest.raises(ConfigError, match="reference: cached keeps numbers of the run's own model"):
        train(folder, "cached-reference", reference="cached", reference_model=str(other))


@pytest.mark.parametrize("loss", ["orpo", "kto", "next_token"])
def test_a_loss_whose_reference_cannot_be_kept_is_refused(folder: Path, loss: str) -> None:
    with pytest.raises(ConfigError, match=f"reference: cached: loss: {loss} reads no reference that can be kept"):
        train(folder, "cached-refused", reference="cached", loss=loss)


def test_a_plan_counts_a_frozen_reference_as_weights(folder: Path) -> None:
    """It is a copy of all of them; the states of the optimizer stay what they are."""
    keys = {"model": str(folder / "model"), "model_dtype": "fp32", "loss": "dpo", "sequence_len": 64, "lora": False}
    dataset = {"path": str(folder / "pairs.jsonl"), "type": "preference", "text_as": "text"} | PROMPT
    reports = []
    for changes in ({"loss": "simpo"}, {"reference": "frozen"}):
        (folder / "planned.yaml").write_text(yaml.safe_dump({**keys, "datasets": [dataset], **changes}))
        reports.append(run.plan(run.load(folder / "planned.yaml"), "h200").report.device_bytes)
    alone, frozen = reports
    assert frozen["weights"] == 2 * alone["weights"] and frozen["optimizer"] == alone["optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"dpo_label_smoothing": 0.2},
        {"dpo_loss": "hinge"},
        {"dpo_loss": "ipo", "lora": False, "reference": "frozen"},
        {"loss": "orpo", "lora": False},
        {"loss": "simpo"},
    ],
    ids=["smoothed", "hinge", "ipo", "orpo", "simpo"],
)
def test_bits_are_those_of_a_run_that_resumes_with_recomputation_and_offloading(
    folder: Path, keys: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    keys |= {"max_steps": 2, "save_steps": 1, "learning_rate": 1e-3}
    out, records = train(folder, name, **keys)
    saved = str(out / "step_00000001")
    other, found = train(folder, f"{name}-resumed", resume_from_checkpoint=saved, **ELSEWHERE, **keys)
    assert [(r["loss"], r["metrics"]) for r in found] == [(r["loss"], r["metrics"]) for r in records[-len(found) :]]
    (weights,) = (path.relative_to(out) for path in (*out.glob("*.safetensors"), *out.glob("adapter/*.safetensors")))
    resumed = load_file(other / weights)
    assert all(torch.equal(weight, resumed[n]) for n, weight in load_file(out / weights).items())


@pytest.mark.slow
def test_all_weights_train_against_a_cached_reference_on_two_ranks_as_on_one(folder: Path) -> None:
    keys = {"lora": False, "reference": "cached", "learning_rate": 1e-3}
    _, one = train(folder, "cached-full", **keys)
    assert one[0]["loss"] == pytest.approx(0.6931472) and one[-2]["loss"] < 0.69
    _, two = train(folder, "cached-full-ranks", ranks_per_gpu=2, gradient_accumulation_steps=1, zero_level=3, **keys)
    for ours, theirs in zip(two, one, strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3, abs=1e-3)


@pytest.mark.slow
def test_all_weights_train_against_a_frozen_copy_resumed_and_on_two_ranks(folder: Path) -> None:
    keys = {"lora": False, "reference": "frozen", "learning_rate": 1e-3}
    out, one = train(folder, "full", **keys)
    assert one[0]["loss"] == pytest.approx(0.6931472) and one[-2]["loss"] < 0.69
    _, resumed = train(folder, "full-resumed", resume_from_checkpoint=str(out / "step_00000002"), **keys)
    assert [record["loss"] for record in resumed] == [record["loss"] for record in one[-len(resumed) :]]
    _, two = train(folder, "full-ranks", ranks_per_gpu=2, gradient_accumulation_steps=1, zero_level=3, **keys)
    for ours, theirs in zip(two, one, strict=True):
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3, abs=1e-3)
    wrong = folder / "wrong-model.yaml"
    wrong.write_text((folder / "full.yaml").read_text().replace("reference: frozen", "reference: Qwen/Qwen3-8B"))
    with pytest.raises(ConfigError, match=r"reference: .*without_adapter.*frozen"):
        run.load(wrong)


@pytest.mark.slow
def test_two_ranks_train_on_the_pairs_of_one(folder: Path, straight: tuple[Path, list[dict[str, Any]]]) -> None:
    _, found = train(folder, "ranks", ranks_per_gpu=2, gradient_accumulation_steps=1, zero_level=3)
    for ours, theirs in zip(found, straight[1], strict=True):
        assert ours["groups"] == theirs["groups"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3, abs=1e-4)


def test_a_profile_and_the_plan_of_an_evaluation_count_the_prepass_of_kto(folder: Path) -> None:
    path = folder / "profile.yaml"
    answers = [{"path": str(folder / "answers.jsonl"), "type": "labelled", "text_as": "text"}]
    keys = {"model_dtype": "fp32", "lora": True, "loss": "kto", "sequence_len": 32}
    keys |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    path.write_text(yaml.safe_dump({"model": str(folder / "model"), "datasets": answers, **keys}))
    evaluation = run.plan(run.open_run(run.load(path)), "cpu").eval_seconds(1)
    for random in (False, True):
        found = profile(path, steps=1, use_random_tokens=random)
        (before,) = (group for group in found.by_program() if group.ops[0].program.startswith("evaluate"))
        assert {op.calls for op in before.ops} == {2}, "each of two micro-batches"
        if not random:
            assert found.total.planned_seconds == pytest.approx(found.planned_seconds)
            assert before.planned_seconds == pytest.approx(evaluation)


@pytest.mark.slow
def test_kl_of_kto_is_of_the_whole_step_over_all_ranks(folder: Path) -> None:
    keys = {
        "loss": "kto",
        "datasets": [{"path": str(folder / "answers.jsonl"), "type": "labelled", "text_as": "text"}],
        "sequence_len": 32,
        "kto_beta": 0.5,
        "validation_split_ratio": 0.25,
    }
    out, one = train(folder, "kto", gradient_accumulation_steps=4, **keys)
    assert one[0]["metrics"]["kl"] == one[0]["metrics"]["log_ratio"] == 0 and one[0]["loss"] == pytest.approx(0.5)
    kl = [record["metrics"]["kl"] for record in one[1:]]
    assert max(kl) > 0.05 and one[-1]["log"] == "eval"
    _, two = train(folder, "kto-ranks", ranks_per_gpu=2, gradient_accumulation_steps=2, **keys)
    for ours, theirs in zip(two, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["metrics"] == pytest.approx(theirs["metrics"], rel=1e-3, abs=1e-3)
    saved = str(out / "step_00000002")
    keys |= ELSEWHERE
    _, resumed = train(folder, "kto-resumed", resume_from_checkpoint=saved, gradient_accumulation_steps=4, **keys)
    assert [(r["loss"], r["metrics"]) for r in resumed] == [(r["loss"], r["metrics"]) for r in one[-len(resumed) :]]
    with pytest.raises(ConfigError, match=r"datasets: loss: kto also reads each document of a row .* no row has two"):
        train(folder, "kto-alone", sample_packing=False, **keys)


def test_the_best_evaluation_may_be_that_of_the_greatest_accuracy_of_rewards(folder: Path) -> None:
    keys = {"metric_for_best_model": "eval_rewards/accuracies", "load_best_model_at_end": True, "max_steps": 6}
    out, found = train(folder, "best", eval_steps=1, validation_split_ratio=0.3, save_steps=0, **keys)
    evals = [record for record in found if record["log"] == "eval"]
    accuracies = [record["metrics"]["rewards/accuracies"] for record in evals]
    best = accuracies.index(max(accuracies)) + 1  # the first of equal ones
    assert len(set(accuracies)) > 1 and evals[-1]["best_step"] == best
    saved = out / f"step_{best:08d}" / "adapter_model.safetensors"
    assert (out / "adapter/adapter_model.safetensors").read_bytes() == saved.read_bytes()
