"""The GGUF files of all families in llama.cpp: `make test-serving`, or this file with --help.

Writes tiny models of every family in every type, loads them in the llama.cpp of the npm package node-llama-cpp, and
compares with transformers in fp32: the tokens of texts and conversations, and the log probabilities of 200 positions.
Prints the table of docs/gguf.md, and keeps its part of that of docs/serving.md. Ends with status 1 if a number is above
its bound or a difference is not explained.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.contexts import context_of
from serving.reach import cell_of, keep
from serving.texts import TEXTS, rendered
from serving.tiny_models import MODELS, write_model

from surogate_export_gguf import splits, values, writer

HERE = Path(__file__).parent
NODE_PACKAGES = ("node-llama-cpp@3.22.1", "@node-llama-cpp/linux-x64@3.22.1")
POSITIONS = 200
F32_BOUND, GELU_BOUND = 2e-5, 5e-3
"""On log probabilities. llama.cpp reads GELU from a table of F16 values."""
KL_BOUNDS = {
    "bf16": 2e-3,
    "f16": 2e-5,
    "q8_0": 1.5e-2,
    "q5_1": 3e-1,
    "q5_0": 3e-1,
    "q4_1": 1.0,
    "q4_0": 1.0,
    "mxfp4": 1.0,
}
"""On the mean KL to the model that was not rounded. Random weights are far more sensitive than trained ones."""
KERNEL_BOUNDS = {"bf16": 6e-4, "f16": 6e-6}
KERNEL_BOUND = 6e-3
"""On the mean KL to the model with the matrices of the file: llama.cpp rounds activations too."""
PRECISE = ("mlp.gate.weight", "router.weight", "shared_expert_gate.weight", "conv1d.weight", "_bias")
"""Ends of the names of what no type rounds."""
MIXTURES = ("qwen3-moe", "olmoe", "gpt-oss", "qwen2-moe", "glm4-moe", "qwen3.5-moe", "qwen3-next")
ROUTED = {"f16": 1e-2, "bf16": 1e-1, "q8_0": 3e-1, "q5_1": 5e-1, "q5_0": 5e-1}
"""Bounds of mixtures: experts that nearly tie in a random router change places."""

SORTS = ("texts", "chats", "random texts")

Logs = NDArray[np.float64]


@dataclass
class Case:
    """A model, its texts, and what transformers makes of them.

    folder    of the model
    texts     texts, conversations, then random texts
    counts    how many of each
    tokens    of the texts
    ids       the text of the log probabilities
    logs      log probabilities of the model that is not rounded
    rounded   by type: of the model with the matrices of the file
    notices   of the export
    """

    folder: Path
    texts: list[str]
    counts: tuple[int, int, int]
    tokens: list[list[int]]
    ids: list[int]
    logs: Logs
    rounded: dict[str, Logs] = field(default_factory=dict)
    notices: list[str] = field(default_factory=list)


def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def case_of(folder: Path, model: PreTrainedModel) -> Case:
    """Return a case without rounded models."""
    tokenizer = tokenizer_of(folder)
    parsed = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = [token["content"] for token in parsed["added_tokens"] if token["special"]]
    named = {"{first}": special[-2], "{second}": special[-1]}
    texts = [text.replace("{first}", named["{first}"]).replace("{second}", named["{second}"]) for text in TEXTS]
    chats, others = rendered(folder), list(splits.random_texts()[:400])
    every = [*texts, *chats, *others]
    tokens = [tokenizer.encode(text, add_special_tokens=False).ids for text in every]
    ids = [i for text in tokens for i in text][:POSITIONS]
    return Case(folder, every, (len(texts), len(chats), len(others)), tokens, ids, log_probs(model, ids))


def log_probs(model: PreTrainedModel, ids: list[int]) -> Logs:
    """Return the log probabilities of all tokens at each position."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    logs: Logs = torch.log_softmax(logits.double(), -1).numpy()
    return logs


def round_matrices(model: PreTrainedModel, kind: str) -> None:
    """Give a model the matrices that the file of a type holds, by the package `gguf`."""
    form = values.FORMS[kind]
    for name, x in model.named_parameters():
        if x.ndim < 2 or "vis" in name or name.endswith(PRECISE):
            continue
        wanted, experts = form.type, ".experts." in name
        if "embed_tokens" in name or "lm_head" in name:
            wanted = form.outer
        elif experts and form.experts is not None:
            wanted = form.experts
        if wanted is gguf.GGMLQuantizationType.F32:
            continue
        across = experts and model.config.model_type == "gpt_oss"  # whose stacks have columns before rows
        rows = x.detach().transpose(1, 2).contiguous() if across else x.detach()
        stored = gguf.quants.quantize(rows.numpy(), wanted)
        found = torch.from_numpy(gguf.quants.dequantize(stored, wanted).reshape(rows.shape).copy())
        x.data = found.transpose(1, 2).contiguous() if across else found


def load(folder: Path) -> PreTrainedModel:
    """Load a model in fp32 without fused attention."""
    vision = "vision_config" in json.loads((folder / "config.json").read_text())
    by = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model: PreTrainedModel = by.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def prepare(names: list[str], kinds: list[str], work: Path) -> tuple[dict[str, Case], list[dict[str, Any]]]:
    """Write models and files. Returns cases by model, and the jobs of llama.cpp."""
    cases, jobs = {}, []
    for name in names:
        folder = write_model(name, work / "models" / name)
        case = cases[name] = case_of(folder, load(folder))
        for kind in (kind for kind in kinds if name in MIXTURES or values.FORMS[kind].experts is None):
            model = load(folder)
            round_matrices(model, kind)
            case.rounded[kind] = log_probs(model, case.ids)
            case.notices.clear()
            path = work / f"{name}.{kind}.gguf"
            writer.write_model(context_of(folder, kind, case.notices.append), path)
            texts = case.texts if kind == kinds[0] else []
            job = {"gguf": str(path), "texts": texts, "ids": case.ids, "vocabulary": case.logs.shape[1]}
            jobs.append({**job, "out": f"{path}.json", "name": name, "kind": kind})
    return cases, jobs


def node_folder(work: Path) -> Path:
    """Return a folder with llama.cpp from npm, which is installed if it is not there.

    Optional packages are left out: they are builds for GPUs of 600 MB.
    """
    folder = work / "node"
    if not (folder / "node_modules/node-llama-cpp").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--silent", "--omit=optional", "--ignore-scripts", *NODE_PACKAGES]
        subprocess.run(command, cwd=folder, check=True)
    return folder


def explained(case: Case, text: str, served: list[int]) -> bool:
    """Whether a notice of the export says that the tokens of a text differ so."""
    tokenizer, said = tokenizer_of(case.folder), " ".join(case.notices)
    if "normalize" in said and unicodedata.normalize("NFC", text) != text:
        return True
    if "gets no space" in said:
        first = tokenizer.encode("<s>", add_special_tokens=False).ids
        return tokenizer.encode(f"<s>{text}", add_special_tokens=False).ids == [*first, *served]
    for split in splits.SPLITS:
        if f"llama.cpp's {split.name} splits" in said:
            assert tokenizer.pre_tokenizer is not None
            ours = [text[a:z] for _, (a, z) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
            return ours != splits.split(text, split.expressions)
    return False


def kl(of: Logs, to: Logs) -> float:
    """Return the mean KL divergence of distributions to others."""
    return float((np.exp(to) * (to - of)).sum(-1).mean())


def same_of(one: Logs, other: Logs) -> float:
    """Return the share of positions with the same most probable token."""
    return float((one.argmax(-1) == other.argmax(-1)).mean())


def largest(of: Logs, to: Logs, ids: list[int]) -> float:
    """Return the largest difference of the log probabilities of the text itself."""
    at = np.arange(len(ids) - 1), ids[1:]
    return float(abs(of[at] - to[at]).max())


def compare(cases: dict[str, Case], jobs: list[dict[str, Any]], kinds: list[str]) -> Iterator[str]:
    """Print the table, and keep a part of that of docs/serving.md. Yields what is wrong."""
    reach = dict[str, dict[str, str]]()
    print("| model |", " | ".join(SORTS), "|", " | ".join(kinds), "|")
    print("|---|---|---|---|", "|".join("---" for _ in kinds), "|", sep="")
    for name, case in cases.items():
        cells, tokens, reach[name] = dict[str, str](), "| | | ", {}
        for job in (job for job in jobs if job["name"] == name):
            found, kind = json.loads(Path(job["out"]).read_text()), job["kind"]
            if "error" in found:
                yield f"{name} {kind}: {found['error']}"
                cells[kind] = "not loaded"
                continue
            if job["texts"]:
                tokens = ""
                for what, (label, part) in zip(SORTS, compare_tokens(case, found["tokens"]), strict=True):
                    tokens += f"| {label} "
                    reach[name] |= {"llama.cpp": label} if what == "chats" else {}
                    yield from (f"{name}: other tokens of {text!r}" for text in part)
            logs = np.fromfile(f"{job['out']}.f32", np.float32).reshape(case.logs.shape).astype(np.float64)
            cells[kind], wrong = compare_logs(name, kind, case, logs)
            ours = case.rounded[kind]
            rounding = None if kind == "f32" else kl(logs, case.logs)
            reach[name][f"gguf:{kind}"] = cell_of(kl(logs, ours), same_of(logs, ours), rounding)
            yield from wrong
        print(f"| {name} {tokens}|", " | ".join(cells.get(kind, "") for kind in kinds), "|")
    keep("gguf", reach)


def compare_tokens(case: Case, served: list[list[int]]) -> Iterator[tuple[str, list[str]]]:
    """Yield, for texts, chats and random texts, a cell of the table and the texts that differ without a reason."""
    at = 0
    for count in case.counts:
        rows = list(zip(case.texts, case.tokens, served, strict=True))[at : at + count]
        differ = [(text, found) for text, wanted, found in rows if wanted != found]
        unknown = [text for text, found in differ if not explained(case, text, found)]
        known = len(differ) - len(unknown)
        yield f"{count - len(differ)}/{count}" + (f" + {known}" if known else ""), unknown
        at += count


def compare_logs(name: str, kind: str, case: Case, logs: Logs) -> tuple[str, list[str]]:
    """Return a cell of the table, and what is above its bound."""
    to_model, to_rounded = kl(logs, case.logs), kl(logs, case.rounded[kind])
    if kind == "f32":
        bound = GELU_BOUND if name.startswith("gemma") else F32_BOUND
        found = largest(logs, case.logs, case.ids)
        return f"{found:.1e}", [f"{name} f32: {found:.1e}, bound {bound:.0e}"] if not found <= bound else []
    bounds = KL_BOUNDS[kind], KERNEL_BOUNDS.get(kind, KERNEL_BOUND)
    if name in MIXTURES:
        bounds = (ROUTED.get(kind, 1.0),) * 2
    wrong = [
        f"{name} {kind}: mean KL to the model {what} {found:.1e}, bound {bound:.0e}"
        for what, found, bound in zip(("as trained", "as rounded"), (to_model, to_rounded), bounds, strict=True)
        if not found <= bound
    ]
    return f"{to_model:.1e} ({to_rounded:.0e})", wrong


def main() -> int:
    """Run all, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--types", nargs="*", default=list(values.FORMS), choices=list(values.FORMS))
    parser.add_argument("--work", type=Path, default=Path("build/serving"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    start, work = time.perf_counter(), chosen.work.resolve()
    kinds = sorted(chosen.types, key=lambda kind: (kind != "f32", list(values.FORMS).index(kind)))
    node = node_folder(work)
    cases, jobs = prepare(chosen.models, kinds, work)
    (work / "jobs.json").write_text(json.dumps(jobs))
    command = ["node", str(HERE / "llama.mjs"), str(work / "jobs.json")]
    release = subprocess.run(command, cwd=node, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    wrong = list(compare(cases, jobs, kinds))
    versions = (
        f"llama.cpp {release} ({NODE_PACKAGES[0]}), gguf {version('gguf')}, transformers {version('transformers')}"
    )
    print(f"\n{versions}, torch {torch.__version__}; {len(jobs)} files in {time.perf_counter() - start:.0f} s")
    print(*(f"wrong: {line}" for line in wrong), sep="\n")
    return 1 if wrong else 0


def version(package: str) -> str:
    """Return the version of an installed package."""
    from importlib.metadata import version

    return version(package)


if __name__ == "__main__":
    sys.exit(main())
