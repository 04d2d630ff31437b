"""`surogate export` of a model with the matrices of Llama-3.1-70B takes no more memory than that of a tiny one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from surogate import run
from surogate.checkpoints.hf import ModelExport
from surogate.checkpoints.manifest import Manifest, list_files, write_manifest
from surogate.checkpoints.model_ranges import write_ranges
from surogate_core.api import WeightMap
from surogate_core.program.shards import part_size
from surogate_core.program.value import Shard, Value
from surogate_core.runtime.pieces import Pieces, pieces_of

CONFIG = Path(__file__).parents[2] / "benchmarks/models/llama-3.1-70b/config.json"
RANKS = 3
MIB = 1 << 20
PERIOD = (1 << 20) + 7
MEASURED = r"""
import atexit, re
status = lambda: open("/proc/self/status").read()
atexit.register(lambda: print(re.search(r"VmHWM:\s+(\d+)", status())[1]))
from surogate.cli.app import main
main()
"""
"""The command line, which at its end prints the peak of its memory in KiB."""


@dataclass(frozen=True)
class Made:
    """A made-up model. The elements of a param are those of `numbers` from its index on."""

    weights: tuple[WeightMap, ...]
    config: Mapping[str, Any]
    numbers: Tensor

    @classmethod
    def of(cls, folder: Path, **changes: int) -> Made:
        config = json.loads(CONFIG.read_text()) | changes
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "run.yaml").write_text(json.dumps({"model": str(folder), "from_scratch": True}))
        opened = run.open_run(run.load(folder / "run.yaml"))
        weights = tuple(opened.model.weights(opened.dims))
        largest = max(prod(shape_of(m)) for m in weights)
        period = torch.arange(PERIOD, dtype=torch.int32).mul_(40503).to(torch.int16)
        numbers = period.repeat((largest + len(weights)) // PERIOD + 1)
        return cls(weights, config, numbers.view(torch.bfloat16))

    def whole(self, m: WeightMap) -> Tensor:
        index, shape = self.weights.index(m), shape_of(m)
        return self.numbers[index : index + prod(shape)].view(shape)

    def pieces(self, rank: int) -> dict[str, Pieces]:
        """Return what a process with this rank writes: its parts of matrices, and rank 0 also the vectors."""
        found = {}
        for m in self.weights:
            whole = self.whole(m)
            if whole.dim() > 1:
                size = part_size(whole.numel(), RANKS)
                part = whole.view(-1)[rank * size : (rank + 1) * size]
                value = Value(m.param, (size,), "bf16", "param", shard=Shard(tuple(whole.shape), RANKS))
                found[m.param] = pieces_of(value, lambda _, part=part: part, range(rank, rank + 1))
            elif rank == 0:
                found[m.param] = Pieces.of(whole)
        return found

    @property
    def nbytes(self) -> int:
        return sum(2 * prod(shape_of(m)) for m in self.weights)

    def write(self, checkpoint: Path) -> None:
        """Write a checkpoint of processes with a rank each."""
        checkpoint.mkdir()
        model = ModelExport(weights=self.weights, params={}, config=self.config, source_dir=None, dtype="bf16")
        hashes: dict[str, str] = {}
        for rank in range(RANKS):
            hashes |= write_ranges(checkpoint, replace(model, params=self.pieces(rank)), rank)
        files = list_files(checkpoint, hashes)
        write_manifest(checkpoint, Manifest(step=1, position={}, facts={}, config={}, versions={}, files=files))


def shape_of(m: WeightMap) -> tuple[int, ...]:
    rows = sum(tensor.shape[0] for tensor in m.tensors)
    return (rows, *m.tensors[0].shape[1:])


def peak_bytes(checkpoint: Path, output: Path) -> int:
    """Return the most memory that `surogate export` had as a process."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "export", str(checkpoint), str(output)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1]) * 1024


def exported(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


@pytest.mark.slow
def test_an_export_takes_no_more_memory_for_a_large_model(tmp_path: Path) -> None:
    """A block of 70B in bf16 and a smaller vocabulary: 2.8 GB in the files of three processes."""
    tiny = Made.of(tmp_path / "tiny", num_hidden_layers=1, vocab_size=512, hidden_size=256, intermediate_size=512)
    large = Made.of(tmp_path / "large", num_hidden_layers=1, vocab_size=32768)
    peaks = []
    for made, name in ((tiny, "tiny"), (large, "large")):
        made.write(tmp_path / f"{name}-checkpoint")
        peaks.append(peak_bytes(tmp_path / f"{name}-checkpoint", tmp_path / f"{name}-out"))
    print(f"{large.nbytes / MIB:,.0f} MiB: {peaks[1] / MIB:,.0f} MiB; {tiny.nbytes / MIB:,.1f}: {peaks[0] / MIB:,.0f}")
    assert large.nbytes > 2.5e9 and peaks[1] - peaks[0] < 64 * MIB, peaks
    wanted = {
        tensor.name: rows
        for m in large.weights
        for tensor, rows in zip(m.tensors, large.whole(m).split([t.shape[0] for t in m.tensors]), strict=True)
    }
    seen = set()
    for name, tensor in exported(tmp_path / "large-out"):
        assert torch.equal(tensor.view(torch.int16), wanted[name].view(torch.int16)), name
        seen.add(name)
    assert seen == wanted.keys()
