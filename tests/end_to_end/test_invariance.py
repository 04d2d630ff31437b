"""What must not change the results of a run: the split of a batch, the process, evaluations, recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING

import pytest
from end_to_end.product import losses, records

from surogate import run

if TYPE_CHECKING:
    from end_to_end.conftest import Finished
    from end_to_end.product import Workplace

pytestmark = pytest.mark.slow

PARTS = ("block", "att", "ffn", "rmsnorm", "qkv", "swiglu")


def trained(workplace: Workplace, *overrides: str, name: str) -> tuple[list[float], list[float]]:
    """Train five steps into the output `name`; return losses and gradient norms."""
    out = workplace.root / name
    config = workplace.write(max_steps=5, validation_split_ratio=0.1, learning_rate=1e-3)
    run.train(run.load(config, [*overrides, f"output_dir={out}"]), notice=lambda line: None)
    return losses(out), [step["norm"] for step in records(out, "step")]


def test_the_split_of_a_batch_does_not_change_the_loss(here: Workplace) -> None:
    """Rows hold documents of unequal length, so a mean of the means of micro-batches would differ by far more."""
    results = {}
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        split = (f"per_device_train_batch_size={batch}", f"gradient_accumulation_steps={accumulation}")
        results[batch] = trained(here, *split, name=f"split{batch}")
    whole_losses, whole_norms = results.pop(8)
    assert len(whole_losses) == 5 and whole_losses[-1] < whole_losses[0]
    for split_losses, split_norms in results.values():
        assert split_losses == pytest.approx(whole_losses, rel=1e-5)
        assert split_norms == pytest.approx(whole_norms, rel=1e-4)


def test_the_labels_of_micro_batches_differ_in_number(here: Workplace) -> None:
    """The premise of the test above, which would prove nothing otherwise."""
    from surogate.data.corpora import load_corpora
    from surogate.data.loader import Loader

    config = run.load(here.write()).config
    formats = run.load_registry().dataset_formats()
    data = load_corpora(config, formats, here.root / "model", 2048, lambda line: None)
    micro = Loader(data.train, 1, 8, config.train_seed).step(0).micro
    assert len({batch.n_valid for batch in micro}) > 2


def test_the_same_run_in_two_processes_is_bit_identical(finished: Finished, here: Workplace) -> None:
    again = here.root / "again"
    done = finished.workplace.surogate("train", finished.workplace.root / "run.yaml", "--set", f"output_dir={again}")
    assert done.returncode == 0, done.stderr
    assert losses(again) == losses(finished.out)
    for file in ("model.safetensors", "step_00000006/model.safetensors"):
        assert (again / file).read_bytes() == (finished.out / file).read_bytes()


def test_evaluating_and_saving_do_not_change_training(here: Workplace) -> None:
    undisturbed = trained(here, "eval_steps=0", name="undisturbed")
    assert trained(here, "eval_steps=1", "save_steps=1", name="disturbed") == undisturbed
    assert len(records(here.root / "disturbed", "eval")) == 5
    first, second = (here.root / name / "model.safetensors" for name in ("undisturbed", "disturbed"))
    assert first.read_bytes() == second.read_bytes()


def test_recomputation_in_any_combination_is_bit_identical(here: Workplace) -> None:
    kept = trained(here, name="kept")
    combos: list[Sequence[str]] = [*((part,) for part in PARTS), *combinations(("att", "ffn", "rmsnorm"), 2), PARTS]
    combos += [("qkv", "swiglu"), ("rmsnorm", "qkv", "swiglu")]
    for combo in combos:
        chosen = [f"recompute_{part}=true" for part in combo]
        assert trained(here, *chosen, name="+".join(combo)) == kept, combo
    weights = [(here.root / name / "model.safetensors").read_bytes() for name in ("kept", "+".join(PARTS))]
    assert weights[0] == weights[1]


def test_chunks_of_the_head_do_not_change_the_loss(here: Workplace) -> None:
    whole, _ = trained(here, "lmhead_chunks=1", name="whole")
    for chunks in (2, 16, 256):
        assert trained(here, f"lmhead_chunks={chunks}", name=f"chunks{chunks}")[0] == pytest.approx(whole, rel=1e-5)


def test_every_mixture_of_dtypes_trains_to_about_the_same_loss(here: Workplace) -> None:
    exact, _ = trained(here, "optimizer=adamw", name="exact")
    keys = ("model_dtype", "master_dtype", "param_grad_dtype", "optimizer_state_dtype")
    for narrow in chain.from_iterable(combinations(keys, n) for n in (1, 2, 4)):
        chosen = ["optimizer=adamw", *(f"{key}=bf16" for key in narrow)]
        if "model_dtype" in narrow and "master_dtype" not in narrow:
            chosen.append("master_dtype=fp32")
        found, _ = trained(here, *chosen, name="+".join(narrow))
        assert found == pytest.approx(exact, abs=0.02), narrow
        assert found != exact
