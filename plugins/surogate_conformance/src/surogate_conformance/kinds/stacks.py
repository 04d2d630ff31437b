"""Checks of what the weight maps of a model say about stacks of experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from surogate_core.api import HFTensor, ModelDef, WeightMap
from surogate_core.assembly.weight_maps import matrices_of

from ..bench import Bench, quiet
from ..check import NotApplicable, proves


def _maps(definition: ModelDef, bench: Bench) -> Iterator[tuple[dict[str, Any], WeightMap]]:
    """Yield each weight map of each tiny config, with the config."""
    for config in bench.config_of(definition):
        for m in definition.weights(definition.configure(definition.dims(config), definition.options())):
            yield config, m


@proves("model", remedy="Move each index of the first dimension by itself, or leave out `leading`.")
def a_layout_with_leading_works_on_each_index_alone(definition: ModelDef, bench: Bench) -> None:
    found = [tensor for _, m in _maps(definition, bench) for tensor in m.tensors if tensor.leading]
    if not found:
        raise NotApplicable("none of its tensors has a layout with `leading`")
    for tensor in found:
        _check_slices(tensor)


def _check_slices(tensor: HFTensor) -> None:
    stored, count = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)), tensor.shape[0]
    rows = tensor.load(stored)
    height = len(rows) // count
    for first, last in ((0, 1), (count - 1, count), (0, max(1, count // 2)), (count // 2, count)):
        part = rows[first * height : last * height]
        what = f"of {tensor.name}, which is {tensor.layout}, stored[{first}:{last}]"
        loaded = tensor.load(stored[first:last])
        assert tuple(loaded.shape) == tuple(part.shape) and torch.equal(loaded, part), (
            f"{what} is loaded as {list(loaded.shape)}, which are not rows {first * height} to {last * height}"
        )
        saved = tensor.save(part)
        assert tuple(saved.shape) == tuple(stored[first:last].shape) and torch.equal(saved, stored[first:last]), (
            f"{what} is not what its rows are saved as, {list(saved.shape)}"
        )


@proves("model", remedy="Say how many matrices a tensor holds: WeightMap(..., matrices=).")
def each_expert_is_a_matrix_of_its_own(definition: ModelDef, bench: Bench) -> None:
    grouped = 0
    for keys in bench.runs_of(definition):
        steps = bench.steps(**keys)
        maps, ops = {m.param: m for m in steps.assembly.weights}, steps.plan.inputs.ops
        for op in (op for program in steps.assembly.programs.values() for op in program.ops):
            if (at := ops[op.kind].group_ends) is None:
                continue
            for i, param in enumerate(op.ins):
                if param.name not in maps or len(param.shape) != 2 or ops[op.kind].param_kinds.get(i) == "vector":
                    continue  # biases of experts are [E, N] too
                experts, grouped = op.ins[at].size, grouped + 1
                held = [matrix for matrices in matrices_of(maps[param.name]) for matrix in matrices]
                each = param.shape[0] // experts
                ends = {sum(matrix.rows for matrix in held[:i]) for i in range(len(held) + 1)}
                assert all(e * each in ends for e in range(experts)), (
                    f"{param.name} {list(param.shape)} is read by {op.kind} as {experts} experts, and its weight map "
                    f"makes {len(held)} matrices of it, so that an optimizer takes several experts for one matrix"
                )
    if not grouped:
        raise NotApplicable("no op of its program has groups of experts")


@proves("model", remedy="Name the parameter of the class in transformers that holds the experts of the param.")
def parameters_of_experts_are_those_of_transformers(definition: ModelDef, bench: Bench) -> None:
    named = [(config, m) for config, m in _maps(definition, bench) if m.parameter]
    if not named or not definition.in_transformers:
        raise NotApplicable("its weight maps name no parameter of transformers")
    for config in [config for i, (config, _) in enumerate(named) if config not in [c for c, _ in named[:i]]]:
        model = _on_meta(definition, bench, config)
        _check_parameters(model, [m for given, m in named if given is config])


def _on_meta(definition: ModelDef, bench: Bench, config: dict[str, Any]) -> Any:
    """Return the model of transformers without memory for its weights."""
    import transformers

    with quiet(), torch.device("meta"):
        read = transformers.AutoConfig.from_pretrained(bench.model_dir(dict(definition.saved(config))))
        return getattr(transformers, definition.loaded_by).from_config(read)


def _check_parameters(model: Any, maps: list[WeightMap]) -> None:
    theirs = dict(model.named_parameters())
    for m in maps:
        assert m.parameter in theirs, f"{m.param} names {m.parameter}, which {type(model).__name__} does not have"
        (rows, width), shape = (sum(t.rows[0] for t in m.tensors), m.tensors[0].rows[1]), theirs[m.parameter].shape
        module = m.parameter.rpartition(".")[0]
        is_transposed = getattr(model.get_submodule(module), "is_transposed", False)
        each = rows // shape[0]
        wanted = (shape[0], *((width, each) if is_transposed else (each, width)))
        assert rows % shape[0] == 0 and tuple(shape) == wanted, (
            f"{m.param} [{rows}, {width}] names {m.parameter}, which is {list(shape)}"
            f"{' and is_transposed' if is_transposed else ''}, not {list(wanted)}"
        )
    order = [name for name in theirs if name in {m.parameter for m in maps}]
    for module in dict.fromkeys(name.rpartition(".")[0] for name in order):
        ours = [m.parameter for m in maps if m.parameter.rpartition(".")[0] == module]
        in_class = [name for name in order if name.rpartition(".")[0] == module]
        assert ours == in_class, f"its weight maps name {', '.join(ours)}; the class has them as {', '.join(in_class)}"
