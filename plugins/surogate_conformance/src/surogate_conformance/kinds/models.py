"""Checks of models, at tiny configs: those of examples, or one of the keys that most models read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from math import log
from typing import Any, get_args

import torch
from pydantic import BaseModel, ValidationError
from safetensors.torch import load_file

from surogate_core.api import ModelDef
from surogate_core.errors import ConfigError

from ..bench import Bench, Steps, differing, shown
from ..check import NotApplicable, proves
from .training import CLOSE, SCALES, SUMS, check_scales, check_sums

EXAMPLE = 'Give a config.json that fits: SUROGATE_EXAMPLES = {"model NAME": [{**TINY_CONFIG, "hidden_size": 32}]}.'


@proves("model", remedy=EXAMPLE)
def it_trains_and_the_loss_falls(definition: ModelDef, bench: Bench) -> None:
    for keys in bench.runs_of(definition):
        try:
            losses = bench.train(save_steps=4, **keys).losses
        except ConfigError as error:
            raise AssertionError(f"a run with a tiny config is refused: {error}") from error
        assert losses[max(losses)] < losses[1] - 0.1, (
            f"the loss is {losses[1]:.3f} at first and then {losses[max(losses)]:.3f}"
        )
        bench.steps(**keys).step()


@proves("model", remedy="Raise ConfigError with key and value from ModelDef.dims, or use a default.")
def a_config_that_lacks_a_key_is_read_or_refused_by_name(definition: ModelDef, bench: Bench) -> None:
    for config in bench.config_of(definition):
        for key in config:
            try:
                definition.dims({k: v for k, v in config.items() if k != key})
            except ConfigError as error:
                assert key in str(error), f"without {key}, dims raises a ConfigError that does not name it: {error}"


@proves("model", remedy="Return sizes that hold the option from ModelDef.configure, or remove the option.")
def every_option_changes_its_sizes(definition: ModelDef, bench: Bench) -> None:
    if not definition.options.model_fields:
        raise NotApplicable("it has no options")
    for config in bench.config_of(definition):
        dims, default = definition.dims(config), definition.options()
        for name, info in definition.options.model_fields.items():
            others = list(_others(default, name))
            found = [definition.configure(dims, options) for options in others]
            assert not found or any(one != definition.configure(dims, default) for one in found), (
                f"{info.alias or name} changes nothing: configure returns the same sizes with "
                f"{', '.join(repr(getattr(options, name)) for options in (default, *others))}"
            )


def _others(default: BaseModel, name: str) -> Iterator[BaseModel]:
    """Yield the options with other values of a field that they take."""
    value, kind = getattr(default, name), type(default).model_fields[name].annotation
    values: list[Any] = [word for word in get_args(kind) if isinstance(word, str)]
    if isinstance(value, bool):
        values = [not value]
    elif isinstance(value, int | float):
        values = [value + 1, value - 1, value / 2]
    for other in values:
        with suppress(ValidationError):
            yield type(default).model_validate({type(default).model_fields[name].alias or name: other})


@proves("model", remedy="`surogate verify` with a config of this model shows every output and gradient.")
def it_computes_what_transformers_computes(definition: ModelDef, bench: Bench) -> None:
    if not definition.in_transformers:
        raise NotApplicable("its definition says that transformers has no such model (in_transformers)")
    for keys in bench.runs_of(definition):
        for dtype in ("fp32", "bf16"):
            found = bench.verified(model_dtype=dtype, **keys)
            assert found.passed, f"in {dtype}, {found.first_wrong.name if found.first_wrong else 'a value'} is wrong"
            assert not found.verdict.not_compared, f"not compared: {', '.join(found.verdict.not_compared)}"


@proves("model", remedy="Name every tensor of the checkpoint, with its shape, in ModelDef.weights.")
def its_weights_are_written_and_read_without_a_change(definition: ModelDef, bench: Bench) -> None:
    for keys in bench.runs_of(definition):
        first = bench.train(max_steps=2, **keys).folder
        still = {"learning_rate": 0, "weight_decay": 0, "max_steps": 1, "from_scratch": False}
        again = bench.train(**{**keys, **still, "model": str(first)}).folder
        one, other = ({n: x.reshape(-1).view(torch.uint8) for n, x in _tensors(f).items()} for f in (first, again))
        wrong = differing(one, other)
        assert not wrong, f"{shown(wrong)} changed on the way through a checkpoint"


def _tensors(folder: Any) -> dict[str, torch.Tensor]:
    return {name: x for path in sorted(folder.glob("*.safetensors")) for name, x in load_file(path).items()}


@proves("model", remedy="Mark what no gradient reaches by WeightMap(..., trained=False): it is then left as it is.")
def every_weight_that_is_trained_gets_a_gradient(definition: ModelDef, bench: Bench) -> None:
    for keys in bench.runs_of(definition):
        steps = bench.steps(**keys)
        steps.step()
        steps.step()  # what begins with zeros has let no gradient pass
        still = [name.removeprefix("grad.") for name, x in steps.gradients().items() if not x.any()]
        assert not still, f"every gradient of {shown(still)} is zero, and weight decay changes it"


@proves(
    "model", remedy="Label the values of blocks (docs/write-a-plugin.md), and write no reference that draws numbers."
)
def recomputation_changes_no_bit(definition: ModelDef, bench: Bench) -> None:
    for keys in bench.runs_of(definition):
        plain = bench.steps(**keys)
        plain.step()
        keys_of_parts = ("recompute_block", "recompute_att", "recompute_ffn", "recompute_rmsnorm")
        for part in dict.fromkeys((*keys_of_parts, *definition.recompute)):
            with_it = bench.steps(**{**keys, part: True})
            with_it.step()
            wrong = differing(plain.bits("param"), with_it.bits("param"))
            assert not wrong, f"with {part} other bits come out of {shown(wrong)}"


@proves("model", remedy="Give values inside b.block(...) these labels, or take them out of ModelDef.recompute.")
def values_of_its_blocks_have_the_labels_of_recomputation(definition: ModelDef, bench: Bench) -> None:
    if not definition.recompute:
        raise NotApplicable("it adds no labels to the keys of recomputation")
    found: set[str] = set()
    for keys in bench.runs_of(definition):
        programs = bench.steps(**keys).assembly.programs.values()
        found |= {v.label for program in programs for op in program.ops if op.block >= 0 for v in op.outs}
    wrong = [f"{label} of {key}" for key, labels in definition.recompute.items() for label in sorted(labels - found)]
    assert not wrong, f"no value of a block is labelled {shown(wrong)}"


@proves(
    "model",
    remedy="Keep documents apart: use cu_seqlens in attention and positions that restart, and reset states.",
)
def documents_of_a_row_do_not_see_each_other(definition: ModelDef, bench: Bench) -> None:
    for keys in bench.runs_of(definition):
        steps = bench.steps(**keys)
        _slow_decays(steps)
        batch = steps.batch
        cut = int(batch.cu_seqlens[1])
        losses = []
        for shift in (0, 1):
            tokens = batch.tokens.copy()
            tokens[:cut] = (tokens[:cut] + shift) % steps.plan.inputs.dims.vocab_size
            targets = batch.targets.copy()
            targets[:cut] = -100
            changed = replace(batch, tokens=tokens, targets=targets, n_valid=int((targets >= 0).sum()))
            losses.append(steps.worker.evaluate(changed)[0])
        assert losses[0] == losses[1], (
            f"tokens of the first document change the loss of the others by {abs(losses[0] - losses[1]):.1e}"
        )


def _slow_decays(steps: Steps) -> None:
    """Let all decay rates that are drawn as logarithms be the lowest that their `Init` draws.

    At most of those that it draws, a state has lost nearly all of another document at its first token: whether it was
    reset is then less than the rounding of a loss.
    """
    for param in steps.assembly.params.values():
        if param.init is not None and param.init.kind == "log_uniform":
            steps.view(param).fill_(log(param.init.low))


@proves("model", remedy=SUMS)
def metrics_of_a_batch_are_the_sums_over_its_parts(definition: ModelDef, bench: Bench) -> None:
    for steps in _with_metrics(definition, bench):
        check_sums(steps)


@proves("model", remedy=SCALES)
def metrics_are_multiples_of_the_scale_of_their_unit(definition: ModelDef, bench: Bench) -> None:
    for steps in _with_metrics(definition, bench):
        check_scales(steps)


@proves("model", remedy="Multiply each loss of Head.losses by batch.loss_scale.")
def gradients_are_multiples_of_the_scale_of_a_batch(definition: ModelDef, bench: Bench) -> None:
    for keys in bench.runs_of(definition):
        steps = bench.steps(**keys)
        found = []
        for scale in (1.0, 0.5):
            steps.micro_step(scale=scale / steps.batch.n_valid)
            found.append({name: gradient.clone() for name, gradient in steps.gradients().items()})
        whole, half = found
        wrong = [n for n, g in whole.items() if (half[n] - g / 2).abs().max() > CLOSE * g.abs().max()]
        assert not wrong, f"with half of loss_scale, {shown(wrong)} is not half"


def _with_metrics(definition: ModelDef, bench: Bench) -> list[Steps]:
    found = [
        steps for steps in (bench.steps(**keys) for keys in bench.runs_of(definition)) if steps.assembly.reported[1:]
    ]
    if not found:
        raise NotApplicable("it reports no metrics of its own")
    return found
