"""The model of a checkpoint as files of Hugging Face, also if each of several processes wrote ranges of it."""

from __future__ import annotations

import json
import shutil
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end.product import assert_refused, contents, invoke
from end_to_end.test_divided_checkpoints import complete, go, restored

from surogate.checkpoints import hf, saved_tensors
from surogate.checkpoints.manifest import MANIFEST, hash_file, read_manifest, write_manifest
from surogate.checkpoints.model_ranges import join_ranges, load_model, write_ranges
from surogate.checkpoints.progress import Progress
from surogate.checkpoints.saved_run import SavedRun, model_export
from surogate.checkpoints.states import FOLDER
from surogate.checkpoints.stored_weights import RANGES_FOLDER, open_weights
from surogate.outputs.check import OutputCheck
from surogate.training.run_files import PartFiles, RunFiles
from surogate.world.processes import Processes
from surogate_core.api import World
from surogate_core.api.world import LocalStore
from surogate_core.errors import ConfigError
from surogate_core.program.shards import is_divisible, part_size
from surogate_core.program.value import Shard, Value
from surogate_core.runtime.pieces import Pieces, pieces_of

if TYPE_CHECKING:
    from end_to_end.product import Workplace

    from surogate_core.runtime.worker import Worker

BF16 = {"model_dtype": "bf16", "master_dtype": "fp32"}


def dividing(saved_run: SavedRun, ranks: int) -> SavedRun:
    """Return the run with the parts of `ranks` ranks in place of matrices."""
    assembly = saved_run.plan.assembly

    def divided(value: Value) -> Value:
        if not is_divisible(value.shape, ranks):
            return value
        return replace(value, shape=(part_size(value.size, ranks),), shard=Shard(value.shape, ranks))

    declared = tuple(divided(v) if v.role == "param" else v for v in assembly.declared)
    assembly = replace(assembly, declared=declared)
    return replace(saved_run, plan=replace(saved_run.plan, assembly=assembly))


def parts_of(worker: Worker, whole: SavedRun, first: int, count: int) -> Callable[[Value], Pieces]:
    """Return what a process with these ranks has of the weights of a worker that has all."""
    values = {value.name: value for value in whole.values}

    def pieces(value: Value) -> Pieces:
        tensor = worker.buffers.persistent(values[value.name])
        if value.shard is None:
            return Pieces.of(tensor)
        padded = torch.full((value.size * value.shard.parts,), torch.nan, dtype=tensor.dtype)
        padded[: tensor.numel()] = tensor.view(-1)
        return pieces_of(value, padded.split(value.size).__getitem__, range(first, first + count))

    return pieces


def own(saved_run: SavedRun, pieces: Callable[[Value], Pieces], process: int) -> dict[str, Pieces]:
    """Return what a process writes of the weights."""
    return {value.name: pieces(value) for value in saved_run.weights if value.shard or process == 0}


@pytest.fixture
def whole(here: Workplace) -> Path:
    return go(here, 1, max_steps=2, optimizer="adamw", **BF16) / "step_00000002"


@pytest.mark.parametrize("shard_bytes", [hf.MAX_SHARD_BYTES, 50_000])
@pytest.mark.parametrize("bounds", [(0, 1, 2), (0, 2, 3), (0, 1, 2, 3, 4)])
def test_ranges_of_a_model_are_joined_to_the_files_of_one_process(
    here: Workplace, whole: Path, bounds: tuple[int, ...], shard_bytes: int
) -> None:
    one, parts, joined = here.root / "one", here.root / "parts", here.root / "joined"
    for folder in (one, parts, joined):
        folder.mkdir()
    with restored(here, whole, 1, optimizer="adamw", **BF16) as (saved_run, worker):
        weights = {value.name: worker.pieces(value) for value in saved_run.weights}
        export = replace(model_export(saved_run.run, saved_run.plan, weights), max_shard_bytes=shard_bytes)
        hf.write_model(one, export)
        divided = dividing(saved_run, bounds[-1])
        for process, (begin, end) in enumerate(pairwise(bounds)):
            pieces = parts_of(worker, saved_run, begin, end - begin)
            write_ranges(parts, replace(export, params=own(divided, pieces, process)), process)
        threads = here.root / "threads"
        threads.mkdir()
        ranks = own(divided, parts_of(worker, saved_run, 0, bounds[-1]), 0)
        hf.write_model(threads, replace(export, params=ranks))
        assert contents(threads) == contents(one)
        cleared = {name: replace(p, tensors=[torch.zeros_like(t) for t in p.tensors]) for name, p in ranks.items()}
        open_weights(one, saved_run.plan.assembly.weights).load(cleared)
        for name, held in ranks.items():
            assert all(torch.equal(*pair) for pair in zip(held.tensors, cleared[name].tensors, strict=True)), name
        read = {name: Pieces.of(torch.zeros_like(p.tensor())) for name, p in weights.items()}
        load_model(parts, saved_run.plan.assembly.weights, read)
        assert all(torch.equal(p.tensor(), weights[name].tensor()) for name, p in read.items())
        with pytest.raises(ConfigError, match=f"surogate export {parts} OUTPUT"):
            open_weights(parts, saved_run.plan.assembly.weights).load(read)
    join_ranges(joined, parts)
    expected = {name: data for name, data in contents(one).items() if name.startswith("model")}
    assert contents(joined) == expected and (len(expected) > 2) == (shard_bytes == 50_000)
    assert {n: d for n, d in contents(one).items() if n not in expected} == {
        name: data for name, data in contents(parts).items() if not name.startswith(RANGES_FOLDER)
    }


@pytest.fixture
def ranges(here: Workplace, whole: Path) -> Path:
    """A checkpoint of two processes, each of which has a rank with parts of the model."""
    parts = here.root / "step_00000002"
    parts.mkdir()
    with restored(here, whole, 1, optimizer="adamw", **BF16) as (saved_run, worker):
        divided = dividing(saved_run, 2)
        mine, theirs = (divided.write(parts, parts_of(worker, saved_run, rank, 1), rank, 2) for rank in (0, 1))
        complete(divided, parts, mine, theirs)
    assert not (parts / "model.safetensors").exists()
    return parts


def test_a_checkpoint_of_any_number_of_processes_is_exported(here: Workplace, whole: Path, ranges: Path) -> None:
    model = {n: d for n, d in contents(whole).items() if n != MANIFEST and not n.startswith(FOLDER)}
    for checkpoint in (whole, ranges):
        out = here.root / "exported" / checkpoint.parent.name
        done = invoke("export", checkpoint, out)
        assert done.returncode == 0 and done.stdout == f"exported {checkpoint}: {out}\n"
        assert contents(out) == model
    assert_refused(invoke("export", whole, out), "is not empty")
    assert invoke("export", whole, out, "--overwrite").returncode == 0
    for checkpoint in (whole, ranges, out):
        quantized = here.root / "quantized" / checkpoint.parent.name / checkpoint.name
        assert invoke("export", checkpoint, quantized, "--format", "nvfp4").returncode == 0
    first, *others = (contents(path.parent) for path in sorted(here.root.glob("quantized/*/*/config.json")))
    assert len(others) == 2 and all(other == first for other in others)


def test_an_export_holds_a_block_of_a_tensor_in_memory(
    ranges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = 1 << 14
    monkeypatch.setattr(saved_tensors, "BLOCK_BYTES", block)
    join_ranges(tmp_path, ranges)  # what it imports is not counted
    tracemalloc.start()
    join_ranges(tmp_path, ranges)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * block < (tmp_path / "model.safetensors").stat().st_size / 2


def test_a_run_resumes_from_ranges_of_its_model(here: Workplace, whole: Path, ranges: Path) -> None:
    for ranks in (1, 3):
        with restored(here, ranges, ranks, optimizer="adamw", **BF16) as (saved_run, worker):
            again = here.root / f"again{ranks}"
            again.mkdir()
            saved_run.write(again, worker.pieces, 0, 1)
            assert contents(again) == {n: d for n, d in contents(whole).items() if n != MANIFEST}


def test_what_cannot_be_exported_is_refused(here: Workplace, whole: Path, ranges: Path) -> None:
    out = here.root / "out2"
    assert_refused(invoke("export", here.root / "model", out), "holds neither model.safetensors nor model.safetensors.")
    assert_refused(invoke("export", here.root / "none", out), "none: does not exist. Name the output of a run, a check")
    assert_refused(invoke("export", here.root / "run.yaml", out), "run.yaml: is a file. Name the output of a run")
    (here.root / "empty").mkdir()
    assert_refused(invoke("export", here.root / "empty", out), "empty: holds no model, no checkpoint and no adapter.")
    assert_refused(invoke("export", whole, whole / "x"), "is inside of", "which its run may delete")
    unfinished = here.root / "unfinished"
    shutil.copytree(whole, unfinished / whole.name)
    assert_refused(invoke("export", unfinished, out), f"a folder of checkpoints. Name one: {unfinished / whole.name}")
    assert_refused(invoke("export", whole, out, "--base", "base"), "--base base: ", "holds a model, not an adapter")
    assert_refused(invoke("export", whole, out, "--format", "hf:f32"), "hf has no types. Use --format hf.")
    (file,) = ranges.glob(f"{RANGES_FOLDER}/model-process-00001-*")
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    assert_refused(invoke("export", ranges, out), "the checkpoint is damaged", file.name)
    file.unlink()
    manifest = read_manifest(ranges)
    files = dict(manifest.files)
    del files[f"{RANGES_FOLDER}/{file.name}"]
    write_manifest(ranges, replace(manifest, files=files))
    assert_refused(invoke("export", ranges, out), "no file holds element", "of model.embed_tokens.weight [2048, 64]")
    index = ranges / RANGES_FOLDER / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"]["another"] = "model.safetensors"
    index.write_text(json.dumps(found))
    file.write_bytes(content)
    files[f"{RANGES_FOLDER}/{file.name}"] = {"bytes": len(content), "xxh3_128": hash_file(file)}
    files[f"{RANGES_FOLDER}/{index.name}"] = {"bytes": index.stat().st_size, "xxh3_128": hash_file(index)}
    write_manifest(ranges, replace(manifest, files=files))
    assert_refused(invoke("export", ranges, out), "differ in another")
    assert not out.exists()


def test_an_adapter_is_merged_on_the_way(here: Workplace, whole: Path) -> None:
    """From its folder, a checkpoint or the output of its run: the files of `surogate merge`."""
    base, out = here.root / "base", here.root / "lora"
    invoke("export", whole, base)
    keys = {"lora": True, "from_scratch": False, "model": str(base), "output_dir": str(out)}
    checkpoint = go(here, 1, max_steps=2, **keys) / "step_00000002"
    assert invoke("merge", out / "adapter", here.root / "merged").returncode == 0
    for number, folder in enumerate((out / "adapter", checkpoint, out)):
        done = invoke("export", folder, here.root / f"exported{number}")
        assert done.returncode == 0, done.stderr
        assert contents(here.root / f"exported{number}") == contents(here.root / "merged")
    shutil.copytree(here.root / "merged", out / "merged")
    (out / "adapter").rename(here.root / "elsewhere")
    assert invoke("export", out, here.root / "again").returncode == 0
    assert contents(here.root / "again") == contents(here.root / "merged")


def test_the_output_of_a_run_is_exported_as_it_is(here: Workplace, whole: Path) -> None:
    assert invoke("export", here.out, here.root / "exported").returncode == 0
    model = {n: d for n, d in contents(whole).items() if n != MANIFEST and not n.startswith(FOLDER)}
    assert contents(here.root / "exported") == model


def test_processes_write_the_final_model_of_one_process(here: Workplace, whole: Path) -> None:
    """Each is a thread here, because no run divides weights between processes yet."""
    model = {n: d for n, d in contents(whole).items() if n != MANIFEST and not n.startswith(FOLDER)}
    store = LocalStore()
    with restored(here, whole, 1, optimizer="adamw", **BF16) as (saved_run, worker):
        divided = dividing(saved_run, 2)
        shutil.rmtree(here.out)
        here.out.mkdir()

        def process(index: int) -> None:
            world = World(size=1, processes=2, process=index, ranks=range(index, index + 1), store=store)
            fake: Any = type("W", (), {"settle": lambda self: None})()
            fake.pieces = parts_of(worker, saved_run, index, 1)
            given: Any = (divided, None, Processes(world), print)
            files = PartFiles(*given) if index else RunFiles(*given, OutputCheck())
            files.write_outputs(fake, Progress(step=2), 60)

        threads = [threading.Thread(target=process, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert contents(here.out) == model
