"""Measures what of an adapter's gain is left after its base is rounded to 4 bits: once, or twice.

An adapter that was trained on a base in 4 bits is merged into the base as it was before, and the sum is rounded; or it
is merged into the base that is rounded already, and the sum is rounded again.

    python benchmarks/merged_base.py work

It trains the model of examples/quickstart.yaml, and then, for NF4 and NVFP4, an adapter on this model in 4 bits with
the text of docs/ (minutes on a CPU; what is trained in `work` is used again). The change of the adapter is scaled to
shares of the norm of the weights: a trained adapter of a small model changes weights by far more than one of a large
model does. It prints a Markdown table: 1 is the gain of the loss that the adapter has on the rounded base, without any
further rounding. Losses are of held-out tokens, in fp32, by transformers.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from surogate_qlora_fp4.exports import stacks
from surogate_qlora_fp4.reference import fp4_block_dequantize, fp4_block_quantize
from surogate_qlora_nf4.reference import nf4_dequantize, nf4_quantize

ROOT = Path(__file__).parents[1]
SHARES = (0.008, 0.024, 0.078)
"""Norms of the change, as shares of that of the weights."""
HELD_OUT, LENGTH = 8192, 256
ADAPTER = {
    "lora": "true",
    "lora_rank": 16,
    "lora_alpha": 32,
    "from_scratch": "false",
    "model_dtype": "bf16",
    "max_steps": 150,
    "learning_rate": "1e-3",
    "eval_steps": 0,
    "save_steps": 0,
}
KEYS = {"NF4": "qlora_bnb", "NVFP4": "qlora_fp4"}

Matrices = Mapping[str, Tensor]
Round = Callable[[Matrices], dict[str, Tensor]]


def nf4(matrices: Matrices) -> dict[str, Tensor]:
    """Return matrices as `--format nf4` rounds them: to bf16, then to NF4 with quantized scales."""
    found = {}
    for name, matrix in matrices.items():
        stored = nf4_quantize(matrix.bfloat16(), rows=(len(matrix),), block=64, double=True)
        how: dict[str, Any] = {"rows": (len(matrix),), "block": 64, "shape": tuple(matrix.shape), "dtype": "fp32"}
        found[name] = nf4_dequantize(*stored, **how)
    return found


def nvfp4(matrices: Matrices) -> dict[str, Tensor]:
    """Return matrices as `--format nvfp4` rounds them: with a global scale for those that servers stack."""
    found: dict[str, Tensor] = {}
    for stack in stacks(matrices):
        rows = [len(matrices[name]) for name in stack]
        together = torch.cat([matrices[name].bfloat16() for name in stack])
        stored = fp4_block_quantize(together, rows=(sum(rows),), four_over_six=True)
        found |= zip(stack, fp4_block_dequantize(*stored, rows=(sum(rows),), dtype="fp32").split(rows), strict=True)
    return found


ROUNDS: Mapping[str, Round] = {"NF4": nf4, "NVFP4": nvfp4}


def train(output: Path, **keys: Any) -> Path:
    """Train with the keys of the quickstart and these, unless the output is there. Returns its folder."""
    if not (output / "config.json").exists() and not (output / "adapter").exists():
        given = [f"--set={name}={value}" for name, value in {"output_dir": output, **keys}.items()]
        command = [sys.executable, "-m", "surogate", "train", "examples/quickstart.yaml", *given]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return output


def text_of_docs(work: Path) -> Path:
    """Write the pages of docs/ into one file, in the order of their names."""
    path = work / "docs.txt"
    pages = sorted((ROOT / "docs").glob("*.md"))
    path.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages), encoding="utf-8")
    return path


def change_of(adapter: Path, names: Matrices) -> dict[str, Tensor]:
    """Return what an adapter adds to each matrix, in fp32."""
    config, tensors = (
        json.loads((adapter / "adapter_config.json").read_text()),
        load_file(adapter / "adapter_model.safetensors"),
    )
    scale = config["lora_alpha"] / config["r"]
    begin, found = "base_model.model.", {}
    for name in names:
        module = f"{begin}{name.removesuffix('.weight')}"
        a, b = (tensors[f"{module}.lora_{which}.weight"].float() for which in "AB")
        found[name] = scale * (b @ a)
    return found


def measured(model: Any, matrices: Matrices, ids: Tensor) -> float:
    """Return the mean loss of held-out tokens of the model with other matrices."""
    model.load_state_dict({**model.state_dict(), **matrices})
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def norm(matrices: Matrices) -> float:
    """Return the norm of all elements."""
    return float(torch.stack([matrix.norm() for matrix in matrices.values()]).norm())


def kept(model: Any, round: Round, change: Matrices, ids: Tensor, share: float) -> tuple[float, float]:
    """Return the shares of the gain that are left: merged and rounded; rounded, merged and rounded."""
    base = {name: model.state_dict()[name].clone() for name in change}
    factor = share * norm(base) / norm(change)
    scaled = {name: factor * value for name, value in change.items()}
    rounded = round(base)
    on_base = {name: rounded[name] + scaled[name] for name in base}
    once = round({name: base[name] + scaled[name] for name in base})
    start, gained, one, two = (measured(model, each, ids) for each in (rounded, on_base, once, round(on_base)))
    measured(model, base, ids[:1])  # as it was
    return (start - one) / (start - gained), (start - two) / (start - gained)


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder of what is trained")
    work = parser.parse_args().work.resolve()
    work.mkdir(exist_ok=True)
    base = train(work / "base", eval_steps=0, save_steps=0)
    text = text_of_docs(work)
    cells: dict[str, list[tuple[float, float]]] = {}
    for name, key in KEYS.items():
        data = f'[{{"path": "{text}", "type": "text"}}]'
        adapter = train(work / name, model=base, datasets=data, **{key: "true"}, **ADAPTER) / "adapter"
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).float().eval()
        blocks = {n: x for n, x in model.state_dict().items() if ".layers." in n and n.endswith("_proj.weight")}
        change = change_of(adapter, blocks)
        tokens = PreTrainedTokenizerFast.from_pretrained(base)(text.read_text(encoding="utf-8"))["input_ids"]
        ids = torch.tensor(tokens[-HELD_OUT:]).view(-1, LENGTH)  # of the tenth that no run is trained on
        print(f"{name}: as trained, the change is {norm(change) / norm(blocks):.2f} of the weights", file=sys.stderr)
        cells[name] = [kept(model, ROUNDS[name], change, ids, share) for share in SHARES]
    heads = [f"{name}: {way}" for name in KEYS for way in ("merged, then rounded", "rounded, merged, rounded")]
    print("| change | " + " | ".join(heads) + " |\n|---|" + "---|" * len(heads))
    for i, share in enumerate(SHARES):
        print(f"| {share:.1%} | " + " | ".join(f"{x:.2f}" for name in KEYS for x in cells[name][i]) + " |")


if __name__ == "__main__":
    main()
