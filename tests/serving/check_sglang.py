"""A model in SGLang over HTTP on a CPU, asked by `surogate check-serving`: a part of `make test-serving`.

SGLang is installed without its dependencies for GPUs beside the environment of `check_vllm.py`. It serves a tiny model
in fp32 by its ops of torch; its compiled kernels, of which no package for CPUs exists, are replaced by `stand_in`,
which raises if one is called. What the check compares is SGLang's own: templates, tokens, scheduler, log probabilities.
Ends with status 1 if a conversation without tools differs, or the form of tools is not named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.check_formats import HF
from serving.check_vllm import ENVIRONMENT, STARTS_WITHIN, conversations, free_port, python_of_vllm, written

from surogate_serving.checking import Request, check

HERE = Path(__file__).parent
SGLANG = "sglang==0.5.23"
BESIDE = ("gguf==0.19.0", "ipython", "orjson", "soundfile", "torch_memory_saver", "xgrammar==0.2.7")
"""What SGLang imports and the environment of vLLM does not have, or in another version."""
ON_CPU = ("--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--skip-server-warmup")


def python_of_sglang(work: Path) -> Path:
    """Return the Python of an environment with SGLang, which is made if it is not there."""
    of_vllm, folder = python_of_vllm(work), work / "sglang"
    python, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        (theirs,) = of_vllm.parents[1].glob("lib/python*/site-packages")
        (ours,) = folder.glob("lib/python*/site-packages")
        (ours / "vllm.pth").write_text(f"{theirs}\n")
        install = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*install, "--no-deps", SGLANG], check=True)
        subprocess.run([*install, *BESIDE], check=True)
        ready.touch()
    return python


@contextmanager
def served(python: Path, folder: Path, log: Path) -> Iterator[str]:
    """Serve a model, and yield the URL. Waiting for it is the check's."""
    port = free_port()
    command = [str(python), "-m", "sglang.launch_server", "--model-path", str(folder), "--port", str(port)]
    environment = {**os.environ, **ENVIRONMENT, "SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = str(HERE / "stand_in")
    with log.open("w") as said:
        server = subprocess.Popen([*command, *ON_CPU], env=environment, stdout=said, stderr=said)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait()


def main() -> int:
    """Run all, and return the exit status."""
    torch.set_num_threads(1)
    work = Path("build/serving").resolve()
    python = python_of_sglang(work)
    _, folder = written("llama3", work / "sglang-models", HF, torch.float32)
    rows = conversations()
    plain, tools = work / "plain.jsonl", work / "tools.jsonl"
    for path, chosen in ((plain, [r for r in rows if not r["tools"]]), (tools, [r for r in rows if r["tools"]])):
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen))
    wrong = []
    with served(python, folder, work / "sglang.txt") as url:
        for given, fault in ((plain, ""), (tools, "the tools are written in another form")):
            found = check(Request(url=url, output=folder, rows=given, timeout=STARTS_WITHIN), notice=lambda line: None)
            for result in found.results:
                print(f"{result.check}: {result.said}")
                expected = fault if result.check == "tokens" else ""
                wrong += [f"{given.name}: {result.said}"] if result.fault != expected else []
    print(f"\n{SGLANG}")
    print(*(f"wrong: {line}. SGLang said: {work / 'sglang.txt'}" for line in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
