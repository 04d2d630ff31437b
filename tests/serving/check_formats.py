"""The files of all export formats in the readers of others, for every family: `make test-serving`, or with --help.

Exports tiny models of every family, reads each file with the program that defines its format, and compares
matrices with the references of this project, and the distributions at 200 positions with the model as it was trained.
Token ids of conversations are those of training. Prints its part of the table of docs/serving.md, with `nf4`. Ends with
status 1 if a matrix or an id differs, or a number is above its bound.

The readers: transformers for `hf` and `fp8-blocks`, which it dequantizes; compressed-tensors for `fp8-channel` and
`nvfp4:compressed-tensors`; bitsandbytes for `nf4`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).parents[1]))

from serving.check_gguf import POSITIONS, Logs, kl, load, log_probs, same_of, tokenizer_of, version
from serving.reach import cell_of, keep
from serving.texts import CHATS, TEXTS
from serving.tiny_models import rope, write_model

from surogate import run
from surogate.data.chat.row_tokenizer import RowTokenizer
from surogate_qlora_fp4.exports import stacks
from surogate_qlora_fp4.reference import fp4_block_dequantize, fp4_block_quantize
from surogate_qlora_fp8.reference import (
    fp8_channel_dequantize,
    fp8_channel_quantize,
    fp8_tile_dequantize,
    fp8_tile_quantize,
)
from surogate_qlora_nf4.reference import nf4_dequantize, nf4_quantize

DENSE = ("llama3", "mistral", "ministral3", "qwen2.5", "qwen3", "smollm3", "phi3", "gemma2", "gemma3", "olmo2", "olmo3")
MIXTURES = ("qwen3-moe", "olmoe", "qwen2-moe", "glm4-moe")
HYBRIDS = ("qwen3.5", "qwen3.5-moe")
TOWERS = ("gemma3-vision", "mistral3-vision", "qwen2.5-vl", "qwen3-vl")
FAMILIES = (*DENSE, *MIXTURES, *HYBRIDS, *TOWERS)
ONE_OF_A_KIND = ("llama3", "qwen3-moe", "qwen3.5", "gemma3-vision")

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Of heads of 64: rows of all projections that servers stack are multiples of 128."""
MORE_SIZES: Mapping[str, Mapping[str, Any]] = {
    "olmoe": {"num_key_value_heads": 4},
    "qwen3-moe": {"moe_intermediate_size": 128},
    "qwen2.5-vl": {"rope_parameters": rope(1e6, mrope_section=[8, 12, 12])},
}

HF, BLOCKS, CHANNEL, NVFP4, NF4 = "hf", "fp8-blocks", "fp8-channel", "nvfp4:compressed-tensors", "nf4"
FORMATS = (HF, BLOCKS, CHANNEL, NVFP4, NF4)
READER_BOUND = 1e-9
"""On the mean KL of what a reader makes of the files to the model with the matrices of the reference."""
BOUNDS = {HF: 0.0, BLOCKS: 1e-1, CHANNEL: 1e-1, NVFP4: 1.2, NF4: 1.2}
"""On the mean KL of the rounding. Random weights are far more sensitive than trained ones."""
ROUTED = {HF: 0.0, BLOCKS: 4e-1, CHANNEL: 4e-1, NVFP4: 1.5, NF4: 1.5}
"""The same of mixtures: experts that nearly tie in a random router change places."""
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Cell:
    """What a reader makes of a model in a format.

    kl        mean KL of its distributions to those of the model with the matrices of the reference, in nats
    same      share of positions with the same most probable token
    rounding  mean KL to the model as it was trained; None: the format does not round
    """

    kl: float
    same: float
    rounding: float | None

    def __str__(self) -> str:
        return cell_of(self.kl, self.same, self.rounding)


# --------------------------------------------------------------------------------------------------------- references


def rounded(format: str, source: Tensors, names: list[str]) -> Tensors:
    """Return matrices as the references of this project round them, in fp32."""
    if format == NVFP4:
        return {name: matrix for stack in stacks(names) for name, matrix in rounded_stack(source, stack).items()}
    return {name: MATRICES[format](source[name]) for name in names}


def rounded_stack(source: Tensors, stack: tuple[str, ...]) -> Tensors:
    """Return matrices that share a global scale. The files have the reciprocal of the scale, rounded to fp32."""
    rows = [len(source[name]) for name in stack]
    together = torch.cat([source[name] for name in stack])
    codes, scales, whole = fp4_block_quantize(together, rows=(sum(rows),), four_over_six=True)
    ones = torch.ones(scales.shape), torch.ones(1)
    levels = fp4_block_dequantize(codes, *ones, rows=(sum(rows),), dtype="fp32")
    found = levels * (scales.float() / (1 / whole)).repeat_interleave(16, dim=1)
    return dict(zip(stack, found.split(rows), strict=True))


def _blocks(matrix: Tensor) -> Tensor:
    how: dict[str, Any] = {"rows": (len(matrix),), "tile": 128}
    return fp8_tile_dequantize(*fp8_tile_quantize(matrix, **how), dtype="fp32", **how)


def _nf4(matrix: Tensor) -> Tensor:
    how: dict[str, Any] = {"rows": (len(matrix),), "block": 64}
    stored = nf4_quantize(matrix, double=True, **how)
    return nf4_dequantize(*stored, shape=tuple(matrix.shape), dtype="fp32", **how)


MATRICES: Mapping[str, Callable[[Tensor], Tensor]] = {
    BLOCKS: _blocks,
    CHANNEL: lambda matrix: fp8_channel_dequantize(*fp8_channel_quantize(matrix)),
    NF4: _nf4,
}


# ------------------------------------------------------------------------------------------------------------ readers


def read(format: str, folder: Path, work: Path) -> tuple[Any, Tensors]:
    """Return the model that the format's reader makes of a folder, in fp32, and the matrices that it decoded."""
    if format in (HF, BLOCKS):
        return load(folder).float(), {}  # other weights are in the dtype of the files
    stored = tensors_in(folder)
    decoded = by_bitsandbytes(stored) if format == NF4 else by_compressed_tensors(stored, config_of(folder))
    begins = tuple(decoded)  # parts of x.weight are x.weight_scale, x.weight.absmax and so on
    plain = {name: tensor for name, tensor in stored.items() if not name.startswith(begins)}
    shutil.copytree(folder, work, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = config_of(folder)
    del config["quantization_config"]
    (work / "config.json").write_text(json.dumps(config))
    save_file({**plain, **decoded}, work / "model.safetensors", {"format": "pt"})
    return load(work), decoded


def by_compressed_tensors(stored: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Return the matrices that compressed-tensors decompresses."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    given = config["quantization_config"]
    scheme = QuantizationScheme.model_validate(given["config_groups"]["group_0"])
    compressor: Any = BaseCompressor.get_value_from_registry(given["format"])
    ends = (".weight_packed", ".weight") if given["format"].startswith("nvfp4") else (".weight",)
    few = (torch.uint8, torch.float8_e4m3fn)
    codes = {n.removesuffix(e) for n, x in stored.items() for e in ends if n.endswith(e) and x.dtype in few}
    return {f"{m}.weight": compressor.decompress(parts_of(stored, f"{m}."), scheme)["weight"].float() for m in codes}


def by_bitsandbytes(stored: Tensors) -> Tensors:
    """Return the matrices that bitsandbytes dequantizes."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    found = {}
    for name in [name for name in stored if f"{name}.absmax" in stored]:
        parts = parts_of(stored, f"{name}.")
        state = QuantState.from_dict({f"{name}.{key}": part for key, part in parts.items()}, torch.device("cpu"))
        state.dtype = torch.float32  # of the result
        found[name] = dequantize_4bit(stored[name], state)
    return found


def parts_of(stored: Tensors, begin: str) -> Tensors:
    """Return the tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(begin): tensor for name, tensor in stored.items() if name.startswith(begin)}


def tensors_in(folder: Path) -> Tensors:
    """Return the tensors of a model's files."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def config_of(folder: Path) -> dict[str, Any]:
    """Return the parsed config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


# ------------------------------------------------------------------------------------------------------------- checks


def compare(format: str, name: str, model: Path, before: Logs, ids: list[int], work: Path) -> tuple[Cell, list[str]]:
    """Export a model and read it. Returns a cell of the table, and what is wrong."""
    served = work / format.replace(":", "-")
    run.export(model, served, format=format, notice=lambda line: None, overwrite=True)
    shutil.rmtree(work / "decoded", ignore_errors=True)
    theirs, decoded = read(format, served, work / "decoded")
    source, held = tensors_in(model), tensors_in(served)
    few = [each for each in source if each not in held or held[each].dtype != source[each].dtype]
    if (format == HF) != (not few):
        return Cell(0, 0, 0), [f"{name} {format}: {len(few)} matrices are quantized"]
    dtype = torch.bfloat16 if format == NVFP4 else torch.float32  # in which the readers decode
    reference = {each: matrix.to(dtype) for each, matrix in rounded(format, source, few).items()}
    wrong = [f"{name} {format}: another {each}" for each, x in decoded.items() if not equal(x, reference[each])]
    save_plain({**source, **reference}, model, work / "reference")
    ours = load(work / "reference")
    if not decoded and (differing := unlike(theirs, ours)):
        wrong.append(f"{name} {format}: transformers reads other values of {differing}")
    wanted, found = log_probs(ours, ids), log_probs(theirs, ids)
    same = same_of(found, wanted)
    cell = Cell(kl(found, wanted), same, kl(found, before) if few else None)
    bound = (ROUTED if name in (*MIXTURES, "qwen3.5-moe") else BOUNDS)[format]
    if not (abs(cell.kl) <= READER_BOUND and same == 1):
        wrong.append(f"{name} {format}: read with KL {cell.kl:.1e}, {same:.3f} of the tokens equal")
    if not (cell.rounding or 0.0) <= bound:
        wrong.append(f"{name} {format}: rounded with KL {cell.rounding:.1e}, bound {bound:.0e}")
    return cell, wrong


def equal(decoded: Tensor, reference: Tensor) -> bool:
    """Whether a decoder has the matrix of the reference, to the bit."""
    same: bool = torch.equal(decoded, reference.to(decoded.dtype))
    return same


def save_plain(tensors: Tensors, model: Path, folder: Path) -> None:
    """Write a model with other tensors."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def unlike(one: Any, other: Any) -> list[str]:
    """Return the parameters of a model that differ from those of another one."""
    wanted = dict(other.named_parameters())
    return [name for name, x in one.named_parameters() if not torch.equal(x, wanted[name])]


@dataclass(frozen=True)
class Ids:
    """How many conversations and prompts have the ids of training in transformers, of how many.

    reported  other prompts, of which a run says that the template writes other text before an answer
    wrong     all others that differ
    """

    count: int
    same: int
    reported: int
    wrong: list[str]

    def __str__(self) -> str:
        return f"{self.same}/{self.count}" + (f" + {self.reported}" if self.reported else "")


def ids_of(model: Path, served: Path) -> Ids:
    """Compare conversations, each whole and up to its last answer."""
    trained, theirs = RowTokenizer(model), PreTrainedTokenizerFast.from_pretrained(served)
    count, reported, wrong = 0, 0, []
    for messages, tools, _ in CHATS:
        whole = messages if messages[-1]["role"] == "assistant" else [*messages, ANSWER]
        given: dict[str, Any] = {"tools": tools, "tokenize": True, "return_dict": False}
        try:
            all_ids = theirs.apply_chat_template(whole, **given)
        except TemplateError:  # of a system message, in some
            continue
        prompt = theirs.apply_chat_template(whole[:-1], add_generation_prompt=True, **given)
        row = {"messages": whole} | ({"tools": tools} if tools else {})
        encoded = trained.encode_conversation(row)
        ours = list(encoded.tokens)
        count += 2
        wrong += [f"all of {whole}"] if ours != all_ids else []
        if ours[: len(prompt)] == prompt:
            continue
        if any(omission.what == "the prompt of a server" for omission in encoded.omissions):
            reported += 1
        else:
            wrong.append(f"the prompt of {whole}")
    return Ids(count, count - reported - len(wrong), reported, wrong)


ANSWER = {"role": "assistant", "content": "Sure, naïve: 42."}


def rows(names: list[str], formats: list[str], work: Path) -> Iterator[tuple[str, Ids, list[Cell], list[str]]]:
    """Yield, for each model, its name, its ids, its cells and what is wrong."""
    for name in names:
        folder = work / name
        shutil.rmtree(folder, ignore_errors=True)
        model = write_model(name, folder / "model", torch.bfloat16, **{**SIZES, **MORE_SIZES.get(name, {})})
        tokenizer = tokenizer_of(model)
        ids = [i for text in TEXTS for i in tokenizer.encode(text, add_special_tokens=False).ids][:POSITIONS]
        before, cells, wrong = log_probs(load(model), ids), [], []
        for format in formats:
            cell, faults = compare(format, name, model, before, ids, folder)
            cells.append(cell)
            wrong += faults
        found = ids_of(model, folder / formats[0].replace(":", "-"))
        yield name, found, cells, [*wrong, *(f"{name}: other tokens in {text}" for text in found.wrong)]


def main() -> int:
    """Run all, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--work", type=Path, default=Path("build/serving/formats"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    start, every, reach = time.perf_counter(), [], {}
    print("| model | ids |", " | ".join(f"`{format}`" for format in chosen.formats), "|")
    print("|---|---|", "|".join("---" for _ in chosen.formats), "|", sep="")
    for name, found, cells, wrong in rows(chosen.models, chosen.formats, chosen.work.resolve()):
        print(f"| {name} | {found} |", " | ".join(map(str, cells)), "|", flush=True)
        reach[name] = {"transformers": str(found), **dict(zip(chosen.formats, map(str, cells), strict=True))}
        every += wrong
    keep("formats", reach)
    packages = ("transformers", "compressed-tensors", "bitsandbytes", "torch")
    print("\n" + ", ".join(f"{package} {version(package)}" for package in packages), end="; ")
    print(f"{len(chosen.models)} models, {time.perf_counter() - start:.0f} s")
    print(*(f"wrong: {line}" for line in every), sep="\n")
    return 1 if every else 0


if __name__ == "__main__":
    sys.exit(main())
