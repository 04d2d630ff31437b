"""Commands on damaged files, each in a process that is forked from one that has imported everything.

    nice python tests/fuzzing/campaign.py 1-20000 LOG
    python tests/fuzzing/campaign.py 5,17,100-126 LOG

runs the cases of these seeds, one at a time, and appends a line of JSON to LOG for each that is wrong and, every EVERY
cases, one with the counts. A case is decided by its seed: what is damaged, how, and which command
reads it. It may end with 0, or with 2 or 3 and one message. A traceback, a signal, more than SECONDS, or a file that a
canary writes is wrong. A process has BYTES of memory besides what it shares with the one that it is forked from.
"""

from __future__ import annotations

import collections
import gc
import importlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import yaml
from end_to_end.product import Workplace, environment, make_workplace
from fuzzing.mutate import LONGEST_MESSAGE, of_bytes, of_file, of_json
from fuzzing.test_data import ROWS, TEMPLATE, as_file

from surogate.checkpoints.folder_lock import LOCK
from surogate.checkpoints.manifest import MANIFEST, hash_file
from surogate_core.plugins.discovery import load_registry

BYTES = 2 << 30
SECONDS = 60.0
EVERY = 100

IMPORTED = (
    *("torch", "transformers", "peft", "tokenizers", "safetensors.torch", "pyarrow.parquet", "matplotlib.pyplot"),
    *("transformers.models.qwen3.modeling_qwen3", "surogate.cli.train", "surogate.training.trainer"),
    *("surogate.checkpoints.hf", "surogate.checkpoints.model_ranges", "surogate.checkpoints.stored_base"),
    *("surogate.cli.tokenize", "surogate.cli.plan", "surogate_watch.command", "surogate_core.runtime.team"),
)

CANARY = "open({path!r}, 'w').close()\nSUROGATE_API = {{}}\n"


@dataclass(frozen=True)
class Outcome:
    """The end of a case. wrong: what is not allowed, "" if nothing is."""

    seed: int
    kind: str
    words: list[str]
    code: int
    seconds: float
    wrong: str = ""


class Campaign:
    """A folder with a trained model, its checkpoint and an adapter, and the cases on damaged copies of it."""

    def __init__(self, folder: Path) -> None:
        for name in IMPORTED:
            importlib.import_module(name)
        load_registry()
        gc.freeze()  # a collection in a fork would copy all pages
        self._folder = folder
        self._place = make_workplace(folder / "whole", warmup_steps=0, eval_steps=0, max_steps=1)
        (self._place.root / "model/chat_template.jinja").write_text(TEMPLATE)
        adapter = {"lora": True, "from_scratch": False, "model": str(self._place.out), "output_dir": "adapted"}
        for changes in ({"save_steps": 1}, adapter):
            code, said, _ = self._forked(self._place.root, ["train", str(self._place.write(**changes))])
            assert code == 0, said

    def case(self, seed: int) -> Outcome:
        """Run the case of a seed."""
        root = self._folder / f"case-{seed}"
        shutil.copytree(self._place.root, root, symlinks=True)
        try:
            choice, kind = random.Random(seed), list(KINDS)[seed % len(KINDS)]
            config = json.loads(json.dumps(self._place.config).replace(str(self._place.root), str(root)))
            here = Workplace(root, config)
            canary = root / "EXECUTED"
            (root / "evil.py").write_text(CANARY.format(path=str(canary)))
            words = [str(word) for word in KINDS[kind](here, choice)]
            code, said, seconds = self._forked(root, words)
            executed = "a file that nobody has named was imported. " if canary.exists() else ""
            return Outcome(seed, kind, words, code, seconds, executed + _wrong(code, said))
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def _forked(self, root: Path, words: list[str]) -> tuple[int, str, float]:
        """Run a command in a new process. Return its exit code, negative for a signal, what it printed, and seconds."""
        begin = time.monotonic()
        with tempfile.TemporaryFile() as file:
            child = os.fork()
            if not child:
                _become(root, words, file.fileno())
            ended = os.pidfd_open(child)
            if not select.select([ended], [], [], SECONDS)[0]:
                os.kill(child, signal.SIGKILL)
            os.close(ended)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            file.seek(0)
            return code, file.read().decode("utf-8", "replace"), time.monotonic() - begin


def _become(root: Path, words: list[str], output: int) -> None:
    """Be the program `surogate` with these words. Never returns."""
    code = 1
    try:
        os.setsid()
        for number in (1, 2):
            os.dup2(output, number)
        os.chdir(root)
        os.environ.clear()
        os.environ.update(environment(root, CUDA_VISIBLE_DEVICES="", PWD=str(root), TOKENIZERS_PARALLELISM="false"))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, used + BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from surogate.cli.app import main

        sys.argv = ["surogate", *words]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1 if end.code else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wrong(code: int, said: str) -> str:
    tail = said[-3000:]
    if code == -signal.SIGKILL:
        return f"no end within {SECONDS:.0f} s, or killed: {tail}"
    if code < 0 or "Traceback" in said:
        return f"exit code {code}: {tail}"
    if code not in (0, 2, 3):
        return f"exit code {code}: {tail}"
    if code and "error: " not in said:
        return f"exit code {code} without a message: {tail}"
    return f"a message of {len(said):,} characters" if len(said) > 2 * LONGEST_MESSAGE else ""


# --------------------------------------------------------------------------------------------------------------- cases

Words = list[Any]


def _damage(path: Path, choice: random.Random) -> None:
    """Damage a file; rarely, put something else in its place."""
    kind = choice.random()
    if kind < 0.02:
        path.unlink()
    elif kind < 0.03:
        path.unlink()
        os.mkfifo(path)
    elif kind < 0.04:
        path.unlink()
        path.mkdir()
    elif kind < 0.06 and path.suffix in (".json", ".jsonl"):
        path.write_bytes(choice.choice((b"[", b'{"a":')) * 100_000)
    else:
        path.write_bytes(of_file(path, choice))


def _one_of(folder: Path, choice: random.Random, pattern: str = "*") -> Path:
    return choice.choice(sorted(path for path in folder.glob(pattern) if path.is_file()))


def _data(here: Workplace, choice: random.Random) -> Words:
    type_, form = choice.choice(list(ROWS)), choice.choice(("jsonl", "json", "csv", "parquet"))
    path = here.root / f"data.{form}"
    path.write_bytes(as_file(of_json(ROWS[type_], choice), form))
    if choice.random() < 0.4:
        path.write_bytes(of_bytes(path.read_bytes(), choice))
    keys = {"datasets": [{"path": str(path), "type": choice.choice((type_, "auto"))}]}
    if choice.random() < 0.3:
        keys["bad_rows"] = "skip"  # type: ignore[assignment]
    return ["tokenize", here.write(**keys)]


def _model(here: Workplace, choice: random.Random) -> Words:
    folder = here.root / "model" if choice.random() < 0.6 else here.out
    _damage(_one_of(folder, choice, choice.choice(("*.json", "*.json", "*"))), choice)
    verb = choice.choice(("plan", "plan", "tokenize", "tokenize", "train"))
    from_scratch = folder != here.out
    return [verb, here.write(model=str(folder), from_scratch=from_scratch, output_dir=str(here.root / "x"))]


def _tokenizer(here: Workplace, choice: random.Random) -> Words:
    _damage(here.root / "model" / choice.choice(("tokenizer.json", "tokenizer_config.json")), choice)
    return ["tokenize", here.write(datasets=[{"path": str(here.root / "documents.jsonl"), "type": "text"}])]


def _checkpoint(here: Workplace, choice: random.Random) -> Words:
    folder = here.out / "step_00000001"
    name = choice.choice((MANIFEST, MANIFEST, "model.safetensors", "config.json", "training_state"))
    path = _one_of(folder / name, choice) if name == "training_state" else folder / name
    _damage(path, choice)
    if name != MANIFEST and path.is_file() and choice.random() < 0.6:
        content = json.loads((folder / MANIFEST).read_text())
        entry = {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
        content["files"][path.relative_to(folder).as_posix()] = entry
        (folder / MANIFEST).write_text(json.dumps(content))
    if choice.random() < 0.5:
        return ["export", folder, here.root / "exported"]
    return ["train", here.write(save_steps=1, resume_from_checkpoint=choice.choice((True, "last-good")))]


def _adapter(here: Workplace, choice: random.Random) -> Words:
    folder = here.root / "adapted/adapter"
    _damage(_one_of(folder, choice, choice.choice(("adapter*", "adapter_config.json"))), choice)
    if choice.random() < 0.7:
        return ["merge", folder, here.root / "merged", "--base", here.out]
    keys = {"lora": True, "from_scratch": False, "model": str(here.out), "adapter_path": str(folder)}
    return ["train", here.write(**keys, output_dir="further")]


def _found_run(here: Workplace, choice: random.Random) -> Words:
    path = here.root / "adapted/run.yaml"
    keys = yaml.safe_load(path.read_text())
    keys["plugins"] = choice.choice((["evil.py"], ["$PWD/evil.py"], "evil.py", [str(here.root / "evil.py")]))
    text = yaml.safe_dump(of_json(keys, choice) if choice.random() < 0.7 else keys).encode()
    path.write_bytes(of_bytes(text, choice) if choice.random() < 0.5 else text)
    return ["merge", here.root / "adapted/adapter", here.root / "merged"]


def _metrics(here: Workplace, choice: random.Random) -> Words:
    _damage(here.out / choice.choice(("metrics.jsonl", "metrics.jsonl", "run.yaml")), choice)
    if choice.random() < 0.5:
        return ["watch", here.root, choice.choice(("--once", "--json"))]
    return ["train", here.write(save_steps=1, max_steps=2, resume_from_checkpoint=True)]


def _lock(here: Workplace, choice: random.Random) -> Words:
    lock = here.out / LOCK
    lock.write_text(json.dumps({"pid": 1, "host": "far", "time": 0.0}))
    whole = json.loads(lock.read_text())
    _damage(lock, choice) if choice.random() < 0.5 else lock.write_text(json.dumps(of_json(whole, choice)))
    if choice.random() < 0.5:
        return ["watch", here.root, "--once"]
    return ["train", here.write(save_steps=1, resume_from_checkpoint=True)]


def _config(here: Workplace, choice: random.Random) -> Words:
    path = here.write()
    keys = of_json(dict(here.config), choice)
    text = (yaml.safe_dump(keys) if isinstance(keys, dict) else json.dumps(keys)).encode()
    path.write_bytes(of_bytes(text, choice) if choice.random() < 0.3 else text)
    return [choice.choice(("plan", "plan", "tokenize")), path]


KINDS: Mapping[str, Callable[[Workplace, random.Random], Words]] = {
    "data": _data,
    "model": _model,
    "config": _config,
    "tokenizer": _tokenizer,
    "checkpoint": _checkpoint,
    "adapter": _adapter,
    "found run": _found_run,
    "metrics": _metrics,
    "lock": _lock,
}
"""{what is damaged: damages it and returns the words of a command}. The seed modulo their number chooses."""


def seeds_of(text: str) -> list[int]:
    """Return the seeds that a text such as "5,17,100-126" names."""
    ends = [part.partition("-") for part in text.split(",") if part]
    return [seed for first, _, last in ends for seed in range(int(first), int(last or first) + 1)]


def main(seeds: list[int], log: Path) -> None:
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder, log.open("a", encoding="utf-8") as file:
        campaign, begin = Campaign(Path(folder)), time.monotonic()
        for done, seed in enumerate(seeds, start=1):
            outcome = campaign.case(seed)
            counts[f"{outcome.kind}: {outcome.code}"] += 1
            if outcome.wrong:
                file.write(json.dumps(vars(outcome)) + "\n")
            if done % EVERY == 0 or done == len(seeds):
                seconds = round(time.monotonic() - begin)
                summary = {"first": seeds[0], "last": seed, "done": done, "seconds": seconds, "counts": counts}
                file.write(json.dumps(summary) + "\n")
            file.flush()


if __name__ == "__main__":
    main(seeds_of(sys.argv[1]), Path(sys.argv[2]))
