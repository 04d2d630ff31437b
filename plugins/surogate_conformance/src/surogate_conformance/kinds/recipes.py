"""Checks of recipes and lowerings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from surogate_core.api import DTYPES, LoweringDef, RecipeDef, Support, WeightMap
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import DEVICES

from ..bench import Bench, adapter_of, differing, shown
from ..check import NotApplicable, proves, variants
from .training import check_derived, check_falls, check_recomputes, check_resumes, check_skips

BOTH = ("recipe", "lowering")
SAME = 1e-5
"""Relative error of losses that are added in another order: 2e-7 at most with recipes that lower both. With evaluations
that fp8-hybrid or nvfp4 left in bf16, it would be 1e-4 and more."""


def _runs(definition: Any, bench: Bench) -> list[dict[str, Any]]:
    if isinstance(definition, LoweringDef):
        pair = {"matmul_dtype": definition.matmul, "gradient_dtype": definition.gradient}
        return [{"model_dtype": "bf16", **pair, **keys} for keys in variants(bench, definition, [{}])]
    return [{"recipe": definition.name, "model_dtype": None, **keys} for keys in variants(bench, definition, [{}])]


def _with_adapters(keys: dict[str, Any], bench: Bench) -> list[dict[str, Any]]:
    """Return the keys for an adapter, and for one on a base in the weight format with the fewest bits."""
    try:
        adapted = {**keys, "adapter": adapter_of(bench), "model": str(bench.base("bf16")), "from_scratch": False}
    except NotApplicable:
        return []
    smallest = sorted(bench.registry.weight_formats().values(), key=lambda format: format.bits or 16)[:1]
    return [adapted, *({**adapted, format.key: True} for format in smallest)]


@proves(*BOTH, remedy="Compare its products with those of fp32; a state that nobody renews shows so, too.")
def it_trains_and_the_loss_falls(definition: Any, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_falls(bench, keys)


@proves(
    *BOTH,
    remedy="`surogate verify` with these keys shows what is wrong. RecipeDef.product_error says what rounding costs.",
)
def it_computes_what_transformers_computes(definition: Any, bench: Bench) -> None:
    for own in _runs(definition, bench):
        for keys in (own, *_with_adapters(own, bench)):
            found = bench.verified(**keys)
            name = found.first_wrong.name if found.first_wrong else "a value"
            assert found.passed, f"{name} is wrong ({found.recipe}{', stored' if found.stored else ''})"


@proves(*BOTH, remedy="Quantize what api.products.quantized_weights returns, or ask ParamInfo.precise.")
def it_leaves_precise_matrices_in_the_dtype_of_the_model(definition: Any, bench: Bench) -> None:
    def precise(inputs: PlanInputs) -> PlanInputs:
        """Return the run of a model whose attention outputs are precise."""
        model = inputs.model
        return replace(inputs, model=replace(model, weights=lambda d: [_precise(m) for m in model.weights(d)]))

    for own in _runs(definition, bench):
        for keys in (own, *_with_adapters(own, bench)):
            assembly = bench.steps(precise, **keys).assembly
            names = {m.param for m in assembly.weights if m.precise}
            reading = [op for p in assembly.all_programs.values() for op in p.ops if names & {v.name for v in op.ins}]
            narrow = sorted({op.kind for op in reading for v in op.outs if DTYPES[v.dtype].bits < 16})
            assert not narrow, f"{shown(narrow)} quantizes a matrix whose WeightMap has precise=True"
            read = {v.name for op in assembly.only("evaluate").ops for v in op.ins}
            assert names <= read, f"evaluations do not read {shown(sorted(names - read))}, which is precise"


def _precise(m: WeightMap) -> WeightMap:
    return replace(m, precise=m.tensors[0].name.endswith("o_proj.weight"))


@proves(*BOTH, remedy="A recomputed op must read what the first one read: no state that the micro-step changes.")
def every_key_of_recomputation_gives_the_same_bits(definition: Any, bench: Bench) -> None:
    for own in _runs(definition, bench):
        check_recomputes(bench, own)
        for keys in _with_adapters(own, bench)[:1]:
            check_recomputes(bench, keys, each=False)


@proves(*BOTH, remedy="Declare what later steps depend on as states that are not `derived`.")
def a_resumed_run_has_the_bits_of_an_uninterrupted_one(definition: Any, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_resumes(bench, keys)


@proves(*BOTH, remedy="Write states in the update only where clip_coef is finite.")
def a_step_that_is_skipped_changes_nothing(definition: Any, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_skips(bench.steps(**keys))


@proves(*BOTH, remedy="Programs.evaluate may write no state.")
def an_evaluation_changes_nothing(definition: Any, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        steps.step()
        before = steps.bits("param", "state")
        (loss, *_) = steps.worker.evaluate(steps.batch)
        wrong = differing(before, steps.bits("param", "state"))
        assert not wrong, f"an evaluation changes {shown(wrong)}"
        (again, *_) = steps.worker.evaluate(steps.batch)
        assert again == loss, f"a second evaluation of the same rows gives {again!r} after {loss!r}"


@proves(*BOTH, remedy="Declare states that `derive` writes with derived=True: every start, resumed or not, makes them.")
def no_checkpoint_has_what_derive_writes(definition: Any, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_derived(bench.steps(**keys))


@proves(*BOTH, remedy="Lower Programs.evaluate as the forward pass of Programs.micro.")
def an_evaluation_computes_the_loss_of_a_micro_step(definition: Any, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        steps.step()
        (evaluated, *_) = steps.worker.evaluate(steps.batch)
        trained = steps.micro_step(scale=1.0, index=9)
        assert abs(evaluated - trained) <= SAME * abs(trained), (
            f"an evaluation gives {evaluated:.6f} for rows of which a micro-step gives {trained:.6f}"
        )


@proves(*BOTH, remedy="Return Support from supports for every device; it must not raise.")
def every_device_is_supported_or_refused_with_a_reason(definition: Any, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        inputs = bench.steps(**keys).plan.inputs
        for info in DEVICES.values():
            more = () if isinstance(definition, LoweringDef) else (inputs.recipe_options,)
            found = definition.supports(info, inputs.precision, *more)
            assert isinstance(found, Support), f"supports returns {found!r:.60} for {info.name}"
            assert found.ok or found.reason, f"supports refuses {info.name} without a reason"


@proves("recipe", remedy="Numerics.micro must compute what Programs.micro computes.")
def a_step_that_reports_on_numerics_has_the_same_bits(definition: RecipeDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        try:
            reporting = bench.steps(numerics_report_steps=1, **keys)
        except ConfigError as error:
            raise NotApplicable(f"it has no report: {error}") from None
        plain = bench.steps(**keys)
        for steps, reports in ((plain, False), (reporting, True)):
            steps.step()
            for i in range(2):
                first, scale = i == 0, 1 / steps.batch.n_valid
                steps.worker.micro_step(
                    steps.batch, first=first, last=not first, loss_scale=scale, index=9 + i, reporting=reports and first
                )
        wrong = [n for n, x in plain.gradients().items() if not torch.equal(x, reporting.gradients()[n])]
        assert not wrong, f"{shown(wrong)} differ in a step that reports"
