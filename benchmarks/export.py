"""Measure what `surogate export` takes for each format: time, processor time and peak resident memory.

    python benchmarks/export.py benchmarks/models/qwen3-8b
    python benchmarks/export.py benchmarks/models/qwen3-0.6b --formats nvfp4 gguf:q4_0 --cores 2 --work /dev/shm/export

Random weights in bf16 are written first, with the tokenizer of examples/tiny-qwen3, unless the folder of work has
them; they are in the page cache then, if memory allows. Each format is exported by a process of its own, and what it
wrote is removed. Prints a line of JSON for each: seconds, with the start of the program; seconds of all cores, and what
of them the system took; the peak of resident GiB; GB of the files, and GB/s read and written. `--cores` limits the
processes to so many. Ends with status 1 if an export failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FORMATS = (
    *("fp8-channel", "fp8-blocks", "nvfp4", "nvfp4:compressed-tensors", "nf4"),
    *("gguf:bf16", "gguf:q8_0", "gguf:q5_0", "gguf:q5_1", "gguf:q4_0", "gguf:q4_1", "gguf:f16", "gguf:f32"),
)
SHARD_BYTES = 1 << 31
NUMBERS = 1 << 26
"""Random numbers of which all weights are made."""
POLL_S = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder with a config.json")
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--work", type=Path, help="a folder for the checkpoint, which is kept (default: a temporary one)"
    )
    parser.add_argument("--weights", action="store_true", help="write the checkpoint, and nothing else")
    arguments = parser.parse_args()
    if arguments.weights:
        write_checkpoint(arguments.model, arguments.work)
        return 0
    with tempfile.TemporaryDirectory(prefix="export-") as name:
        work = arguments.work or Path(name)
        began, checkpoint = time.perf_counter(), work / arguments.model.name
        if not (checkpoint / "config.json").exists():
            # In a process of its own: the peak of a child begins with the memory of the process that starts it.
            command = [sys.executable, __file__, str(arguments.model), "--weights", "--work", str(checkpoint)]
            subprocess.run(command, check=True)
        size = bytes_in(checkpoint)
        show({"checkpoint": str(checkpoint), "gb": size / 1e9, "seconds": time.perf_counter() - began})
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.cores])
        lines = [measure(format, checkpoint, work / "exported", size) for format in arguments.formats]
    return int(any("failed" in line for line in lines))


def show(line: dict[str, Any]) -> dict[str, Any]:
    rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()}
    print(json.dumps(rounded), flush=True)
    return line


def bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measure(format: str, checkpoint: Path, output: Path, size: int) -> dict[str, Any]:
    """Export in one format, print its line, and remove the files."""
    shutil.rmtree(output, ignore_errors=True)
    command = [sys.executable, "-m", "surogate", "export", str(checkpoint), str(output), "--format", format]
    peak, began = 0, time.perf_counter()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            peak = max(peak, resident(process.pid))
            time.sleep(POLL_S)
        seconds = time.perf_counter() - began
        said.seek(0)
        text = said.read()
    _, status, used = ended
    process.returncode = os.waitstatus_to_exitcode(status)
    line: dict[str, Any] = {"format": format, "cores": len(os.sched_getaffinity(0))}
    if process.returncode:
        return show({**line, "failed": text[-2000:], "status": process.returncode})
    written = bytes_in(output)
    shutil.rmtree(output)
    return show(
        {
            **line,
            "seconds": seconds,
            "core_seconds": used.ru_utime + used.ru_stime,
            "system_seconds": used.ru_stime,
            "peak_gib": peak / 2**30,
            "written_gb": written / 1e9,
            "read_gb_s": size / 1e9 / seconds,
            "written_gb_s": written / 1e9 / seconds,
        }
    )


def resident(pid: int) -> int:
    """Return the peak of resident bytes of a running process, 0 if it ends."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except ProcessLookupError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def write_checkpoint(model: Path, folder: Path) -> None:
    """Write random weights for a config.json. The config comes last: without it the folder is not complete."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from surogate.checkpoints.tensor_file import Stored, split_into_shards, write_safetensors

    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    tied = config.get_text_config().tie_word_embeddings
    shapes = {name: x.shape for name, x in built.state_dict().items() if not (tied and name == "lm_head.weight")}
    numbers = (torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16).repeat(2)

    def tensor(index: int, name: str) -> Stored:
        shape = shapes[name]
        if len(shape) == 1:
            return Stored.of(name, torch.ones(shape, dtype=torch.bfloat16))
        first, repeats = index * 1_000_003 % NUMBERS, -(-shape.numel() // NUMBERS)
        long = numbers if repeats == 1 else numbers[:NUMBERS].repeat(repeats + 1)
        return Stored.of(name, long[first : first + shape.numel()].view(shape))

    blank = [Stored.of(name, torch.empty(shape, dtype=torch.bfloat16, device="meta")) for name, shape in shapes.items()]
    shards = split_into_shards(blank, SHARD_BYTES)
    names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    index = {name: i for i, name in enumerate(shapes)}

    def write(file: str, shard: list[Stored]) -> None:
        write_safetensors(folder / file, [tensor(index[held.name], held.name) for held in shard])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, names, shards))
    weight_map = {held.name: file for file, shard in zip(names, shards, strict=True) for held in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for path in Path("examples/tiny-qwen3").glob("*"):
        if path.name not in ("config.json", "generation_config.json") and path.suffix != ".safetensors":
            shutil.copy(path, folder)
    shutil.copy(model / "config.json", folder)


if __name__ == "__main__":
    sys.exit(main())
