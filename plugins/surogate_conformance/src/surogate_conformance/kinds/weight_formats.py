"""Checks of weight formats."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from surogate import run
from surogate.checkpoints.export import Export
from surogate.checkpoints.quantize import codec_of, config_of, stored_export, stored_tensors
from surogate.runs.run import Run, open_run
from surogate_core.api import Support, WeightFormatDef
from surogate_core.dtypes import DTYPES
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import DEVICES

from ..bench import Bench, adapter_of, quiet
from ..check import NotApplicable, proves, variants
from .training import check_derived, check_falls, check_resumes

DECIBELS_A_BIT = 3.5
"""Least signal-to-noise ratio of normally distributed weights for each bit of a weight. Published formats with 2 to 8
bits have from 3.9 to 5.2."""

EXPORTED = 0.02
"""Largest relative difference of the losses of a run and of one on the files of an export format."""


def _runs(definition: WeightFormatDef, bench: Bench) -> list[dict[str, Any]]:
    base = {definition.key: True, "adapter": adapter_of(bench), "model": str(bench.base("bf16")), "from_scratch": False}
    return [{**base, "model_dtype": "bf16", **keys} for keys in variants(bench, definition, [{}])]


@proves("weight format", remedy="Return from dequantize what quantize stored, or state fewer bits.")
def a_weight_keeps_the_precision_of_its_bits(definition: WeightFormatDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        found = bench.verified(**keys)
        assert found.stored, "the run stores no matrix in it"
        least = DECIBELS_A_BIT * min(definition.bits or 1.0, 8.0)
        worst = min(found.stored, key=lambda matrix: matrix.snr)
        assert not math.isnan(worst.snr) and worst.snr >= least, (
            f"{worst.name} comes back with {worst.snr:.1f} dB; {definition.bits or 'its'} bits a weight keep at least "
            f"{least:.1f}"
        )


@proves(
    "weight format",
    remedy="`surogate verify` shows the first wrong value: dequantize, or a product that reads the states.",
)
def an_adapter_on_it_computes_what_transformers_computes(definition: WeightFormatDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        found = bench.verified(**keys)
        assert found.passed, f"{found.first_wrong.name if found.first_wrong else 'a value'} is wrong"


@proves(
    "weight format",
    remedy="Store each logical matrix of a fused param as if it were alone, states concatenated by rows.",
)
def a_matrix_that_is_stored_again_keeps_its_states(definition: WeightFormatDef, bench: Bench) -> None:
    """A decoded state is stored again without a further error of more than the format's own."""
    for keys in _runs(definition, bench):
        steps = bench.steps(**keys)
        codec = codec_of(_run_of(bench, keys), "bf16")
        for held in list(stored_tensors(steps.assembly).values())[:3]:
            tensor = held.tensor
            weight = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)).bfloat16() * 0.02
            once = codec.rounded(held, weight)
            assert once.shape == weight.shape and once.dtype == weight.dtype, (
                f"{tensor.name} comes back as {once.dtype} {list(once.shape)}"
            )
            twice = codec.rounded(held, once).float()
            first = float((once.float() - weight.float()).norm())
            second = float((twice - once.float()).norm())
            assert second <= first, (
                f"{tensor.name} is off by {first:.2e} when stored, and by {second:.2e} more when stored again"
            )


def _run_of(bench: Bench, keys: dict[str, Any]) -> run.Run:
    with quiet():
        return run.open_run(run.load(bench.config(keys, bench._new("out"))), ["*.json", "*.safetensors"])


@proves(
    "weight format",
    remedy="Correct WeightFormatDef.bits: what a weight takes with the default options, scales included.",
)
def a_weight_takes_the_bits_that_it_states(definition: WeightFormatDef, bench: Bench) -> None:
    if definition.bits is None:
        raise NotApplicable("it states no bits, so no plan proposes it")
    assembly = bench.plan(**_runs(definition, bench)[0]).assembly
    sizes = {v.name: v.size for v in assembly.declared}
    stored = sum(8 * DTYPES[s.dtype].nbytes(s.size) for states in assembly.stored.values() for s in states)
    weights = sum(sizes[name] for name in assembly.stored)
    found = stored / weights
    assert abs(found - definition.bits) <= 0.15 * definition.bits, (
        f"a weight takes {found:.2f} bits, it states {definition.bits}"
    )


@proves("weight format", remedy="Let quantize declare `derived` states that are smaller than the param.")
def a_plan_with_it_holds_fewer_bytes(definition: WeightFormatDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        with_it = bench.plan(**keys).report.device_bytes["total"]
        without = bench.plan(**{k: v for k, v in keys.items() if k != definition.key}).report.device_bytes["total"]
        assert with_it < without, f"the run takes {with_it:,} bytes with it and {without:,} without"


@proves(
    "weight format",
    remedy="Quantize by the same ops at every start; states are `derived`, so that no checkpoint has them.",
)
def an_adapter_trains_on_it_and_resumes_to_the_bit(definition: WeightFormatDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_falls(bench, keys)
        check_resumes(bench, keys)


@proves(
    "weight format", remedy="Declare the states that hold a weight with derived=True: the base has it in its files."
)
def no_checkpoint_has_what_derive_writes(definition: WeightFormatDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        check_derived(bench.steps(**keys))


@proves("weight format", remedy="CheckpointForm.load must return what save was given; parts must name every tensor.")
def a_checkpoint_in_it_is_read_as_it_was_written(definition: WeightFormatDef, bench: Bench) -> None:
    for keys, opened in _stored_runs(definition, bench):
        one, other = _losses(keys, bench, stored_export(opened, run.plan(opened, "cpu"), lambda line: None))
        assert one == other, f"the loss is {one!r} on the model and {other!r} on its checkpoint in the format"


@proves("weight format", remedy="Let ExportFormatDef.write write what CheckpointForm.load reads.")
def a_run_reads_what_its_export_format_writes(definition: WeightFormatDef, bench: Bench) -> None:
    """Matrices may share scales in the files of servers, so that the bits may differ from those of a run."""
    own = next((f for f in bench.registry.export_formats().values() if f.weight_format == definition.name), None)
    if own is None:
        raise NotApplicable("no export format writes it (ExportFormatDef.weight_format)")
    for keys, opened in _stored_runs(definition, bench):
        one, other = _losses(keys, bench, stored_export(opened, run.plan(opened, "cpu"), lambda line: None, own))
        assert abs(one - other) < EXPORTED * one, (
            f"the loss is {one!r} on the model and {other!r} on what export format {own.name} writes"
        )


def _stored_runs(definition: WeightFormatDef, bench: Bench) -> Iterator[tuple[dict[str, Any], Run]]:
    """Yield the keys of runs, and runs that store their models in files."""
    if definition.checkpoints is None:
        raise NotApplicable("no files hold it (WeightFormatDef.checkpoints)")
    for keys in _runs(definition, bench):
        options = {k: v for k, v in keys.items() if k in definition.options.model_fields}
        sets = [f"{key}={json.dumps(value)}" for key, value in {**options, "model_dtype": "bf16"}.items()]
        yield keys, open_run(config_of(keys["model"], sets, bench.registry), bench.registry)


def _losses(keys: dict[str, Any], bench: Bench, export: Export) -> tuple[float, float]:
    """Return the loss of a run on a model, and on the files of an export."""
    folder: Path = bench._new("quantized")
    with quiet():
        export.write(folder, lambda names: None)
    still = {"learning_rate": 0, "max_steps": 1}
    one, other = (bench.train(**{**keys, **still, "model": str(model)}) for model in (keys["model"], folder))
    return one.losses[1], other.losses[1]


@proves("weight format", remedy="Refuse a shape by ConfigError in quantize, a device by Support in supports.")
def what_it_cannot_store_is_refused(definition: WeightFormatDef, bench: Bench) -> None:
    options = definition.options()
    for info in DEVICES.values():
        found = definition.supports(info, options)
        assert isinstance(found, Support) and (found.ok or found.reason), (
            f"supports refuses {info.name} without a reason"
        )
    model = bench.once("odd", lambda: bench.train(max_steps=1, model=str(_odd(bench)), model_dtype="bf16").folder)
    try:
        bench.steps(**{**_runs(definition, bench)[0], "model": str(model)}).step()
    except ConfigError:
        return


def _odd(bench: Bench) -> Path:
    """Return a model whose sizes no block or tile divides."""
    return bench.model_dir(
        {
            **bench.config_of(bench.model)[0],
            "hidden_size": 50,
            "intermediate_size": 37,
            "num_hidden_layers": 1,
            "head_dim": 10,
        }
    )
