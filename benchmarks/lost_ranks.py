"""A rank that is killed, and one that stands still, in a run of a process for each GPU of this host.

    python benchmarks/lost_ranks.py --gpus 8 --out lost.jsonl
    python benchmarks/lost_ranks.py --gpus 2 --model examples/tiny-qwen3 --keep lost

Each case is `surogate train` with the variables of torchrun, from scratch with ZeRO 3, on the text of the examples.
First an undisturbed run. Then the last rank is killed (SIGKILL) or stopped (SIGSTOP) in a step after a checkpoint: the
others must end with exit code 3 and an error that names it. Then the run is resumed, and must end with the model of the
undisturbed one, byte by byte. A line is printed when a case is done, with the seconds from the start to the first step
that is reported, and from the signal to the end of the others. What is not as it must be is an error, and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "examples/tiny-qwen3"
STEPS, SAVED, SIGNALLED = 24, 8, 11
"""Steps of a run; a checkpoint after so many; the step after whose report the signal is sent."""
SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def main() -> None:
    arguments = parse(sys.argv[1:])
    failed = False
    with folder(arguments.keep) as work:
        for found in cases(arguments, work):
            failed |= "error" in found
            figures = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found.items() if key != "case")
            print(f"{found['case']:<14}{figures}", flush=True)
            if arguments.out:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")
    sys.exit(int(failed))


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=max(2, torch.cuda.device_count()))
    parser.add_argument("--model", type=Path, default=ROOT / "benchmarks/models/qwen3-0.6b", help="with a config.json")
    parser.add_argument("--stall", type=float, default=20.0, help="stall_seconds")
    parser.add_argument("--wait", type=float, default=150.0, help="seconds for the run of a case, at most")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--keep", type=Path, help="a folder that is left with the outputs; default: none")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


@contextmanager
def folder(kept: Path | None) -> Iterator[Path]:
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="surogate-lost-") as made:
        yield Path(made)


def cases(arguments: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    """Yield what came of each case. One that is not as it must be has an "error"."""
    model = work / "model"
    shutil.copytree(TOKENIZER, model, dirs_exist_ok=True)
    shutil.copy(arguments.model / "config.json", model)
    with Processes(arguments, work, "undisturbed") as run:
        whole = {"case": "undisturbed", "ranks": arguments.gpus, "first_step_seconds": run.wait_for_step(1)}
        yield whole | run.ended([0] * arguments.gpus)
        expected = run.model_hash()
    for name, number in SIGNALS.items():
        with Processes(arguments, work, name) as run:
            run.wait_for_step(SIGNALLED)
            sent = time.monotonic()
            run.send(number)
            found = run.ended([3] * (arguments.gpus - 1), "is gone" if name == "killed" else f"{arguments.gpus - 1}")
            found |= {"case": name, "ended_after_seconds": round(time.monotonic() - sent, 1)}
        if "error" not in found:
            with Processes(arguments, work, name, "resume_from_checkpoint=true") as run:
                found["resumed_at_step_after_seconds"] = run.wait_for_step(SAVED + 1)
                found |= run.ended([0] * arguments.gpus)
                if run.model_hash() != expected:
                    found |= {"error": "the resumed run ended with another model than the undisturbed one"}
        yield found


class Processes:
    """The processes of a run, one a GPU, whose output goes to files; a context, at whose end none is left."""

    def __init__(self, arguments: argparse.Namespace, work: Path, name: str, *settings: str) -> None:
        self._wait, self._out, self._began = arguments.wait, work / name, time.monotonic()
        self._texts = [work / f"{name}{'-resumed' * bool(settings)}-{rank}.txt" for rank in range(arguments.gpus)]
        config = work / f"{name}.yaml"
        config.write_text(json.dumps(self._keys(arguments, work)))
        words = [f"output_dir={self._out}", *arguments.set, *settings]
        command = [sys.executable, "-m", "surogate.cli", "train", str(config)]
        command += [word for setting in words for word in ("--set", setting)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes = [
            subprocess.Popen(
                command, stdout=text.open("w"), stderr=subprocess.STDOUT, env=environment(rank, port, len(self._texts))
            )
            for rank, text in enumerate(self._texts)
        ]

    def _keys(self, arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
        return {
            **{"model": str(work / "model"), "from_scratch": True, "model_dtype": "bf16", "zero_level": 3},
            "datasets": [{"path": str(ROOT / "examples/data/tinyshakespeare.txt"), "type": "text"}],
            **{"sequence_len": 256, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
            **{"max_steps": STEPS, "save_steps": SAVED, "eval_steps": 0, "validation_split_ratio": 0},
            **{"learning_rate": 1e-4, "logging_steps": 1, "verify_outputs": False, "deterministic": True},
            "save_in_background": False,  # so the signal finds it complete
            "stall_seconds": arguments.stall,
        }

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *given: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def wait_for_step(self, step: int) -> float:
        """Return the seconds from the start to the report of a step. Raises RuntimeError if it does not come."""
        while not re.search(rf"^step +{step}/", self._texts[0].read_text(), re.MULTILINE):
            time.sleep(0.01)
            if time.monotonic() > self._began + self._wait or any(p.poll() is not None for p in self._processes):
                raise RuntimeError(f"step {step} was not reported:\n{self._said()}")
        return round(time.monotonic() - self._began, 1)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the last rank, which is not waited for."""
        self._processes[-1].send_signal(number)

    def ended(self, statuses: Sequence[int], named: str = "") -> dict[str, Any]:
        """Wait for as many ranks, and return what they said. "error": they end otherwise, or no message has `named`."""
        found = []
        for process in self._processes[: len(statuses)]:
            try:
                found.append(process.wait(max(0.1, self._began + self._wait - time.monotonic())))
            except subprocess.TimeoutExpired:
                return {"error": f"a rank is not done after {self._wait:.0f} s: {self._said()}"}
        errors = re.findall(r"^error: .*", self._said(), re.MULTILINE)
        if found != list(statuses):
            return {"error": f"exit codes {found}, expected {list(statuses)}: {' '.join(errors)}"}
        if named and not any(named in error for error in errors):
            return {"error": f"no error says {named!r}: {' '.join(errors)}"}
        return {"said": errors[0]} if errors else {}

    def model_hash(self) -> str:
        return sha256((self._out / "model.safetensors").read_bytes()).hexdigest()

    def _said(self) -> str:
        return "\n".join(text.read_text()[-2000:] for text in self._texts)


def environment(rank: int, port: int, ranks: int) -> dict[str, str]:
    given = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in given.items()}}


if __name__ == "__main__":
    main()
