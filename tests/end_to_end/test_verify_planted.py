"""`surogate verify` on random models of four families: correct ones pass, and an error planted in one block is found
there, in fp32 and in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from end_to_end.planted import BLOCK, ERRORS, plant, registry_for_tests, write_random_model

from surogate import run
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_verify import transformers_side, verification
from surogate_verify.observed import Observed
from surogate_verify.programs import Subject
from surogate_verify.verification import Verification, verify

FAMILIES = ["qwen2", "qwen3", "llama", "olmo2"]

Change = Callable[[PlanInputs], PlanInputs]


class Bench:
    """Verifies models after `change`. Results of transformers are computed once per model and precision."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.change: Change = lambda given: given
        self._results: dict[tuple[Any, ...], Observed] = {}
        registry, plan_run, observe = registry_for_tests(), verification.plan_run, transformers_side.observe
        monkeypatch.setattr(run, "load_registry", lambda **_: registry)

        def plan_changed(*args: Any) -> Plan:
            *others, revise = args
            return plan_run(*others, lambda given: self.change(revise(given)))

        def observe_once(subject: Subject, rows: Any, scratch: Path, compute: torch.dtype, *more: Any) -> Observed:
            key = (subject.run.model_dir, compute, subject.plan.inputs.precision.model, *more[1:])
            if key not in self._results:
                self._results[key] = observe(subject, rows, scratch, compute, *more)
            return self._results[key]

        monkeypatch.setattr(verification, "plan_run", plan_changed)
        monkeypatch.setattr(transformers_side, "observe", observe_once)

    def verify(self, model: Path, dtype: str, *overrides: str) -> Verification:
        config = {"model": str(model), "output_dir": str(self.root / "out"), "sequence_len": 32, "learning_rate": 1e-3}
        path = self.root / "run.yaml"
        path.write_text(yaml.safe_dump({**config, "max_steps": 1, "model_dtype": dtype}))
        return verify(path, overrides, notice=lambda line: None)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(0)
    return Bench(tmp_path, monkeypatch)


def all_rows(result: Verification) -> list[tuple[str, float, float]]:
    return [(row.name, row.error, row.allowed) for verdict in result.verdicts for row in verdict.rows if not row.ok]


# ----------------------------------------------------------------------------------------------------- correct models

CONDITIONS = {
    "key biases of 30": {"family": "qwen2", "key_bias": 30.0},
    "key biases of 100": {"family": "qwen2", "key_bias": 100.0, "seed": 1},
    "key biases of 100, llama": {"family": "llama", "key_bias": 100.0, "eps": 1e-5},
    "post norms": {"family": "olmo2"},
    "tiny eps and post norms": {"family": "olmo2", "eps": 1e-12, "seed": 1},
    "tiny eps": {"family": "qwen3", "eps": 1e-12},
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_correct_model_passes_in_fp32_even_with_ill_conditioned_gradients(bench: Bench, condition: str) -> None:
    result = bench.verify(write_random_model(bench.root / "model", **CONDITIONS[condition]), "fp32")
    assert result.passed, all_rows(result)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("condition", CONDITIONS)
def test_correct_models_pass_in_bf16(bench: Bench, condition: str, seed: int) -> None:
    settings = {**CONDITIONS[condition], "seed": seed}
    result = bench.verify(write_random_model(bench.root / "model", **settings), "bf16")
    assert result.passed, all_rows(result)


EVEN = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
"""Sizes that formats of four bits divide."""


@pytest.mark.parametrize(
    "family", ["olmo2", *(pytest.param(name, marks=pytest.mark.slow) for name in (*FAMILIES[:3], "gemma2"))]
)
def test_correct_models_pass_under_recipes_that_quantize(bench: Bench, family: str) -> None:
    """In OLMo 2, norms follow the products, and the stream of its blocks is quantized itself."""
    model = write_random_model(bench.root / "model", family, layers=6, **EVEN)
    for recipe in ("fp8-hybrid", "nvfp4"):
        result = bench.verify(model, "bf16", f"recipe={recipe}")
        assert result.passed, (recipe, all_rows(result))
        assert not result.verdict.not_compared


# ------------------------------------------------------------------------------------------------------ planted errors


def test_a_factor_of_the_embedding_that_bf16_would_round_is_exact_in_the_truth(bench: Bench) -> None:
    """transformers makes it in the dtype in which a model is loaded."""
    result = bench.verify(write_random_model(bench.root / "model", "gemma2", layers=1), "bf16")
    assert result.passed, all_rows(result)


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_errors_are_found_in_their_block(bench: Bench, family: str) -> None:
    """In fp32 and in bf16, in models with gradients as ill-conditioned as those of published models."""
    model = write_random_model(bench.root / "model", family, key_bias=30.0 if family != "olmo2" else 0.1)
    for dtype in ("fp32", "bf16"):
        for error in ERRORS:
            bench.change = lambda given, error=error: plant(given, error)
            wrong = bench.verify(model, dtype).first_wrong
            assert wrong is not None, f"{error} in {dtype} was not found"
            assert wrong.layer == BLOCK, f"{error} in {dtype} was found in {wrong.name}"


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_planted_in_the_bf16_program_only_are_found(bench: Bench, family: str) -> None:
    """Errors as a recipe or its kernels could have them: in fp32 the model is correct."""
    model = write_random_model(bench.root / "model", family)
    for error in ("swapped head", "RoPE off by one"):

        def only_in_bf16(given: PlanInputs, error: str = error) -> PlanInputs:
            return plant(given, error) if given.precision.model == "bf16" else given

        bench.change = only_in_bf16
        result = bench.verify(model, "bf16")
        assert result.in_fp32 is not None and result.in_fp32.passed
        wrong = result.verdict.first_wrong
        assert wrong is not None and wrong.layer == BLOCK, (error, wrong)


@pytest.mark.parametrize("family", ["qwen3", "olmo2", pytest.param("llama", marks=pytest.mark.slow)])
def test_errors_planted_in_a_quantized_program_only_are_found(bench: Bench, family: str) -> None:
    model = write_random_model(bench.root / "model", family, **EVEN)
    bench.change = lambda given: plant(given, "swapped head") if given.precision.model == "bf16" else given
    result = bench.verify(model, "bf16", "recipe=fp8-hybrid")
    assert result.in_fp32 is not None and result.in_fp32.passed
    wrong = result.verdict.first_wrong
    assert wrong is not None and wrong.layer == BLOCK, wrong


def test_a_model_with_its_own_dropout_is_refused(bench: Bench) -> None:
    """Dropout is off in transformers. That of an adapter can be left out, that of a model cannot."""
    model = write_random_model(bench.root / "model", "olmo2", layers=1)

    def always_dropping(given: PlanInputs) -> PlanInputs:
        return replace(given, ops={**given.ops, "add": replace(given.ops["add"], training_only=True)})

    bench.change = always_dropping
    with pytest.raises(ConfigError, match="olmo2 has add, a training-only op"):
        bench.verify(model, "fp32")
