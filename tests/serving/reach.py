"""The table of docs/serving.md: how equal the models of all families are to what was trained, in each program.

`check_formats.py`, `check_gguf.py` and `check_vllm.py` keep their columns; run as the last part of `make test-serving`,
this file prints them beside each other. Ends with status 1 if one of them has not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path("build/serving/reach")
PARTS = ("formats", "gguf", "vllm")
TOKENS = ("transformers", "llama.cpp", "vLLM")
FORMATS = ("hf", "fp8-blocks", "fp8-channel", "nvfp4:compressed-tensors", "nf4")
GGUF = ("gguf:f32", "gguf:bf16", "gguf:q8_0", "gguf:q4_0", "gguf:mxfp4")
COLUMNS = (*FORMATS, *GGUF, "vLLM: hf")


def cell_of(kl: float, same: float, rounding: float | None = None) -> str:
    """Return a cell: mean KL and share of equal argmax to the model with the matrices of the file.

    rounding: mean KL to the model as it was trained; None: the format does not round
    """
    return f"{abs(kl):.0e}, {same:.3f}".replace("0e+00", "0") + ("" if rounding is None else f" ({rounding:.0e})")


def keep(part: str, columns: Mapping[str, Mapping[str, str]]) -> None:
    """Keep {model: {column: cell}} of a part of the run."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{part}.json").write_text(json.dumps(columns, indent=1))


def main() -> int:
    """Print the table, and return the exit status."""
    lacks = [part for part in PARTS if not (FOLDER / f"{part}.json").exists()]
    if lacks:
        print(*(f"wrong: {FOLDER} has no {part}.json. Run tests/serving/check_{part}.py." for part in lacks), sep="\n")
        return 1
    rows = dict[str, dict[str, str]]()
    for part in PARTS:
        for model, cells in json.loads((FOLDER / f"{part}.json").read_text()).items():
            rows.setdefault(model, {}).update(cells)
    print(f"| model | ids: {', '.join(TOKENS)} |", " | ".join(f"`{column}`" for column in COLUMNS), "|")
    print("|---" * (2 + len(COLUMNS)) + "|")
    for model, cells in rows.items():
        ids = ", ".join(cells.get(program, "-") for program in TOKENS)
        print(f"| {model} | {ids} |", " | ".join(cells.get(column, "") for column in COLUMNS), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
