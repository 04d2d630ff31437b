"""`loss: distillation` as a whole run: the teacher is read once, and a resumed run has the bits of one that was not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surogate import run
from surogate_core.errors import ConfigError
from surogate_loss_distillation import teacher

from .planted import write_random_model
from .product import documents

LENGTH = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A student, a teacher of another size, and documents, one of them longer than a row."""
    place = tmp_path_factory.mktemp("distillation")
    write_random_model(place / "model", "qwen3", layers=2)
    write_random_model(place / "teacher", "llama", seed=1, layers=2, hidden_size=24)
    weights = load_file(place / "teacher/model.safetensors")
    weights["lm_head.weight"] *= 8  # so that it is sure of something
    save_file(weights, place / "teacher/model.safetensors", {"format": "pt"})
    texts = documents(24)
    rows = [{"text": text} for text in [*texts, " ".join(texts[:8])]]
    (place / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        yield place


def config(folder: Path, name: str, **keys: Any) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "model_dtype": "fp32",
        "loss": "distillation",
        "distillation_teacher": str(folder / "teacher"),
        "distillation_top_k": 6,
        "distillation_temperature": 2.0,
        "datasets": [{"path": str(folder / "data.jsonl"), "type": "text"}],
        "validation_split_ratio": 0.1,
        "sequence_len": LENGTH,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 3e-3,
        "verify_outputs": False,
        "output_dir": str(folder / name),
        **keys,
    }


def train(folder: Path, name: str, **keys: Any) -> list[dict[str, Any]]:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config(folder, name, **keys)))
    run.train(run.load(folder / f"{name}.yaml"))
    records = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["log"] in ("step", "eval")]


def tokenized(folder: Path, **keys: Any) -> Any:
    return run.tokenize(run.load(config(folder, "none", **keys)), notice=lambda line: None)


@pytest.fixture(scope="module")
def straight(folder: Path) -> list[dict[str, Any]]:
    return train(folder, "straight")


def test_a_run_reports_both_parts_of_its_loss(straight: list[dict[str, Any]]) -> None:
    step, last = straight[0], straight[-1]
    assert last["log"] == "eval" and not last["in_nats"]
    assert set(last["metrics"]) == set(step["metrics"]) == {"cross_entropy", "divergence"}
    figures = step["metrics"]
    assert step["loss"] == pytest.approx(0.5 * figures["cross_entropy"] + 0.5 * 4 * figures["divergence"], rel=1e-5)


@pytest.mark.slow
def test_a_run_that_resumes_with_recomputation_and_offloading_reads_no_teacher_and_has_the_same_bits(
    folder: Path, straight: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "Teacher", None)  # what is cached is not computed again
    keys = {"recompute": "true", "offload_weights": 1, "offload_optimizer": True}
    again = train(folder, "resumed", resume_from_checkpoint=str(folder / "straight/step_00000002"), **keys)
    assert [r["loss"] for r in again] == [r["loss"] for r in straight[-len(again) :]]
    saved = [load_file(folder / name / "model.safetensors") for name in ("straight", "resumed")]
    assert all(torch.equal(weight, saved[1][name]) for name, weight in saved[0].items())


def test_only_a_run_with_the_same_teacher_is_resumed(
    folder: Path, straight: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    saved, moved = folder / "straight/step_00000002", shutil.copytree(folder / "teacher", folder / "moved")
    keys = {"distillation_teacher": str(moved), "resume_from_checkpoint": str(saved)}
    again = train(folder, "moved_teacher", distillation_run_teacher="never", **keys)
    assert again[-1]["loss"] == straight[-1]["loss"]
    assert "not bit-identical" not in "".join(capsys.readouterr())
    weights = load_file(moved / "model.safetensors")
    weights["lm_head.weight"] *= -1
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"was saved with distillation_teacher: files of hash \w+ \(this run: files of"
    ):
        train(folder, "other_teacher", **keys)


def test_what_is_cached_is_what_the_teacher_says_of_each_document_alone(folder: Path) -> None:
    (dataset,) = tokenized(folder).train.corpus.datasets
    model = AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    bounds = list(zip(dataset.offsets[:-1], dataset.offsets[1:], strict=True))
    assert max(b - a for a, b in bounds) > 2 * LENGTH  # it is read in pieces
    for a, b in bounds:
        for start in range(a, b, LENGTH):
            stop = min(start + LENGTH, b)
            ids = torch.tensor(dataset.tokens[start:stop].astype(np.int64))
            with torch.no_grad():
                q = (model(ids[None]).logits[0].double() / 2).softmax(-1)
            rows = slice(start + 1, min(stop + 1, b))
            top = torch.from_numpy(dataset.columns["teacher_ids"][rows].astype(np.int64))
            q = q[: len(top)]
            others = q.scatter(1, top, 0).sum(-1, keepdim=True)
            expected = torch.cat((q.gather(1, top), others), 1).log()
            found = torch.from_numpy(dataset.columns["teacher_log_probs"][rows].copy())
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4)
            torch.testing.assert_close(q.gather(1, top), q.topk(6, -1).values, rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", ["ids.bin", "log_probs.bin", "pieces.bin", "manifest.json"])
def test_a_flipped_bit_of_the_cache_is_named_and_the_teacher_is_run_anew(
    folder: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keys = {"max_steps": 1, "save_steps": 0}
    before = train(folder, "whole", overwrite_output_dir=True, **keys)
    assert "is damaged" not in capsys.readouterr().out
    (path,) = tmp_path.glob(f"surogate/tokens/*.distillation/*/{name}")
    whole = path.read_bytes()
    at = next(index for index in range(len(whole) // 2, len(whole)) if whole[index])
    path.write_bytes(bytes([*whole[:at], whole[at] ^ 1, *whole[at + 1 :]]))
    again = train(folder, "whole", overwrite_output_dir=True, **keys)
    assert [record["loss"] for record in again] == [record["loss"] for record in before]
    assert "the cache of the teacher is damaged: " in capsys.readouterr().out and path.read_bytes() == whole


def test_a_cache_of_an_earlier_version_is_read_without_hashes(folder: Path, straight: list[dict[str, Any]]) -> None:
    assert cache_of(folder).open() is not None and cache_of(folder).checks()
    manifest = cache_of(folder).directory / "manifest.json"
    now = manifest.read_text()
    manifest.write_text(json.dumps(cache_of(folder).identity))
    assert cache_of(folder).open() is not None and cache_of(folder).checks() == {}
    manifest.write_text(now)


def cache_of(folder: Path) -> teacher.Cache:
    """The cache of the run `straight`."""
    for path in (folder / "cache").glob("surogate/tokens/*.distillation/*/manifest.json"):
        content = json.loads(path.read_text())
        identity = {key: value for key, value in content.items() if key not in ("files", "xxh3_128")}
        if (identity["top_k"], identity["temperature"]) == (6, 2.0):
            tokens = (path.parent / "log_probs.bin").stat().st_size // 28
            return teacher.Cache(path.parent, tokens, 6, identity["vocabulary"], identity)
    raise LookupError("no such cache")


def test_a_process_reads_the_teacher_once_and_says_so(folder: Path) -> None:
    other, said = shutil.copytree(folder / "teacher", folder / "read"), list[str]()
    first = teacher.content_hash(other, said.append)
    assert said == [
        f"reading {other / name} for the hash of the teacher" for name in ("config.json", "model.safetensors")
    ]
    assert teacher.content_hash(other, said.append) == first and len(said) == 2
    (other / "config.json").write_text((other / "config.json").read_text() + " ")
    assert teacher.content_hash(other, said.append) != first and len(said) == 4


def test_rows_hold_the_pieces_that_the_teacher_read(folder: Path) -> None:
    for ratio in (0.1, 0.4):
        data = tokenized(folder, validation_split_ratio=ratio)
        for rows in (data.train, data.validation):
            bounds = rows.corpus.bounds
            first = bounds[np.searchsorted(bounds, rows.start, side="right") - 1]
            assert not ((rows.start - first) % LENGTH).any()


def test_an_interrupted_teacher_goes_on_and_a_damaged_cache_is_made_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"distillation_top_k": 3}
    monkeypatch.setattr(teacher, "BATCH_TOKENS", 64)
    monkeypatch.setattr(teacher, "SAVE_SECONDS", 0.0)
    plain, seen = teacher._run, list[int]()

    def stop(of: Any, batch: Any, *rest: Any) -> None:
        seen.append(len(batch))
        if len(seen) == 3:
            raise KeyboardInterrupt
        plain(of, batch, *rest)

    monkeypatch.setattr(teacher, "_run", stop)
    with pytest.raises(KeyboardInterrupt):
        tokenized(folder, **keys)
    (dataset,) = tokenized(folder, **keys).train.corpus.datasets  # the third again, and the rest
    path = Path(dataset.columns["teacher_ids"].filename)
    columns = {name: numbers.copy() for name, numbers in dataset.columns.items()}
    assert len(seen) == 1 + len(teacher._batches_of(dataset.offsets, dataset.trained, LENGTH))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    monkeypatch.setattr(teacher, "_run", plain)
    (dataset,) = tokenized(folder, **keys).train.corpus.datasets
    assert all(np.array_equal(numbers, dataset.columns[name]) for name, numbers in columns.items())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"distillation_teacher": ""}, "loss: distillation needs a teacher. Set distillation_teacher to"),
        ({"distillation_teacher": "nowhere"}, "distillation_teacher: 'nowhere' is neither a directory"),
        ({"truncation_strategy": "left"}, "datasets.0: truncation_strategy: left cuts off .* loss: distillation reads"),
        ({"distillation_top_k": 5000}, "distillation_top_k: 5000 is more than the .* tokens of teacher"),
        (
            {"distillation_top_k": 7, "distillation_run_teacher": "never"},
            "distillation_teacher: .*: nothing is cached of these tokens, .* distillation_run_teacher is never",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(folder: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenized(folder, **keys)


def test_a_teacher_with_another_tokenizer_is_refused(folder: Path) -> None:
    other = shutil.copytree(folder / "teacher", folder / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in sorted(vocabulary) if len(token) > 2][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="other has another tokenizer than the model: 2 tokens have other ids"):
        tokenized(folder, distillation_teacher=str(other))
