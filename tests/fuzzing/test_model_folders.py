"""Damaged model folders are planned, tokenised and loaded, or refused with one error."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace

import pytest
import torch
from end_to_end.product import Workplace
from fuzzing.mutate import both_sides, of_file, refused, seeds
from fuzzing.test_data import ROWS, TEMPLATE

from surogate import run
from surogate.checkpoints import hf, stored_weights
from surogate.checkpoints.saved_run import model_export
from surogate.data.tokenizer import Tokenizer
from surogate_core.machine.devices import cpu
from surogate_core.plugins.discovery import load_registry
from surogate_core.runtime.pieces import Pieces

FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
SHARD_BYTES = 100_000


@pytest.fixture
def model(here: Workplace) -> Workplace:
    """Return a workplace whose model has sharded weights and a chat template."""
    folder = here.root / "model"
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    opened = run.open_run(run.load(here.write()))
    plan = run.plan(opened, cpu())
    pieces = {name: Pieces.of(torch.zeros(value.shape)) for name, value in plan.assembly.params.items()}
    made = here.root / "made"
    made.mkdir()
    export = model_export(opened, plan, pieces)
    hf.write_model(made, replace(export, dtype="fp32", max_shard_bytes=SHARD_BYTES))
    shutil.rmtree(folder)
    made.rename(folder)
    assert len(list(folder.glob("*.safetensors"))) > 2 and (folder / "chat_template.jinja").exists()
    return here


def refusals(workplace: Workplace, cases: range) -> list[bool]:
    folder = workplace.root / "model"
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    loaded = run.load(workplace.write(from_scratch=False))
    conversation = load_registry().dataset_formats()["conversation"]
    outcomes = []

    def use() -> None:
        plan = run.plan(loaded, cpu())
        inputs = plan.inputs
        values = plan.assembly.params.items()
        pieces = {name: Pieces.of(torch.empty(value.shape, device="meta")) for name, value in values}
        ignored, copies = inputs.model.ignored_tensors(inputs.dims), inputs.model.tied_copies(inputs.dims)
        stored_weights.open_weights(folder, plan.assembly.weights, ignored, copies).load(pieces)
        tokenizer = Tokenizer(folder)
        assert tokenizer.decode(tokenizer.encode_ids("To be")) is not None and tokenizer.padding_id >= 0
        assert len(tokenizer.token_bytes) == tokenizer.vocab_size
        for row in ROWS["conversation"][:2]:
            conversation.encode(row, tokenizer, conversation.options(tools_field="tools"))

    for seed in cases:
        choice = random.Random(seed)
        name = choice.choice((*FILES, "config.json", choice.choice(sorted(whole))))
        if choice.random() < 0.03:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(of_file(folder / name, choice))
        outcomes.append(refused(seed, use))
        (folder / name).write_bytes(whole[name])
    return outcomes


def test_a_damaged_model_is_used_or_refused(model: Workplace) -> None:
    both_sides(refusals(model, seeds(100)))


@pytest.mark.slow
def test_many_damaged_models_are_used_or_refused(model: Workplace) -> None:
    both_sides(refusals(model, seeds(300)))
