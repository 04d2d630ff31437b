"""Checks of ops: references, rules and costs, on the inputs of tiny runs, and on those of examples.

An example is {"ins": ["fp32[6,8]", "int32[6]<5"], "attrs": {...}}: dtype, shape, and the bound of whole numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import Gradients, Op, OpDef, Value
from surogate_core.dtypes import DTYPES
from surogate_core.machine.devices import device
from surogate_core.program.builder import Builder
from surogate_core.reference.ops import load
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.kernels import same_bits
from surogate_core.testing.ops import Elements, as_inputs, check_op

from ..bench import Bench, Sample
from ..check import NotApplicable, proves

Env = dict[Value, Tensor]
MOST = 6
"""Samples of each op that are checked."""


def samples(definition: OpDef, bench: Bench) -> list[Sample]:
    """Return inputs for an op: those of examples, then of runs. Raises NotApplicable if there are none."""
    bench.sample_ops()
    found = examples(definition, bench) + bench.samples.get(definition.kind, [])
    if not found:
        raise NotApplicable(
            f'no tiny run emits it. Give an example: SUROGATE_EXAMPLES = {{"op {definition.kind}": '
            '[{"ins": ["fp32[6,8]"], "attrs": {}}]}'
        )
    return found[:MOST]


def examples(definition: OpDef, bench: Bench) -> list[Sample]:
    """Return the inputs that the op's plugin gives as examples."""
    return [_example(definition, example) for example in bench.subject.examples(definition)]


def _example(definition: OpDef, example: Mapping[str, Any]) -> Sample:
    gen = torch.Generator().manual_seed(3)
    ins = [_drawn(text, gen) for text in example["ins"]]
    attrs = dict(example.get("attrs", {}))
    values = tuple(as_inputs(ins))
    outs = tuple(Value(f"out{i}", s.shape, s.dtype, "act") for i, s in enumerate(definition.infer(values, attrs)))
    changes = tuple(definition.changes(values, attrs))
    op = Op(definition.kind, values, outs, attrs, phase="forward", changes=changes)
    return Sample(op, tuple(ins), tuple(i == 0 for i in range(len(outs))), True)


def _drawn(text: str, gen: torch.Generator) -> Tensor:
    match = re.fullmatch(r"(\w+)\[([\d,\s]*)\](?:<(\d+))?", text)
    assert match and match[1] in TORCH_DTYPES, f'example {text!r}: expected "fp32[6,8]" or "int32[6]<5"'
    shape, dtype = [int(size) for size in match[2].split(",") if size.strip()], TORCH_DTYPES[match[1]]
    if match[3] or not dtype.is_floating_point:
        return torch.randint(int(match[3] or 2), shape, generator=gen).to(dtype)
    return torch.randn(shape, generator=gen).to(dtype)


def call(kind: str, ops: Mapping[str, OpDef], ins: Sequence[Tensor], attrs: Mapping[str, Any]) -> tuple[Tensor, ...]:
    results = load(ops[kind].reference)(*ins, **attrs)
    return results if isinstance(results, tuple) else (results,)


def interpret(emitted: Sequence[Op], ops: Mapping[str, OpDef], env: Env) -> None:
    """Run ops by their references. Results are added to `env`."""
    for op in emitted:
        for i, (value, result) in enumerate(
            zip(op.written, call(op.kind, ops, [env[v] for v in op.ins], op.attrs), strict=True)
        ):
            env[value] = env[value] + result if i in op.accumulate else result


def _env(sample: Sample, outs: Sequence[Tensor]) -> Env:
    return {**dict(zip(sample.op.ins, sample.ins, strict=True)), **dict(zip(sample.op.outs, outs, strict=False))}


@proves("op", remedy="The reference defines the op: mend it or the shape rule (OpDef.infer, attrs).")
def its_reference_has_the_shapes_and_attributes_that_it_declares_and_no_side_effects(
    definition: OpDef, bench: Bench
) -> None:
    for sample in samples(definition, bench):
        held = [Elements(x, v.dtype) for x, v in _pairs(sample)]
        check_op(definition, *held, **sample.op.attrs)


@proves("op", remedy="Derive the rule again (OpDef.vjp), or remove it: core then differentiates the reference.")
def its_backward_rule_is_the_derivative_of_its_reference(definition: OpDef, bench: Bench) -> None:
    every = samples(definition, bench)
    found = [sample for sample in every if sample.differentiated and any(sample.read)]
    if not found and all(sample.op.phase != "forward" for sample in every):
        raise NotApplicable("no forward pass has it, so nothing differentiates it")
    if not found and definition.vjp is None:
        raise NotApplicable("it has no rule; autograd differentiates its reference")
    if not found:
        raise NotApplicable("no op of a forward pass reads its outputs; with an example, its rule is compared")
    derived = {i for sample in found for i in sample.derived}
    for sample in found:
        _check_gradients(definition, sample, bench.registry.ops, derived)


def _check_gradients(definition: OpDef, sample: Sample, ops: Mapping[str, OpDef], derived: AbstractSet[int]) -> None:
    """Compare the gradients of a rule with those of autograd, or those of autograd with differences.

    A rule may give None for `derived` inputs, which another op makes of other inputs, as a sink does of attention's
    output. It then has the whole gradient of these others, which is that of both ops. Inputs of examples are drawn, not
    made, so that nothing there is comparable.
    """
    op = sample.op
    leaves = [x.clone().requires_grad_(x.is_floating_point() and DTYPES[v.dtype].has_grad) for x, v in _pairs(sample)]
    outs = call(definition.kind, ops, leaves, op.attrs)[: len(op.outs)]
    gen = torch.Generator().manual_seed(7)
    seeds = {
        i: torch.randn(out.shape, generator=gen).to(out.dtype)
        for i, out in enumerate(outs)
        if sample.read[i] and out.is_floating_point() and out.requires_grad
    }
    wanted = [x for x in leaves if x.requires_grad]
    if not wanted or not seeds:
        if definition.vjp is None or not any(
            v.role in ("param", "act") for x, v in _pairs(sample) if x.is_floating_point()
        ):
            return
        raise NotApplicable("autograd cannot differentiate its reference, so its rule has nothing to be compared with")
    if definition.vjp is None:
        truth = _by_autograd(outs, seeds, leaves)
        _compare_with_differences(definition, op, ops, leaves, seeds, truth)
        return
    gradients, env = _by_rule(definition, sample, ops, outs, seeds)
    left_out = {i for i in derived if leaves[i].requires_grad and gradients[i] is None}
    if left_out and not sample.derived:
        return
    if left_out:
        outs = call(definition.kind, ops, _derive(sample, leaves, left_out, ops), op.attrs)
    for i, expected in _by_autograd(outs, seeds, leaves).items():
        if i in left_out:
            continue
        ours = gradients[i]
        if ours is None:
            trains = op.ins[i].role in ("param", "act") and expected is not None and bool(expected.any())
            assert not trains, f"its rule gives no gradient of input {i}, but its reference depends on it"
            continue
        exact = torch.zeros_like(leaves[i]) if expected is None else expected
        error = float((env[ours].double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))
        allowed = 1e-4 if exact.dtype in (torch.float32, torch.float64) else 3e-2
        assert error <= allowed, f"the gradient of input {i} is off by {error:.1e} of its norm (allowed {allowed:.0e})"


def _by_autograd(
    outs: Sequence[Tensor], seeds: Mapping[int, Tensor], leaves: Sequence[Tensor]
) -> dict[int, Tensor | None]:
    trained = [i for i, x in enumerate(leaves) if x.requires_grad]
    ends, wanted = [outs[i] for i in seeds], [leaves[i] for i in trained]
    found = torch.autograd.grad(ends, wanted, list(seeds.values()), allow_unused=True)
    return dict(zip(trained, found, strict=True))


def _by_rule(
    definition: OpDef, sample: Sample, ops: Mapping[str, OpDef], outs: Sequence[Tensor], seeds: Mapping[int, Tensor]
) -> tuple[Gradients, Env]:
    """Return what the rule gives, and the contents of these values."""
    assert definition.vjp is not None
    op = sample.op
    b = Builder(ops, next(v.dtype for x, v in _pairs(sample) if x.is_floating_point()))
    env: Env = _env(sample, [out.detach() for out in outs])
    with b.record("backward") as emitted:
        given = tuple(
            b.activation(f"d{i}", out.shape, out.dtype) if i in seeds else None for i, out in enumerate(op.outs)
        )
        env |= {d: seeds[i] for i, d in enumerate(given) if d is not None}
        gradients = definition.vjp(b, op, given)
    interpret(emitted, ops, env)
    return gradients, env


def _derive(
    sample: Sample, leaves: Sequence[Tensor], which: AbstractSet[int], ops: Mapping[str, OpDef]
) -> list[Tensor]:
    """Return the inputs of an op, with those in `which` made of the others once more."""
    of, ins = dict(zip(sample.op.ins, leaves, strict=True)), [*leaves]
    for i in which:
        by, out = sample.derived[i]
        ins[i] = call(by.kind, ops, [of[value] for value in by.ins], by.attrs)[out]
    return ins


def _pairs(sample: Sample) -> list[tuple[Tensor, Value]]:
    return list(zip(sample.ins, sample.op.ins, strict=True))


def _compare_with_differences(
    definition: OpDef,
    op: Op,
    ops: Mapping[str, OpDef],
    leaves: Sequence[Tensor],
    seeds: Mapping[int, Tensor],
    truth: Mapping[int, Tensor | None],
) -> None:
    """Compare autograd through the reference with central differences in one random direction of each input.

    In fp32 a difference of size h errs by about 1e-7 / h; 5 % allows for that and for kinks, and finds a wrong factor.
    """
    for i, gradient in truth.items():
        if leaves[i].dtype not in (torch.float32, torch.float64):
            continue
        x = leaves[i].detach()
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(i)).to(x.dtype) * x.abs().mean()
        h, values = 1e-2, []
        for sign in (1, -1):
            moved = [y.detach() if j != i else x + sign * h * direction for j, y in enumerate(leaves)]
            outs = call(definition.kind, ops, moved, op.attrs)
            values.append(sum(float((outs[k].double() * seed.double()).sum()) for k, seed in seeds.items()))
        slope = (values[0] - values[1]) / (2 * h)
        ours = 0.0 if gradient is None else float((gradient.double() * direction.double()).sum())
        size = float(direction.norm()) * max(float(gradient.norm()) if gradient is not None else 0.0, 1e-6)
        assert abs(slope - ours) <= 0.05 * max(abs(slope), 0.1 * size, 1e-4), (
            f"autograd through its reference gives {ours:.4g} for input {i}, finite differences {slope:.4g}"
        )


@proves("op", remedy="Return whole numbers of at least 0 from OpDef.flops, traffic, passes, link and workspace.")
def its_costs_can_be_planned(definition: OpDef, bench: Bench) -> None:
    rates = device("h200").flops
    for sample in samples(definition, bench):
        for name in ("flops", "traffic", "passes", "link", "workspace"):
            cost = getattr(definition, name)
            count = 0 if cost is None else cost(sample.op)
            assert isinstance(count, int) and count >= 0, f"{name} is {count!r}, expected a whole number of at least 0"
        rate = definition.math(sample.op) if definition.math else ""
        assert not rate or rate in rates, f"math is {rate!r}, which is no rate of a device: {', '.join(rates)}"
        if definition.product and definition.product.of == "forward" and not definition.product.second:
            (tokens, columns), rows = sample.op.ins[0].shape, sample.op.ins[1].shape[0]
            groups = 1 if definition.group_ends is None else sample.op.ins[definition.group_ends].size
            least = 2 * tokens * columns * rows // groups
            assert definition.flops(sample.op) >= least, f"flops is less than the {least} of its matrix product"


@proves("op", remedy="Correct OpDef.product, or remove it: recipes compute the op from it.")
def the_product_that_it_declares_is_what_it_computes(definition: OpDef, bench: Bench) -> None:
    product = definition.product
    if product is None:
        raise NotApplicable("it declares no product")
    for sample in samples(definition, bench):
        a, b, *more = (x.double() for x in sample.ins)
        ends = [len(a)] if definition.group_ends is None else sample.ins[definition.group_ends].tolist()
        rows = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        weights = [b[part] for part in rows] if product.of == "wgrad" else b.chunk(len(rows))
        of = {"forward": lambda a, b: a @ b.T, "dgrad": lambda a, b: a @ b, "wgrad": lambda a, b: a.T @ b}[product.of]
        out = torch.cat([of(a[part], weight) for part, weight in zip(rows, weights, strict=True)])
        added = more if definition.group_ends is None else more[definition.group_ends - 1 :]
        if product.adds and added:
            of_groups = product.adds == "bias" and definition.group_ends is not None
            out = out + (_of_rows(added[0], rows) if of_groups else added[0])
        if product.second:
            continue
        ours = call(definition.kind, bench.registry.ops, sample.ins, sample.op.attrs)[0].double()
        error = float((ours - out).norm() / out.norm().clamp(min=1e-30))
        assert error <= 1e-2, (
            f"its reference is off by {error:.1e} from the {product.of} product of its first two inputs"
        )


def _of_rows(biases: Tensor, groups: Sequence[slice]) -> Tensor:
    """Return the bias of each row, which is that of its group."""
    return torch.cat([bias.expand(part.stop - part.start, -1) for bias, part in zip(biases, groups, strict=True)])


@proves("op", remedy="Remove OpDef.moves: recipes quantize what the op reads in place of what it writes.")
def it_moves_every_element_of_its_first_input_and_nothing_else(definition: OpDef, bench: Bench) -> None:
    if not definition.moves:
        raise NotApplicable("it does not declare that it only moves elements")
    for sample in samples(definition, bench):
        (out,) = call(definition.kind, bench.registry.ops, sample.ins, sample.op.attrs)
        assert torch.equal(out.unique(), sample.ins[0].unique()), "it writes other elements, or leaves some out"


@proves("op", remedy="Both forms must give the same bits (OpDef.rewrites).")
def the_ops_that_replace_it_have_its_bits(definition: OpDef, bench: Bench) -> None:
    ops, replaced = bench.registry.ops, 0
    for sample in samples(definition, bench):
        op = sample.op
        outs = call(op.kind, ops, sample.ins, op.attrs)
        if kind := definition.rewrites.add_kind(op):
            base = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(1)).to(outs[0].dtype)
            (sums,) = call("add", ops, [outs[0], base], {})
            assert same_bits(sums, call(kind, ops, [*sample.ins, base], op.attrs)[0]), (
                f"{kind} is not its sum with a base"
            )
            replaced += 1
        if kind := definition.rewrites.pair_kind:
            (sums,) = call("add", ops, [outs[0], outs[0]], {})
            assert same_bits(sums, call(kind, ops, [*sample.ins, *sample.ins], op.attrs)[0]), f"{kind} is not its sum"
            replaced += 1
        for read in [[j == i for j in range(len(op.outs))] for i in range(len(op.outs))] if len(op.outs) > 1 else []:
            narrow = definition.rewrites.narrowed(op, read)
            if narrow is op:
                continue
            narrowed = call(narrow.kind, ops, [dict(_env(sample, outs))[v] for v in narrow.ins], narrow.attrs)
            kept = dict(zip(narrow.outs, narrowed, strict=False))
            for wanted, out, value in zip(read, outs, op.outs, strict=False):
                assert not wanted or same_bits(out, kept[value]), f"{narrow.kind} computes other bits of {value.label}"
            replaced += 1
    if not replaced:
        raise NotApplicable("no op replaces it")


@proves("op", remedy="Make the rule compute what the op computes, or remove it: the op is then emitted again.")
def its_recomputation_has_its_bits(definition: OpDef, bench: Bench) -> None:
    if definition.rewrites.rematerialize is None:
        raise NotApplicable("it is recomputed by being emitted again")
    ops = bench.registry.ops
    for sample in samples(definition, bench):
        outs = call(definition.kind, ops, sample.ins, sample.op.attrs)
        env, b = _env(sample, outs), Builder(ops, "fp32")
        with b.record("recompute") as emitted:
            again = definition.rewrites.rematerialize(b, sample.op, frozenset())
        interpret(emitted, ops, env)
        for value, out, made in zip(sample.op.outs, outs, again, strict=False):
            assert made is None or same_bits(out, env[made]), f"rematerialize computes other bits of {value.label}"


@proves("op", remedy="Correct OpDef.may_overwrite, changes, param_kinds, takes_chunks, elementwise or training_only.")
def what_it_declares_of_its_inputs_and_outputs_holds(definition: OpDef, bench: Bench) -> None:
    for sample in samples(definition, bench):
        op = sample.op
        for out, i in definition.may_overwrite(op).items():
            one, other = op.outs[out], op.ins[i]
            assert one.nbytes == other.nbytes, f"output {out} may overwrite input {i}, but has another size"
        optional = definition.optional.values()
        wrong = [i for i in definition.param_kinds if i >= len(op.ins) and i not in optional]
        assert not wrong, f"param_kinds names input {wrong[0] if wrong else ''}, but it has {len(op.ins)} inputs"
        if definition.training_only:
            same = len(op.outs) == 1 and op.outs[0].shape == op.ins[0].shape
            assert same, "training_only: evaluations read its first input in its place, which has another shape"
        if definition.elementwise(op):
            result, *more = call(op.kind, bench.registry.ops, sample.ins, op.attrs)
            assert not more and result.numel() == sample.ins[0].numel(), "elementwise: its output has another size"
            halves = sample.ins[0].flatten().chunk(2)
            made = [call(op.kind, bench.registry.ops, [x, *sample.ins[1:]], op.attrs)[0] for x in halves]
            alike = result.flatten().split([x.numel() for x in halves])
            assert all(map(same_bits, made, alike)), "elementwise: of a part of its first input it makes other bits"
        if definition.takes_chunks:
            assert "chunks" in definition.attrs, "takes_chunks needs the attribute chunks"
            whole, parts = (call(op.kind, bench.registry.ops, sample.ins, {**op.attrs, "chunks": n}) for n in (1, 2))
            assert all(map(same_bits, whole, parts)), "its outputs depend on the number of chunks"
