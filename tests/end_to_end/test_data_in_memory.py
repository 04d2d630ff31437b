"""Runs on data in memory: the bits of those on files, resumed to the bit, and refused with the row."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from end_to_end.product import EXAMPLES, Workplace, documents, environment, invoke, write_jsonl

import surogate

CONVERSATION = [{"role": "user", "content": "To be?"}, {"role": "assistant", "content": "Or not to be."}]


def rows(count: int = 300) -> Iterator[dict[str, Any]]:
    for text in documents(count):
        yield {"text": text}


def go(place: Workplace, name: str = "out", **keys: Any) -> surogate.Result:
    config = {key: value for key, value in place.config.items() if key != "datasets"}
    config |= {"output_dir": str(place.root / name), "max_steps": 4, "eval_strategy": "no"}
    return surogate.train(config | keys, notice=lambda line: None)


def with_template(place: Workplace) -> Workplace:
    shutil.copy(EXAMPLES / "tiny-qwen3/chat_template.jinja", place.root / "model")
    return place


def weights(result: surogate.Result) -> bytes:
    return (result.output_dir / "model.safetensors").read_bytes()


def test_a_run_on_an_iterable_is_that_on_a_file_and_resumes_to_the_bit(here: Workplace) -> None:
    path = write_jsonl(here.root / "rows.jsonl", documents(300))
    of_file = go(here, "file", datasets=[{"path": str(path), "type": "text"}])
    cut = go(here, "stream", datasets=rows(), save_steps=2, max_steps=4)
    assert (cut.losses, weights(cut)) == (of_file.losses, weights(of_file))
    resumed: dict[str, Any] = {"resume_from_checkpoint": 2, "output_dir": str(cut.output_dir)}
    other = [*rows(299), {"text": "another row at the end"}]
    with pytest.raises(surogate.ConfigError, match="data"):
        go(here, datasets=other, save_steps=2, **resumed)
    again = go(here, datasets=rows(), save_steps=2, **resumed)
    assert (again.losses, weights(again)) == (of_file.losses, weights(of_file))
    # The command line resumes it too: the config of the run names the rows.
    done = invoke("train", cut.output_dir / "run.yaml", "--set", "resume_from_checkpoint=2")
    assert done.returncode == 0 and weights(cut) == weights(of_file), done.stderr


def test_sources_in_memory_have_types_weights_and_samples(here: Workplace) -> None:
    chats = [{"messages": CONVERSATION, "note": index} for index in range(40)]
    entries = [
        {"path": rows(), "type": "text", "samples": 50, "weight": 0.5},
        {"path": lambda: iter(chats), "type": "conversation"},
    ]
    said: list[str] = []
    found = surogate.tokenize(dict(with_template(here).config), datasets=entries, documents=True, notice=said.append)
    text, chat = found.datasets
    assert (text.documents, text.type, chat.documents, chat.type) == (50, "text", 40, "conversation")
    assert found.rows["train"].tokens < text.tokens + chat.tokens and {*text.lengths} >= {"median", "longest"}
    assert any(line.startswith("datasets.1: 40 rows of function, in ") for line in said)
    pieces = next(one for one in found.documents if one.type == "conversation").pieces
    assert [piece.text for piece in pieces if piece.trained] == ["Or not to be.<|endoftext|>"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [{"messages": CONVERSATION}] * 3 + [{"messages": "To be?"}],
            r"datasets\.0 row 3: column 'messages' holds text",
        ),
        ([{"text": "a"}] * 3 + [{"prompt": "a"}], r"datasets\.0 row 3: has the columns prompt, and the first row text"),
        ([{"text": "a"}] * 3 + [{"text": 7}], r"datasets\.0 row 3: .*text"),
    ],
    ids=["messages", "columns", "number"],
)
def test_a_row_that_cannot_be_trained_is_named(here: Workplace, given: Any, message: str) -> None:
    with pytest.raises(surogate.ConfigError, match=message):
        go(with_template(here), datasets=given)


SCRIPT = """
import json, os, signal, sys
import surogate
sys.path.insert(0, sys.argv[2])
from end_to_end.product import documents

def rows():
    yield from ({"text": text} for text in documents(300))

def kill(report):
    if os.environ.get("KILL") and report.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

result = surogate.train(json.loads(sys.argv[1]), datasets=rows(), callback=kill)
print(json.dumps(result.losses))
"""


@pytest.mark.slow
def test_a_run_over_an_iterable_is_killed_and_resumed_to_the_bit(workplace: Workplace) -> None:
    def script(name: str, kill: str, **keys: Any) -> subprocess.CompletedProcess[str]:
        config = {
            **workplace.config,
            "datasets": None,
            "output_dir": str(workplace.root / name),
            "save_steps": 2,
            **keys,
        }
        tests = os.path.dirname(os.path.dirname(__file__))
        given = [sys.executable, "-c", SCRIPT, json.dumps(config), tests]
        env = environment(workplace.root, KILL=kill)
        return subprocess.run(given, cwd=workplace.root, env=env, capture_output=True, text=True, check=False)

    assert script("killed", "1").returncode == -signal.SIGKILL
    resumed = script("killed", "", resume_from_checkpoint=True)
    straight = script("straight", "")
    assert resumed.returncode == straight.returncode == 0, resumed.stderr
    assert "resuming from" in resumed.stdout
    assert resumed.stdout.splitlines()[-1] == straight.stdout.splitlines()[-1]
    files = [(workplace.root / name / "model.safetensors").read_bytes() for name in ("killed", "straight")]
    assert files[0] == files[1]


@pytest.mark.slow
def test_an_early_stop_from_python_writes_outputs_that_load(here: Workplace) -> None:
    from transformers import AutoModelForCausalLM

    best = {"loss": float("inf"), "waited": 0}

    @surogate.every(1)
    def early_stopping(run: surogate.ActiveRun) -> None:
        loss = run.evaluate().loss
        best["waited"] = 0 if loss < best["loss"] else best["waited"] + 1
        best["loss"] = min(loss, best["loss"])
        run.log(held_out=loss)
        if best["waited"] or run.step == 3:
            run.stop(f"held out loss {loss:.2f}")

    config = {**here.config, "datasets": None}
    result = surogate.train(config, datasets=list(rows()), callback=early_stopping, notice=lambda line: None)
    assert result.steps <= 3 and result.stopped and result.stop_reason.startswith("callback early_stopping: held out")
    model = AutoModelForCausalLM.from_pretrained(result.output_dir)
    assert model.config.hidden_size == 64
