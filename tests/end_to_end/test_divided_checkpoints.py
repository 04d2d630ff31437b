"""Checkpoints of ranks that divide states: the files of one rank, read by any number of ranks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from end_to_end.product import contents, losses, records
from end_to_end.several import several, trained

from surogate import run
from surogate.checkpoints.manifest import MANIFEST, hash_file, read_manifest, verify_files
from surogate.checkpoints.progress import Progress
from surogate.checkpoints.resume import choose_checkpoint
from surogate.checkpoints.saved_run import SavedRun
from surogate.checkpoints.saved_tensors import read_tensors
from surogate_core.api.sealed import sealed, unsealed
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import cpu
from surogate_core.program.value import Value
from surogate_core.runtime.comms import copies
from surogate_core.runtime.pieces import Pieces, pieces_of

if TYPE_CHECKING:
    from end_to_end.product import Workplace

NARROW = {"model_dtype": "bf16", "master_dtype": "fp32", "param_grad_dtype": "bf16"}
OPTIMIZERS = {
    "adamw": NARROW | {"optimizer": "adamw", "optimizer_state_dtype": "bf16"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "normuon": NARROW | {"optimizer": "normuon"},
}
COMBINATIONS = [
    pytest.param(ranks, keys, id=f"{ranks}-{name}", marks=[pytest.mark.slow] if (ranks + i) % 3 else [])
    for ranks in (2, 3, 4)
    for i, (name, keys) in enumerate(OPTIMIZERS.items())
]
SPLITS = [
    pytest.param(ranks, first, keys, id=f"{ranks}-{begin}-{name}", marks=[pytest.mark.slow] if (begin + i) % 3 else [])
    for begin, (ranks, first) in enumerate([(2, (1,)), (3, (1,)), (4, (1, 2)), (4, (2,))])
    for i, (name, keys) in enumerate(OPTIMIZERS.items())
]
LEVEL_3 = pytest.param(3, OPTIMIZERS["normuon"] | {"zero_level": 3}, id="3-normuon-level-3")
WHOLE = pytest.param(2, OPTIMIZERS["adamw_8bit"] | {"zero_level": 3, "whole_blocks": 1}, id="2-adamw_8bit-whole-block")

STATES = "training_state"


def go(here: Workplace, ranks: int, **keys: Any) -> Path:
    """Train with 12 rows a step on some ranks, threads of this process; return the folder of the outputs."""
    rows = {"per_device_train_batch_size": 12 // ranks, "gradient_accumulation_steps": 1, "ranks_per_gpu": ranks}
    loaded = run.load(here.write(**{"max_steps": 4, "save_steps": 2, "eval_steps": 0, **rows, **keys}))
    run.train(loaded, notice=lambda line: None)
    return Path(loaded.config.output_dir)


def of_step(out: Path, step: int) -> dict[str, bytes]:
    """The contents of a checkpoint, without its manifest, which has times and settings."""
    return {name: data for name, data in contents(out / f"step_{step:08d}").items() if name != MANIFEST}


@pytest.mark.parametrize(("ranks", "keys"), [*COMBINATIONS, LEVEL_3, WHOLE])
def test_as_many_ranks_resume_bit_identically(here: Workplace, ranks: int, keys: dict[str, Any]) -> None:
    straight = go(here, ranks, output_dir=str(here.root / "straight"), **keys)
    shutil.copytree(straight / "step_00000002", here.out / "step_00000002")
    go(here, ranks, resume_from_checkpoint=True, **keys)
    assert of_step(straight, 4) == of_step(here.out, 4)
    assert (straight / "model.safetensors").read_bytes() == (here.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("recipe", ["bf16", "fp8-hybrid"])
def test_whole_blocks_change_no_byte_of_a_checkpoint(here: Workplace, recipe: str) -> None:
    """A save has the weights of whole blocks, which the micro-step after an update would gather."""
    keys = {**NARROW, "recipe": recipe, "optimizer": "adamw", "zero_level": 3}
    divided, whole = (go(here, 2, output_dir=str(here.root / f"{n}"), whole_blocks=n, **keys) for n in (0, 1))
    assert of_step(divided, 2) == of_step(whole, 2) and of_step(divided, 4) == of_step(whole, 4)
    assert (divided / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert losses(divided) == losses(whole)


@pytest.mark.parametrize("recipe", ["fp8-hybrid", "nvfp4"])
@pytest.mark.parametrize(("ranks", "whole"), [(2, 0), (2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
def test_quantized_weights_of_parts_resume_bit_identically(
    here: Workplace, recipe: str, ranks: int, whole: int
) -> None:
    """A save has the weights of which level 1 gathers only the codes between saves."""
    keys = {**NARROW, "recipe": recipe, "optimizer": "adamw"}
    straight = go(here, ranks, output_dir=str(here.root / "straight"), **keys)
    shutil.copytree(straight / "step_00000002", here.out / "step_00000002")
    keys |= {"zero_level": 3, "whole_blocks": whole, "recompute_block": True, "offload_quants": not whole}
    go(here, ranks, resume_from_checkpoint=2, **keys)
    assert of_step(straight, 4) == of_step(here.out, 4)
    assert losses(straight)[2:] == losses(here.out)
    assert (straight / "model.safetensors").read_bytes() == (here.out / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(keys, id=name, marks=pytest.mark.slow if name == "adamw_8bit" else ())
        for name, keys in OPTIMIZERS.items()
    ],
)
def test_a_run_goes_on_with_other_ranks_and_has_the_losses_of_one(here: Workplace, keys: dict[str, Any]) -> None:
    longer = {"save_steps": 1, "warmup_steps": 0, "learning_rate": 1e-3, **keys}
    straight = go(here, 1, output_dir=str(here.root / "straight"), **longer)
    for begun, ranks in enumerate((1, 2, 3, 1)):
        go(here, ranks, resume_from_checkpoint=begun or False, **longer)
        assert of_step(here.out, begun + 1).keys() == of_step(straight, 1).keys()
    assert [step["step"] for step in records(here.out, "step")] == [1, 2, 3, 4]
    assert losses(here.out) == pytest.approx(losses(straight), rel=2e-3 if "model_dtype" in keys else 1e-5)


# -------------------------------------------------------------------------------------------------- the same contents


@contextmanager
def restored(here: Workplace, checkpoint: Path, ranks: int, **keys: Any) -> Iterator[tuple[SavedRun, Any]]:
    """Yield a run of some ranks whose params and states are those of a checkpoint, and its worker."""
    loaded = run.load(here.write(ranks_per_gpu=ranks, **keys))
    resumed = choose_checkpoint(checkpoint.parent, str(checkpoint), "run.yaml", lambda line: None)
    assert resumed is not None
    plan = run.plan(loaded, cpu())
    opened = run.open_run(loaded)
    saved_run = SavedRun(
        run=opened,
        plan=plan,
        extends=lambda total: False,
        facts=resumed.manifest.facts,
        versions=resumed.manifest.versions,
        metrics=here.root / "none",
    )
    worker = run.make_worker(opened, plan, copies.connect([0] * ranks, 60.0))
    try:
        saved_run.restore(resumed, worker)
        yield saved_run, worker
    finally:
        worker.close()


def split(worker: Any, first: int, count: int) -> Callable[[Value], Pieces]:
    """Return what a process with these ranks of a team would have."""
    workers = worker._workers
    return lambda value: pieces_of(value, lambda r: workers[r].buffers.persistent(value), range(first, first + count))


def complete(saved_run: SavedRun, folder: Path, hashes: dict[str, str], others: dict[str, str]) -> None:
    files = {name: {"bytes": (folder / name).stat().st_size, "xxh3_128": found} for name, found in others.items()}
    saved_run.complete(folder, 2, Progress(loss=1.0), hashes, files)


@pytest.mark.parametrize(("ranks", "keys"), COMBINATIONS)
def test_ranks_of_one_process_write_the_bytes_that_one_rank_writes(
    here: Workplace, ranks: int, keys: dict[str, Any]
) -> None:
    whole = go(here, 1, max_steps=2, **keys) / "step_00000002"
    with restored(here, whole, ranks, **keys) as (saved_run, worker):
        assert any(value.shard for value in saved_run.values)
        again = here.root / "again"
        again.mkdir()
        saved_run.write(again, worker.pieces, 0, 1)
    expected = contents(whole)
    del expected[MANIFEST]
    assert contents(again) == expected


@pytest.mark.parametrize("level", [2, 3])
def test_every_level_writes_the_matrices_of_owners_as_one_rank_does(here: Workplace, level: int) -> None:
    keys, again = OPTIMIZERS["normuon"], here.root / "again"
    whole = go(here, 1, max_steps=2, **keys) / "step_00000002"
    again.mkdir()
    with restored(here, whole, 3, zero_level=level, **keys) as (saved_run, worker):
        assert {value.owner for value in saved_run.values} == {None, 0, 1, 2}
        saved_run.write(again, worker.pieces, 0, 1)
    assert contents(again) == {name: data for name, data in contents(whole).items() if name != MANIFEST}


@pytest.mark.parametrize(("ranks", "first", "keys"), SPLITS)
def test_ranges_of_several_processes_are_the_checkpoint_of_one(
    here: Workplace, ranks: int, first: tuple[int, ...], keys: dict[str, Any]
) -> None:
    """`first`: the first ranks of the second and later processes."""
    whole, parts, again = go(here, 1, max_steps=2, **keys) / "step_00000002", here.root / "parts", here.root / "again"
    parts.mkdir()
    again.mkdir()
    with restored(here, whole, ranks, **keys) as (saved_run, worker):
        bounds = [0, *first, ranks]
        written = [
            saved_run.write(parts, split(worker, begin, end - begin), process, len(first) + 1)
            for process, (begin, end) in enumerate(pairwise(bounds))
        ]
        complete(saved_run, parts, written[0], {name: found for more in written[1:] for name, found in more.items()})
    assert len(list(parts.glob(f"{STATES}/state-process-*"))) == len(first)
    with restored(here, parts, 1, **keys) as (saved_run, worker):
        saved_run.write(again, worker.pieces, 0, 1)
    expected = contents(whole)
    del expected[MANIFEST]
    assert contents(again) == expected
    with restored(here, parts, 3, **keys) as (saved_run, worker):
        held = [t for value in saved_run.values if value.shard for t in worker.pieces(value).tensors]
        before = [tensor.clone() for tensor in held]
        for tensor in held:
            tensor.zero_()
        saved_run.restore_parts(parts, worker)  # as a process that is not the writer does
        assert held and all(torch.equal(*pair) for pair in zip(before, held, strict=True))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first test with `parts` keeps them for the others."""
    return tmp_path_factory.mktemp("parts") / "step_00000002"


@pytest.fixture
def parts(here: Workplace, original: Path) -> Path:
    """A checkpoint of two ranks in two processes."""
    if not original.exists():
        whole = go(here, 1, max_steps=2, optimizer="adamw") / "step_00000002"
        original.mkdir()
        with restored(here, whole, 2, optimizer="adamw") as (saved_run, worker):
            mine, theirs = (saved_run.write(original, split(worker, rank, 1), rank, 2) for rank in (0, 1))
            complete(saved_run, original, mine, theirs)
    return shutil.copytree(original, here.root / "step_00000002")


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a file, and write the new hashes into the manifest."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    ranges = json.loads(header["__metadata__"]["ranges"])
    change(ranges)
    header["__metadata__"]["ranges"] = json.dumps(ranges)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
    manifest = path.parents[1] / MANIFEST
    found = unsealed(json.loads(manifest.read_text()))
    found["files"][f"{STATES}/{path.name}"] = {"bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
    manifest.write_text(json.dumps(sealed(found)))


NAME = "adamw.m.layers.0.attn.o"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ranges: ranges[NAME].__setitem__(0, 2000), rf"state-.*: {NAME}: element 2,000 is in two files"),
        (lambda ranges: ranges[NAME].__setitem__(0, -1), f"is not that of a checkpoint .*{NAME}"),
        (lambda ranges: ranges[NAME].__setitem__(0, "x"), "is not that of a checkpoint"),
        (lambda ranges: ranges.pop(NAME), f"state-process-00001.*{NAME} is a range of F32 .*, in .*state-00001-of"),
        (lambda ranges: ranges[NAME].__setitem__(1, [64, 65]), f"state-process-00001.*{NAME} is a range of F32"),
    ],
    ids=["overlap", "negative", "no number", "no range", "another shape"],
)
def test_ranges_that_do_not_fit_are_named_with_file_and_tensor(
    here: Workplace, parts: Path, change: Any, message: str
) -> None:
    (file,) = parts.glob(f"{STATES}/state-process-00001-*")
    edit(file, change)
    with pytest.raises(ConfigError, match=message), restored(here, parts, 1, optimizer="adamw"):
        pass


def test_a_missing_range_is_named_with_its_tensor(here: Workplace, parts: Path) -> None:
    (file,) = parts.glob(f"{STATES}/state-process-00001-*")
    file.unlink()
    with pytest.raises(ConfigError, match=rf"{STATES}: no file holds element [\d,]+ of adamw\.\S+ \["):
        read_tensors(sorted((parts / STATES).glob("*")))
    with pytest.raises(ConfigError, match=rf"damaged: .*{file.name}: missing"), restored(here, parts, 1):
        pass


def test_a_truncated_file_is_named(here: Workplace, parts: Path) -> None:
    (file,) = parts.glob(f"{STATES}/state-process-00001-*")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=f"{file.name}: cannot be read"):
        read_tensors([file])


# ---------------------------------------------------------------------------------------------------------- processes


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The states of a checkpoint, of whatever number of processes."""
    found = read_tensors(sorted((checkpoint / STATES).glob("*.safetensors")))
    return {name: torch.cat([block.clone() for _, block in t.read(0, t.count)]) for name, t in found.items()}


def same_states(one: Path, other: Path) -> None:
    ours, theirs = tensors(one), tensors(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].view(torch.uint8), theirs[name].view(torch.uint8)) for name in ours)


ROWS = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 1, "eval_steps": 0, "max_steps": 4}


@pytest.mark.parametrize("background", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_processes_save_what_threads_do_and_resume_bit_identically(here: Workplace, background: bool) -> None:
    keys = {"save_steps": 2, "save_in_background": background, **NARROW}
    threads = go(here, 2, output_dir=str(here.root / "threads"), **keys)
    once = trained(here, **ROWS, **keys)
    assert "saved step_00000002 in" in once.output(0) and "saved its part of step_00000002 in" in once.log(1)
    for step in (2, 4):
        saved = here.out / f"step_{step:08d}"
        same_states(threads / saved.name, saved)
        assert (threads / saved.name / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
        assert len(list(saved.glob(f"{STATES}/state-process-00001-*"))) == 1
    before = of_step(here.out, 4)
    trained(here, resume_from_checkpoint=2, **ROWS, **keys)
    assert of_step(here.out, 4) == before and losses(here.out) == losses(threads)
    go(here, 3, resume_from_checkpoint=2, **keys)
    assert losses(here.out) == pytest.approx(losses(threads), rel=2e-3)


REFUSED = """
import errno
from surogate.checkpoints import states
write = states.write_safetensors
def refuse(path, tensors):
    if rank == 1 and "step_00000002" not in str(path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return write(path, tensors)
states.write_safetensors = refuse
"""


@pytest.mark.parametrize("background", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_full_disk_at_another_process_drops_the_checkpoint_and_ends_all(here: Workplace, background: bool) -> None:
    keys = {**ROWS, "max_steps": 100, "save_steps": 2, "save_in_background": background}
    with several(here, fault=REFUSED, **keys) as run:
        assert run.statuses() == [3, 3], run.texts()
        (error,) = run.errors()
        assert "process 1 of 2: saving" in error and "No space left" in error and "step_00000002" in error
        assert run.checkpoints() == ["step_00000002"] and not list(here.out.glob("*.partial"))


KILLED = """
import os
from surogate.checkpoints import states
write = states.write_safetensors
def end(path, tensors):
    if rank == 1 and "step_00000002" not in str(path):
        os.kill(os.getpid(), 9)
    return write(path, tensors)
states.write_safetensors = end
"""


def test_a_process_that_is_killed_while_it_saves_leaves_complete_checkpoints(here: Workplace) -> None:
    with several(here, fault=KILLED, **{**ROWS, "max_steps": 100, "save_steps": 2}) as run:
        assert run.statuses() == [3, -9], run.texts()
        (error,) = run.errors()
        assert "process 1" in error and "is gone" in error
        assert run.checkpoints() == ["step_00000002"]
        verify_files(here.out / "step_00000002", read_manifest(here.out / "step_00000002"))


NO_RECORDS = """
from surogate_core.errors import RunStopped
from surogate.reporting import metrics
report = metrics.JsonLinesLogger.report
def refuse(self, found):
    if found.step >= 3:
        raise RunStopped("metrics.jsonl: No space left on device")
    report(self, found)
metrics.JsonLinesLogger.report = refuse
"""


@pytest.mark.parametrize("steps", [pytest.param(3, marks=pytest.mark.slow), 100])
def test_all_processes_save_before_a_logger_of_one_ends_the_run(here: Workplace, steps: int) -> None:
    with several(here, fault=NO_RECORDS, **{**ROWS, "max_steps": steps, "save_steps": 0}) as run:
        assert run.statuses() == [3, 3], run.texts()
        assert run.errors() == ["error: metrics.jsonl: No space left on device"]
        (saved,) = run.checkpoints()
        assert int(saved[-8:]) >= 3 and tensors(here.out / saved)


UNSHARED = """
from surogate.training import joint_write
if rank == 1:
    joint_write._read = lambda path: ""
"""


def test_a_folder_that_a_process_does_not_see_is_refused_before_the_first_step(here: Workplace) -> None:
    with several(here, fault=UNSHARED, **ROWS) as run:
        assert run.statuses() == [2, 2], run.texts()
        (error,) = run.errors()
        assert "checkpoint_dir: process 1 (host " in error and f"does not see {here.out} of process 0" in error
        assert not list(here.out.glob(".saving*")) and not list(here.out.glob("metrics*"))


UNSEEN = """
from surogate.checkpoints import saved_run
if rank == 1:
    from pathlib import Path
    restore = saved_run.SavedRun.restore_parts
    saved_run.SavedRun.restore_parts = lambda self, folder, worker: restore(self, Path("elsewhere"), worker)
"""


def test_a_checkpoint_that_a_process_does_not_see_is_refused(here: Workplace) -> None:
    go(here, 2, max_steps=2)
    with several(here, fault=UNSEEN, resume_from_checkpoint=True, **{**ROWS, "max_steps": 2}) as run:
        assert run.statuses() == [2, 2], run.texts()
        (error,) = run.errors()
        assert error.startswith("error: process 1 of 2: resume_from_checkpoint: elsewhere is not there.")
