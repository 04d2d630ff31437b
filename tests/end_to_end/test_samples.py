"""Samples during training: the text of the run's own weights, which changes no bit of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import EXAMPLES, Workplace, invoke, losses, records
from end_to_end.several import several
from end_to_end.several import trained as trained_by_processes

from surogate import run
from surogate.config.load import LoadedConfig
from surogate_core.api import SampleReport
from surogate_core.errors import ConfigError

PROMPTS = ["ROMEO: but soft", "JULIET:"]
SHORT: dict[str, Any] = {"max_steps": 4, "eval_steps": 0, "warmup_steps": 0, "save_steps": 0, "learning_rate": 2e-2}
SAMPLES: dict[str, Any] = {
    "sample_prompts": PROMPTS,
    "sample_every": 2,
    "sample_max_new_tokens": 6,
    "sample_temperature": 1,
    "sample_batch_size": 1,  # `surogate generate` draws as they do, then
}


def trained(place: Workplace, **keys: Any) -> Path:
    run.train(run.load(place.write(**{**SHORT, **keys})), notice=lambda line: None)
    return Path(keys.get("output_dir", place.out))


def written(folder: Path, prompt: str) -> str:
    """Return what `surogate generate` writes with the model in a folder."""
    drawn = ("--temperature", "1", "--seed", "1234")  # as train_seed is
    done = invoke("generate", folder, "--prompt", prompt, "--max-new-tokens", "6", "--raw", "--json", *drawn)
    assert done.returncode == 0, done.stderr
    return str(json.loads(done.stdout)["answers"][0]["text"])


def weights(folder: Path) -> bytes:
    return next(folder.glob("*.safetensors")).read_bytes()


def test_samples_are_of_the_weights_between_steps_and_change_no_bit(here: Workplace) -> None:
    plain = trained(here, output_dir=str(here.root / "plain"), save_steps=2)
    sampled = trained(here, output_dir=str(here.root / "sampled"), save_steps=2, **SAMPLES)
    assert losses(plain) == losses(sampled) and weights(plain) == weights(sampled)
    found = records(sampled, "sample")
    assert [(r["step"], r["index"], r["prompt"]) for r in found] == [
        (step, index, prompt) for step in (0, 2, 4) for index, prompt in enumerate(PROMPTS)
    ]
    assert [r["text"] for r in found[2:4]] == [written(sampled / "step_00000002", prompt) for prompt in PROMPTS]
    assert [r["text"] for r in found[4:6]] == [written(sampled, prompt) for prompt in PROMPTS]
    assert found[0]["text"] != found[4]["text"], "the run has learned"
    assert all(r["tokens"] == 6 or r["finish"] == "stop" for r in found)
    assert not [*sampled.glob(".saving*")], "its files are removed"


@pytest.mark.slow
def test_an_adapter_is_sampled_on_its_base(here: Workplace) -> None:
    base = trained(here, output_dir=str(here.root / "base"))
    keys = {"model": str(base), "from_scratch": False, "lora": True, "lora_rank": 4, "save_steps": 2}
    plain = trained(here, output_dir=str(here.root / "plain"), **keys)
    sampled = trained(here, output_dir=str(here.root / "sampled"), **keys, **SAMPLES)
    assert losses(plain) == losses(sampled) and weights(plain / "adapter") == weights(sampled / "adapter")
    found = [r["text"] for r in records(sampled, "sample")]
    assert found[:2] == [written(base, prompt) for prompt in PROMPTS], "a new adapter changes nothing"
    assert found[2:4] == [written(sampled / "step_00000002", prompt) for prompt in PROMPTS]
    assert found[4:] == [written(sampled / "adapter", prompt) for prompt in PROMPTS]


@pytest.mark.slow
def test_a_resumed_run_repeats_no_sample_and_loses_none(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(here, output_dir=str(here.root / "whole"), **SAMPLES)
    keys = {"output_dir": str(here.root / "cut"), "save_steps": 1, **SAMPLES}

    class Killed(BaseException):
        pass

    def kill(report: object) -> None:
        if isinstance(report, SampleReport) and (report.step, report.index) == (2, 0):
            raise Killed

    loaded = run.load(here.write(**{**SHORT, **keys}))
    with pytest.raises(Killed):
        run.train(loaded, notice=lambda line: None, listen=kill)
    cut = trained(here, **keys, resume_from_checkpoint=True)

    def of(folder: Path) -> list[tuple[Any, ...]]:
        return [(r["step"], r["index"], r["text"]) for r in records(folder, "sample")]

    assert of(cut) == of(whole)
    again = records(cut, "sample")
    trained(here, **keys, resume_from_checkpoint=4)
    assert records(cut, "sample") == again, "the samples after the last step are not repeated"


@pytest.mark.slow
def test_a_listener_gets_samples_and_chats_are_asked_by_their_template(here: Workplace) -> None:
    shutil.copy(EXAMPLES / "tiny-qwen3/chat_template.jinja", here.root / "model")
    rows = [
        {"messages": [{"role": "user", "content": f"Who is {n}?"}, {"role": "assistant", "content": f"It is {n}."}]}
        for n in range(40)
    ]
    (here.root / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [{"path": str(here.root / "chats.jsonl"), "type": "conversation"}]
    said: list[SampleReport] = []

    def listen(report: object) -> None:
        if isinstance(report, SampleReport):
            said.append(report)

    def last(**keys: Any) -> str:
        said.clear()
        keys = {**SHORT, "datasets": data, "max_steps": 30, **SAMPLES, "sample_every": 0, **keys}
        keys |= {"sample_prompts": ["Who is 7?"], "sample_max_new_tokens": 12, "overwrite_output_dir": True}
        keys |= {"sample_temperature": 0}
        run.train(run.load(here.write(**keys)), notice=lambda line: None, listen=listen)
        assert [report.step for report in said] == [0, 30]
        return said[-1].text

    assert last().startswith("It is"), "a chat is answered"
    assert said[-1].finish == "stop", "at the token that ends trained turns"
    assert not last(sample_as="raw").startswith("It is")


def test_a_missing_file_of_prompts_is_told_before_data_is_read(here: Workplace) -> None:
    lines: list[str] = []
    config = here.write(**{**SHORT, **SAMPLES, "sample_prompts": "none.txt"})
    with pytest.raises(ConfigError, match=r"sample_prompts: none\.txt: cannot be read"):
        run.train(run.load(config), notice=lines.append)
    assert not any("tokens in" in line for line in lines)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sample_prompts": [" ".join(["word"] * 90)]}, ("prompt 1: has", "longer than a row (sequence_len: 64)")),
        ({"sample_max_new_tokens": 64}, ("prompt 1: has", "sample_max_new_tokens: 64", "Shorten it")),
        ({"sample_prompts": "none.txt"}, ("sample_prompts: none.txt: cannot be read",)),
        ({"sample_prompts": [""]}, ("sample_prompts: must be a list of texts",)),
        ({"sample_prompts": {"a": 1}}, ("sample_prompts: must be a list of texts",)),
        ({"sample_as": "chat"}, ("has no chat template",)),
        (
            {"sample_temperature": 0, "sample_top_p": 0.5},
            ("sample_top_p", "has no effect while sample_temperature is 0"),
        ),
        ({"device_memory_limit": "600MiB"}, ("needs 1.7 GiB", "remove sample_prompts")),
        ({"loss": "reward"}, ("trains a head that writes no text",)),
    ],
)
def test_samples_that_cannot_be_written_are_refused_before_the_first_step(
    here: Workplace, keys: dict[str, Any], words: tuple[str, ...]
) -> None:
    done = invoke("train", here.write(**{**SHORT, **SAMPLES, **keys}))
    message = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2 and all(word in message for word in words), done.stderr
    assert not (here.out / "metrics.jsonl").exists()


@pytest.mark.slow
def test_several_ranks_write_the_samples_of_one(here: Workplace) -> None:
    """Threads that divide all weights, and processes that divide states; where each has a part, samples are refused."""
    keys = {"per_device_train_batch_size": 2, "max_steps": 2, "sample_every": 1, "save_steps": 0}
    of = {name: value for name, value in SAMPLES.items() if name not in keys}

    def texts(folder: Path) -> list[tuple[int, int, str]]:
        return [(r["step"], r["index"], r["text"]) for r in records(folder, "sample")]

    threads = trained(here, ranks_per_gpu=2, zero_level=3, output_dir=str(here.root / "threads"), **of, **keys)
    assert len(texts(threads)) == 6
    assert texts(threads)[4:] == [(2, index, written(threads, prompt)) for index, prompt in enumerate(PROMPTS)]
    trained_by_processes(here, **SHORT | of | keys)
    assert texts(here.out)[4:] == [(2, index, written(here.out, prompt)) for index, prompt in enumerate(PROMPTS)]
    with several(here, **SHORT | of | keys, zero_level=3, output_dir=str(here.root / "parts")) as run:
        assert run.statuses() == [2, 2]
        assert any("each process of this run has only a part of the weights" in error for error in run.errors())


@pytest.mark.slow
def test_a_missing_library_and_a_dead_process_are_told(here: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate.generation import sampler

    base = trained(here, output_dir=str(here.root / "base"))
    keys = {"model": str(base), "from_scratch": False, "lora": True, **SAMPLES}
    hidden = here.root / "hidden"
    (hidden / "transformers").mkdir(parents=True)
    (hidden / "transformers/__init__.py").write_text("raise ImportError('no transformers here')")
    monkeypatch.setenv("PYTHONPATH", str(hidden))
    with pytest.raises(ConfigError, match=r"sample_prompts: .*no transformers here.*Mend that, or remove"):
        trained(here, **keys)
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.setattr(sampler.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"ended with exit code 1.*Mend that, or remove sample_prompts"):
        trained(here, **keys)
    assert not (here.out / "metrics.jsonl").exists()


def test_the_plan_has_the_copy_where_it_is(here: Workplace) -> None:
    def planned(device: str | None, **keys: Any) -> tuple[int, int, int]:
        loaded: LoadedConfig = run.load(here.write(**{**SHORT, **keys}))
        report = run.plan(loaded, device).report
        held = report.device_bytes.get("samples", 0), report.host_bytes.get("samples", 0), report.pinned_bytes
        assert report.device_bytes["total"] == sum(v for k, v in report.device_bytes.items() if k != "total")
        return held

    assert planned("h200") == planned(None) == (0, 0, 0)
    on_device, beside, pinned = planned("h200", **SAMPLES)
    assert on_device > 0 == pinned and beside == 1 << 30
    none, on_host, pinned = planned("h200", **SAMPLES, sample_on="host")
    assert none == pinned == 0 and on_host > beside, "the model, and the process"
    assert planned(None, **SAMPLES) == planned(None, **SAMPLES, sample_on="host") == (on_host, 0, 0)


def test_the_plan_has_what_each_sample_of_a_batch_takes(here: Workplace) -> None:
    def planned(prompts: Any, size: int) -> int:
        keys = {**SHORT, **SAMPLES, "sample_prompts": prompts, "sample_batch_size": size}
        return run.plan(run.load(here.write(**keys)), "h200").report.device_bytes["samples"]

    one, two, three = (planned(["a"] * 3, size) for size in (1, 2, 3))
    assert three - two == two - one > 0, "the cache of a row, and its logits"
    assert planned(["a"] * 3, 8) == three and planned("file.txt", 8) == one + 7 * (two - one)


def test_nobody_waits_for_samples_of_a_run_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate.generation import sampler
    from surogate.generation.sample_process import SampleTask

    program = tmp_path / "program"
    program.write_text('#!/bin/sh\nread task; echo true; read folder; echo \'["a", 1, "stop", 0.5]\'; exec sleep 600\n')
    program.chmod(0o755)
    monkeypatch.setattr(sampler.sys, "executable", str(program))
    task = SampleTask(
        base=None, loaded_by="", device="cpu", dtype="", prompts=[[1], [2]], stops=[], max_new_tokens=1, temperature=0,
        top_p=1, seed=0, batch=1,
    )  # fmt: skip
    asked = []
    waiting = sampler.Sampler(task, "", cut=lambda: asked.append(0) is None and len(asked) > 2)
    try:
        waiting.ready()
        assert waiting.sample(tmp_path) is None, "one of two is there"
        assert len(asked) == 3 and waiting._process.poll() is not None
    finally:
        waiting.close()
