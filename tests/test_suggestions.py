"""Suggestions for a run that does not fit: each one, written into the config, saves exactly what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core import run
from surogate_core.errors import ConfigError
from surogate_core.planning import plan as plan_module
from surogate_core.planning.assemble import assemble
from surogate_core.planning.candidates import candidates
from surogate_core.planning.plan import Plan
from surogate_core.planning.run import Run
from surogate_core.planning.suggestions import Suggestion, suggest

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
SIZES = {
    "tiny": {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 512},
    "8b": {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "70b": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672},
    "32b": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
}
Planned = tuple[Run, Plan]
Make = Callable[..., Planned]


@pytest.fixture
def plan(tmp_path: Path) -> Make:
    """Return a function that plans a run: (size, device, key=value ...) -> run and plan."""

    def planned(size: str, device: str, *overrides: str, **keys: Any) -> Planned:
        model = tmp_path / size
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(BASE | SIZES[size]))
        config = tmp_path / f"{size}.yaml"
        config.write_text(json.dumps({"model": str(model), "sequence_len": 1024} | keys))
        opened = run.open_run(run.load(config, list(overrides)))
        return opened, run.plan(opened, device)

    return planned


def overrides(suggestion: Suggestion) -> list[str]:
    """Return the --set arguments of a suggestion like "a: 1, b: 2"."""
    return [part.replace(": ", "=") for change in suggestion.changes for part in change.split(", ")]


def check_exact(plan: Make, size: str, device: str, suggestions: list[Suggestion], before: Plan, **keys: Any) -> None:
    for suggestion in suggestions:
        _, after = plan(size, device, *overrides(suggestion), **keys)
        saved = before.report.device_bytes["total"] - after.report.device_bytes["total"]
        assert saved == suggestion.saves > 0, suggestion
        assert after.report.step.seconds - before.report.step.seconds == pytest.approx(suggestion.costs), suggestion
        assert after.report.fits is (suggestion.missing == 0), suggestion
        assert after.report.tokens == before.report.tokens, f"{suggestion}: the tokens of a step are the user's"


def test_single_changes_are_suggested_if_one_is_enough(plan: Make) -> None:
    opened, before = plan("8b", "h200", sequence_len=4096, recompute=False)
    suggestions = suggest(opened, before)
    assert [len(s.changes) for s in suggestions] == [1, 1, 1] and not any(s.missing for s in suggestions)
    assert suggestions == sorted(suggestions, key=lambda s: s.costs)
    assert ("recompute: auto",) in [s.changes for s in suggestions]
    check_exact(plan, "8b", "h200", suggestions, before, sequence_len=4096, recompute=False)


@pytest.mark.parametrize(
    ("device", "word", "suggested"), [("h200", "auto", ""), ("h200", "false", "auto"), ("cpu", "false", "true")]
)
def test_recomputation_is_suggested_unless_the_plan_has_chosen_it_already(
    plan: Make, device: str, word: str, suggested: str
) -> None:
    opened, planned = plan("tiny", device, recompute=word)
    changes = {change for candidate in candidates(opened, planned) for change in candidate.changes}
    assert {c for c in changes if c.startswith("recompute")} == ({f"recompute: {suggested}"} if suggested else set())


def test_nothing_is_left_to_recompute_of_whole_blocks(plan: Make) -> None:
    opened, planned = plan("tiny", "h200", recompute="false", recompute_block=True)
    changes = {change for candidate in candidates(opened, planned) for change in candidate.changes}
    assert changes and not any("recompute" in change for change in changes)


CASES: dict[str, tuple[str, str, dict[str, Any], list[int]]] = {
    "an adapter of 70B needs several changes": ("70b", "h200", {"lora": True, "sequence_len": 2816}, [0]),
    "and shorter rows as the last resort": ("70b", "h200", {"lora": True, "sequence_len": 4096}, [1, 0]),
    "all of 32B cannot be trained, an adapter can": ("32b", "h200", {"sequence_len": 4096}, [1, 0]),
    "an adapter and recomputation": ("8b", "rtx4090", {"sequence_len": 4096}, [1, 0]),
    "an odd batch is not halved": ("8b", "h100", {"per_device_train_batch_size": 3, "recompute": False}, [0, 0]),
}
"""Name -> size, device, keys, and for each suggestion whether the run still does not fit."""


SLOW = {name for name, (size, *_) in CASES.items() if size in ("70b", "32b")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES])
def test_changes_are_combined_until_the_run_fits(plan: Make, name: str) -> None:
    size, device, keys, missing = CASES[name]
    opened, before = plan(size, device, **keys)
    assert not before.report.fits
    suggestions = suggest(opened, before)
    assert [int(s.missing > 0) for s in suggestions] == missing
    assert len(suggestions[0].changes) > 1
    check_exact(plan, size, device, suggestions, before, **keys)
    text = " ".join(", ".join(s.changes) for s in suggestions)
    assert ("sequence_len" in text) is ("shorter rows" in name)
    assert ("lora: true" in text) is not keys.get("lora", False)
    assert "per_device_train_batch_size" not in text or before.inputs.batch_size % 2 == 0


def test_few_plans_are_made_for_a_suggestion(plan: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of combinations are estimated; only those that are shown and few others are planned."""
    opened, before = plan("8b", "rtx4090", sequence_len=4096)
    made: list[object] = []
    monkeypatch.setattr(plan_module, "assemble", lambda given: made.append(given) or assemble(given))
    assert len(suggest(opened, before)) == 2
    assert len(made) <= 6, "two or three for each, because of recompute: auto"


def test_a_run_that_fits_or_cannot_be_changed_has_no_suggestions(plan: Make) -> None:
    assert suggest(*plan("tiny", "h200")) == []
    bare = {"per_device_train_batch_size": 1, "sequence_len": 255, "recompute_block": True}
    bare |= {"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16", "lora": True}
    assert suggest(*plan("70b", "rtx3090", **bare)) == []


def test_a_run_that_does_not_fit_is_refused_with_the_suggestions(plan: Make) -> None:
    opened, planned = plan("8b", "rtx4090", sequence_len=4096)
    with pytest.raises(ConfigError) as refused:
        run.refuse_unless_it_fits(opened, planned)
    text = str(refused.value)
    for suggestion in suggest(opened, planned):
        assert ", ".join(suggestion.changes) in text
    assert "still missing" in text and "; or lora: true" in text


def test_sizes_that_the_recipe_refuses_are_not_suggested(plan: Make) -> None:
    """Products in FP8 take a multiple of 16 tokens: two rows of 2,056, but not one."""
    opened, planned = plan("8b", "l40s", recipe="fp8-hybrid", sequence_len=2056)
    suggestions = suggest(opened, planned)
    assert suggestions and not any("batch_size: 1," in change for s in suggestions for change in s.changes)
