"""Checks of adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from surogate import run
from surogate.checkpoints.adapter import kind_of_adapter
from surogate_core.api import AdapterDef, WeightMap
from surogate_core.assembly.inputs import PlanInputs
from surogate_core.errors import ConfigError, SurogateError

from ..bench import STEPS, Bench, differing, quiet, shown
from ..check import NotApplicable, proves, variants
from .training import OPTIONS, check_falls, check_recomputes, check_resumes, check_skips

STILL = {"learning_rate": 0, "weight_decay": 0, "max_steps": 1}
"""Keys of a run that trains nothing."""


def _runs(definition: AdapterDef, bench: Bench) -> list[dict[str, Any]]:
    base = {"adapter": definition.name, "model": str(bench.base()), "from_scratch": False}
    return [{**base, **keys} for keys in variants(bench, definition, [{}])]


def _trained(bench: Bench, keys: dict[str, Any]) -> Path:
    return bench.train(save_steps=STEPS // 2, **keys).folder / "adapter"


@proves(
    "adapter",
    remedy="Check AdapterDef.apply and trainable. " + OPTIONS.format("adapter NAME"),
)
def it_trains_and_the_loss_falls(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_falls(bench, keys)


@proves("adapter", remedy="Let AdapterDef.trainable choose only what save writes.")
def only_what_it_trains_changes(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        trained = {param.name for param in steps.assembly.trainable}
        assert trained, "it trains nothing"
        before = steps.bits("param")
        steps.step()
        steps.step()
        changed = set(differing(before, steps.bits("param")))
        assert changed <= trained, f"{shown(sorted(changed - trained))} changed, which trainable does not choose"
        assert changed == trained, f"{shown(sorted(trained - changed))} did not change in two steps"


@proves("adapter", remedy="Adapt what AdapterContext.weights names: it lacks what is never trained.")
def it_leaves_alone_what_is_never_trained(definition: AdapterDef, bench: Bench) -> None:
    def frozen(inputs: PlanInputs) -> PlanInputs:
        """Return the run of a model that trains no matrix of its blocks."""
        model = inputs.model
        return replace(inputs, model=replace(model, weights=lambda d: [_frozen(m) for m in model.weights(d)]))

    for keys in _runs(definition, bench):
        try:
            steps = bench.steps(frozen, **keys)
        except SurogateError as error:
            assert "depends on no trainable param" in str(error), f"without a matrix to adapt, it fails: {error}"
            continue
        of_model = {m.param for m in steps.assembly.weights}
        made = [name for name in steps.assembly.params if name not in of_model]
        assert not made, f"it adds {shown(made)} to a model whose blocks have no matrix that is trained"


def _frozen(m: WeightMap) -> WeightMap:
    return replace(m, trained=m.tensors[0].name.count(".") < 3 or len(m.tensors[0].shape) < 2)


@proves(
    "adapter",
    remedy="Its program must compute the library's function, with its scale. `surogate verify` shows where it differs.",
)
def it_computes_what_its_library_computes(definition: AdapterDef, bench: Bench) -> None:
    if definition.library != "peft":
        raise NotApplicable(f"its library is {definition.library}, and only PEFT's adapters can be compared")
    for keys in _runs(definition, bench):
        found = bench.verified(**keys)
        assert found.passed, f"{found.first_wrong.name if found.first_wrong else 'a value'} is wrong"


@proves("adapter", remedy="`save` writes every tensor that it is given, and `load` returns them by the same names.")
def what_it_saves_is_what_it_loads(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        folder = _trained(bench, keys)
        again = bench.train(**{**keys, **STILL, "adapter_path": str(folder)}).folder / "adapter"
        one, other = (_tensors(f) for f in (folder, again))
        wrong = differing(one, other)
        assert one and not wrong, f"loaded and saved again, {shown(wrong) or 'nothing'} is different"
        assert kind_of_adapter(bench.registry, folder) == definition.name, (
            "its folder is taken for that of another adapter"
        )


def _tensors(folder: Path) -> dict[str, Any]:
    return {f"{f.name}: {name}": x for f in sorted(folder.rglob("*.safetensors")) for name, x in load_file(f).items()}


@proves("adapter", remedy="Let AdapterDef.merge add what the program adds, with the same scale.")
def a_merged_model_computes_what_model_and_adapter_compute(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        folder = _trained(bench, keys)
        merged = bench._new("merged")
        with quiet():
            own = folder.parent / "run.yaml"
            run.merge(folder, merged, str(keys["model"]), notice=lambda line: None, config=own)
        by_adapter = bench.train(**{**keys, **STILL, "adapter_path": str(folder)})
        plain = {"model": str(merged), "from_scratch": False, **STILL}
        by_merged, by_base = bench.train(**plain), bench.train(**{**plain, "model": keys["model"]})
        losses = [run_.losses[1] for run_ in (by_adapter, by_merged, by_base)]
        moved = abs(losses[0] - losses[2])
        error = abs(losses[0] - losses[1])
        assert error <= 1e-4 + 0.02 * moved, (
            f"the loss with the adapter is {losses[0]:.5f}, merged {losses[1]:.5f}, of the base {losses[2]:.5f}"
        )


@proves("adapter", remedy="Write the library's format; AdapterDef.check loads it as its users do.")
def its_users_can_load_it(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        folder, base = _trained(bench, keys), Path(keys["model"])
        with quiet():
            definition.check(folder, base)
        config = folder / definition.config_file
        moved = config.rename(config.with_suffix(".moved"))
        try:
            definition.load(folder, definition.options())
        except ConfigError:
            pass
        except Exception as error:
            raise AssertionError(
                f"load of a folder without {definition.config_file} raises {type(error).__name__}, not ConfigError"
            ) from error
        finally:
            moved.rename(config)


@proves("adapter", remedy="Draw random bits from scalars, and label values as AdapterDef.apply says.")
def every_key_of_recomputation_gives_the_same_bits(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_recomputes(bench, keys)


@proves("adapter", remedy="Keep everything that later steps depend on in params and states.")
def a_resumed_run_has_the_bits_of_an_uninterrupted_one(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_resumes(bench, keys)


@proves("adapter", remedy="Write states only in the update.")
def a_step_that_is_skipped_changes_nothing(definition: AdapterDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_skips(bench.steps(**keys))
