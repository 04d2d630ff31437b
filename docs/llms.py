"""Prints the entry for language models (llmstxt.org) from the pages: python docs/llms.py > docs/llms.txt"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from surogate_docs.pages import Page, pages

HEAD = """# Surogate

> Surogate trains large language models on NVIDIA GPUs or a CPU: pre-training, full fine-tuning, LoRA and QLoRA. A run
> is one YAML file. Its memory is planned to the byte before it starts.

How to work with it:

1. `surogate doctor --json`: what this machine has, and what is wrong with it.
2. `surogate schema`: the JSON Schema of configs; `surogate docs KEY`: what a key means; `surogate docs TOPIC`: a page.
3. `surogate plan run.yaml --json`: whether the run fits, its memory and speed, in seconds and without a GPU. `--device
   h100` plans for another card; `--fit 24GiB` finds settings that fit.
4. `surogate tokenize run.yaml --debug --json`: what is trained and what is masked.
5. `surogate train run.yaml`; `surogate sft` trains LoRA by default. `--set key=value` overrides a key.
6. `surogate watch DIR --json`: state, loss and speed of runs. `metrics.jsonl` in the output folder has every step;
   `surogate report DIR --json` says what came out and what stands out.

`--json` prints one document on stdout, also for errors: `{"error": {"type", "exit_status", "problems": [{"problem",
"remedy"}]}}`. Exit status 0 is done; 1 a bug, or the answer no of a check; 2 input to correct; 3 the run stopped
itself, saved. In Python: `import surogate; surogate.train("run.yaml", max_steps=50)`.
"""

GROUPS = {"": "Guides", "reference": "Reference", "write-a-plugin": "Kinds of plugins"}


def page() -> str:
    """Return the file."""
    return "\n".join([HEAD, *_groups()])


def _groups() -> Iterator[str]:
    every = pages(Path(__file__).parent).values()
    for folder, title in GROUPS.items():
        yield f"## {title}\n"
        yield from (_line(page) for page in every if page.name.rpartition("/")[0] == folder)
        yield ""


def _line(page: Page) -> str:
    return f"- [{page.title}]({page.name}.md): {page.summary}"


if __name__ == "__main__":
    sys.stdout.write(page())
