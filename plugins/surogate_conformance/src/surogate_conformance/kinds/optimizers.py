"""Checks of optimizers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

from torch import Tensor

from surogate.config.values import StorageDtype
from surogate_core.api import OptimizerDef
from surogate_core.assembly.assemble import record
from surogate_core.assembly.inputs import PlanInputs, by_block
from surogate_core.errors import ConfigError

from ..bench import Bench, Steps, differing, shown, unchanged
from ..check import NotApplicable, proves, variants
from .training import OPTIONS, check_falls, check_resumes, check_skips

SEVERAL: tuple[dict[str, Any], ...] = (
    {},
    {"model_dtype": "bf16", "master_dtype": "fp32"},
    {"model_dtype": "bf16", "master_dtype": "bf16"},
)
"""Dtypes of params and masters: one, a working copy, a master that is rounded stochastically."""


def _runs(definition: OptimizerDef, bench: Bench) -> list[dict[str, Any]]:
    return [{"optimizer": definition.name, **keys} for keys in variants(bench, definition, [{}])]


@proves(
    "optimizer",
    remedy="Check the sign and size of the update. " + OPTIONS.format("optimizer NAME"),
)
def it_trains_and_the_loss_falls(definition: OptimizerDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_falls(bench, keys)


@proves("optimizer", remedy="Multiply the gradient by clip_coef, once.")
def the_gradient_that_it_uses_is_clipped(definition: OptimizerDef, bench: Bench) -> None:
    """With a norm above max_grad_norm, a larger gradient is clipped to the same one, up to the rounding of the norm.

    States are compared too, because the first step of Lion or Adam is a sign, whatever the size of the gradient.
    """
    for keys in _runs(definition, bench):
        runs = []
        for factor in (1.0, 1024.0):
            steps = bench.steps(**keys, max_grad_norm=1e-3)
            before = _contents(steps)
            steps.step(factor / steps.batch.n_valid, lr=keys.get("learning_rate", 1e-2))
            runs.append({n: x - before[n] for n, x in _contents(steps).items()})
        for name, moved in runs[0].items():
            size = float(moved.norm())
            error = float((moved - runs[1][name]).norm()) / size if size else float(runs[1][name].norm())
            assert error <= 1e-2, (
                f"a gradient 1024 times as large, clipped to the same norm, moves {name} {error:.1%} differently"
            )


def _contents(steps: Steps) -> dict[str, Tensor]:
    """Return copies of the params and of the states of the optimizer."""
    states = {state.name for state in record(steps.plan.inputs).states}
    of_optimizer = {v.name: steps.view(v) for v in steps.assembly.allocated if v.name in states}
    return {name: x.double().clone() for name, x in {**steps.worker.params(), **of_optimizer}.items()}


@proves("optimizer", remedy="Write nothing where clip_coef is not finite: neither params nor states.")
def a_step_that_is_skipped_changes_nothing(definition: OptimizerDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        for dtypes in SEVERAL:
            for state in definition.state_dtypes:
                check_skips(bench.steps(**{**keys, **dtypes, "optimizer_state_dtype": state}))


@proves("optimizer", remedy="Name states after their params, and let nothing depend on the other params of the group.")
def groups_by_block_have_the_bits_of_one_group(definition: OptimizerDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        for dtypes in SEVERAL[:2]:
            runs = [bench.steps(groups, **{**keys, **dtypes}) for groups in (unchanged, _by_block)]
            for steps in runs:
                steps.step()
                steps.step()
            wrong = differing(*(steps.bits("param", "state") for steps in runs))
            assert not wrong, f"updated block by block, {shown(wrong)} differ"


def _by_block(inputs: PlanInputs) -> PlanInputs:
    return replace(inputs, update_groups=by_block)


@proves("optimizer", remedy="Return the elements that update needs together, and name states after p.name.")
def ranks_that_divide_its_states_have_the_bits_of_ranks_that_do_not(definition: OptimizerDef, bench: Bench) -> None:
    if definition.granularity is None:
        raise NotApplicable("it declares no granularity: every rank holds all of its states")
    for keys in _runs(definition, bench):
        for dtypes in SEVERAL:
            divided, whole = (bench.two_ranks(states=states, **{**keys, **dtypes}) for states in (True, False))
            wrong = differing(divided, whole)
            assert not wrong, f"on two ranks that divide states by its granularity, {shown(wrong)} differ"


@proves(
    "optimizer", remedy="Keep everything that later steps depend on in states, and draw random bits from seed and step."
)
def a_resumed_run_has_the_bits_of_an_uninterrupted_one(definition: OptimizerDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_resumes(bench, keys)


@proves("optimizer", remedy="Refuse by ConfigError what update cannot do, and list the others in state_dtypes.")
def every_dtype_of_its_states_trains(definition: OptimizerDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        for dtype in definition.state_dtypes:
            losses = bench.train(optimizer_state_dtype=dtype, **keys).losses
            assert losses[max(losses)] < losses[1], f"with optimizer_state_dtype: {dtype} the loss does not fall"


@proves(
    "optimizer",
    remedy="Declare states in context.precision.optimizer_state. Refuse other dtypes by ConfigError, and name those "
    "that update takes in state_dtypes.",
)
def its_states_have_the_dtype_that_a_run_asks_for_or_it_is_refused(definition: OptimizerDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        found: dict[str, list[str]] = {}
        for dtype in get_args(get_args(StorageDtype)[0]):
            try:
                inputs = bench.steps(**{**keys, "optimizer_state_dtype": dtype}).plan.inputs
            except ConfigError as error:
                assert dtype not in definition.state_dtypes, (
                    f"optimizer_state_dtype: {dtype}, which state_dtypes names, is refused: {error}"
                )
                continue
            found[dtype] = [state.dtype for state in record(inputs).states]
        alike = [dtype for dtype in found if any(found[dtype] == found[other] for other in found if other != dtype)]
        assert not alike or not found[alike[0]], (
            f"its states have the same dtypes with optimizer_state_dtype: {' and '.join(alike)}"
        )
