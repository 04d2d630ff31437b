"""What a weight format writes and reads is checked: each fault names the function of the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from surogate.checkpoints.checked_form import CheckedForm
from surogate_core.api import CheckpointForm, HFTensor, WeightFormatDef
from surogate_core.errors import ConfigError, PluginError
from surogate_core.origin import Origin

W = HFTensor("w", (4, 8))
STATES = (torch.arange(32, dtype=torch.uint8).reshape(4, 8), torch.linspace(1, 2, 4), torch.ones(1, 2))
"""Codes, scales, and a state that is computed from them."""

ORIGIN = Origin("weight format", "acme", "acme", "0.1.0", "acme")
FORM = CheckpointForm(
    matches=lambda config: config.get("quant_method") == "acme",
    check=lambda config, options: None,
    parts=lambda name, options: [name, f"{name}_scale"],
    load=lambda tensor, parts, options: [parts[tensor.name], parts[f"{tensor.name}_scale"]],
    save=lambda tensor, states, dtype, options: {tensor.name: states[0], f"{tensor.name}_scale": states[1]},
    config=lambda kept, options: {"quant_method": "acme"},
)


def checked(**functions: Callable[..., Any]) -> CheckedForm:
    format = WeightFormatDef(
        name="acme",
        summary="",
        options=BaseModel,
        key="acme",
        quantize=lambda *arguments: [],
        dequantize=lambda stored, context: stored[0],
        origin=ORIGIN,
    )
    return CheckedForm(format, replace(FORM, **functions), None)


def test_what_a_correct_form_writes_is_read_again() -> None:
    form = checked()
    parts = form.save(W, STATES, "bf16")
    assert set(parts) == {"w", "w_scale"} and form.config([]) == {"quant_method": "acme"}
    assert all(torch.equal(a, b) for a, b in zip(form.load(W, parts, STATES), STATES, strict=False))


def refuse(config: Any, options: Any) -> None:
    raise ConfigError("its block is 7.")


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ({"matches": lambda config: False}, "checkpoints.matches: refuses the config that checkpoints.config returns"),
        ({"check": refuse}, "checkpoints.check: refuses the config .* returns: its block is 7"),
    ],
)
def test_a_form_accepts_its_own_config(functions: dict[str, Callable[..., Any]], message: str) -> None:
    with pytest.raises(PluginError, match=f"weight format acme of acme 0.1.0 failed in {message}"):
        checked(**functions).config([])


def as_int8(tensor: HFTensor, parts: dict[str, Tensor], options: Any) -> list[Tensor]:
    return [parts["w"].to(torch.int8), parts["w_scale"]]


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        (
            {"save": lambda tensor, states, dtype, options: {"w": states[0], "w_scales": states[1]}},
            "checkpoints.save: returned w, w_scales for w, expected what checkpoints.parts names, w, w_scale",
        ),
        (
            {
                "parts": lambda name, options: ["codes", "w_scale"],
                "save": lambda tensor, states, dtype, options: {"codes": states[0], "w_scale": states[1]},
            },
            "checkpoints.save: returned codes, w_scale for w, expected .* and w among them",
        ),
        (
            {"load": lambda tensor, parts, options: [parts["w"] + 1, parts["w_scale"]]},
            "checkpoints.load: state 0 of w is not what checkpoints.save was given",
        ),
        (
            {"load": as_int8},
            r"checkpoints.load: returned int8 \[4, 8\] for state 0 of w, expected uint8 \[4, 8\]",
        ),
    ],
)
def test_a_form_reads_the_bits_that_it_writes(functions: dict[str, Callable[..., Any]], message: str) -> None:
    with pytest.raises(PluginError, match=f"weight format acme of acme 0.1.0 failed in {message}"):
        checked(**functions).save(W, STATES, "bf16")


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "returned 0 states of w, expected the first of its 3"),
        ([*STATES, STATES[0]], "returned 4 states of w, expected the first of its 3"),
        ([STATES[0].float()], r"returned float32 \[4, 8\] for state 0 of w, expected uint8 \[4, 8\]"),
        ([STATES[0][:, :7]], r"returned uint8 \[4, 7\] for state 0"),
        ([torch.cat([STATES[0], STATES[0]])], r"returned uint8 \[8, 8\] for state 0"),
        ([STATES[0], STATES[1].reshape(4, 1)], r"returned float32 \[4, 1\] for state 1 of w, expected float32 \[4\]"),
        ([STATES[0].numpy()], "returned a ndarray for state 0"),
    ],
    ids=str,
)
def test_loaded_states_have_the_dtypes_and_sizes_of_the_run_s(states: list[Any], message: str) -> None:
    form = checked(load=lambda tensor, parts, options: states)
    with pytest.raises(PluginError, match=f"weight format acme of acme 0.1.0 failed in checkpoints.load: {message}"):
        form.load(W, {}, STATES)
