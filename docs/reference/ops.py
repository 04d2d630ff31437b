"""Prints the page of the standard ops by asking their definitions: python docs/reference/ops.py > docs/reference/ops.md

EXAMPLES has inputs of each op, with letters for sizes. The outputs are what its shape rule makes of them, and what
passes make of the op is what its rules answer for them.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from surogate.config.schema import RECOMPUTE_KEYS
from surogate_core.api import IN_OUTPUTS, Builder, Op, OpDef, OutSpec, Value
from surogate_core.program.labels import LABELS
from surogate_core.reference.ops import load
from surogate_core.standard_ops import COLLECTIVES, ELEMENTWISE, LAYERS, OPS, PRODUCTS

SIZES = {"T": 17, "C": 19, "K": 23, "N": 29, "F": 31, "V": 37, "R": 41, "H": 6, "G": 3, "D": 5, "B": 7}
"""Letters of dimensions: primes where no rule asks for more, so that a number says which letters it is made of."""

FORMS = {"(H + 2 G) D": 60, "H D": 30, "2 F": 62}
"""Sizes that are made of several letters."""

HEADS = {"n_heads": 6, "n_kv_heads": 3, "head_dim": 5, "seq_len": 17}
GATE = "gate_up [T, 2 F]"
NORM = "dy [T, C], x [T, C], w [C], rstd [T] fp32, dresidual [T, C]?"


@dataclass(frozen=True)
class Example:
    """Inputs and attributes of an op. A "?" marks an input that may be left out; "..." that any number may follow.

    outs: the outputs as text, if their shapes depend on the number of ranks.
    """

    ins: str
    attrs: Mapping[str, Any]
    outs: str = ""


def example(ins: str, outs: str = "", **attrs: Any) -> Example:
    return Example(ins, attrs, outs)


EXAMPLES: Mapping[str, Example] = {
    "embedding": example("tokens [T] int32, w [V, C]"),
    "embedding_bwd": example("dy [T, C], tokens [T] int32", vocab_size=37),
    "rmsnorm": example("x [T, C], w [C]", eps=1e-6),
    "add_rmsnorm": example("x [T, C], residual [T, C], w [C]", eps=1e-6),
    "rmsnorm_bwd": example(NORM),
    "rmsnorm_bwd_recompute": example(NORM),
    "rmsnorm_dgrad": example(NORM),
    "rmsnorm_dgrad_recompute": example(NORM),
    "attention": example("qkv [T, (H + 2 G) D], cu_seqlens [B] int32", **HEADS),
    "attention_bwd": example(
        "dout [T, H D], qkv [T, (H + 2 G) D], out [T, H D], lse [H, T] fp32, cu_seqlens [B] int32, dlse [H, T] fp32?",
        **HEADS,
    ),
    "swiglu": example(GATE),
    "swiglu_bwd": example(f"dy [T, F], {GATE}"),
    "swiglu_bwd_recompute": example(f"dy [T, F], {GATE}"),
    "lm_head_ce": example("x [T, C], w [V, C], targets [T] int32, loss_scale [] fp32", chunks=1),
    "lm_head_ce_grads": example("x [T, C], w [V, C], targets [T] int32, loss_scale [] fp32", chunks=1, wrt=(0, 1)),
    "linear": example("x [T, K], w [N, K], bias [N]?"),
    "linear_add": example("x [T, K], w [N, K], base [T, N]"),
    "linear_pair": example("x [T, K], w [N, K], x2 [T, R], w2 [N, R]"),
    "linear_dgrad": example("dy [T, N], w [N, K]"),
    "linear_dgrad_add": example("dy [T, N], w [N, K], base [T, K]"),
    "linear_dgrad_pair": example("dy [T, N], w [N, K], dy2 [T, R], w2 [R, K]"),
    "linear_wgrad": example("dy [T, N], x [T, K]"),
    "linear_bgrad": example("dy [T, N]"),
    "add": example("a [T, C], b [T, C]"),
    "cast": example("x [T, C]", "x in `dtype`", dtype="fp32"),
    "fill": example("", "the value", shape=(17,), dtype="bf16", value=0.0),
    "accumulate_rounded": example("addend [T, C] fp32, total [T, C], micro_step [] int32, seed [] int64", stream=1),
    "copy": example("x [T, C]"),
    "unwritten": example("", "memory that ops write before one reads it", shape=(17, 19), dtype="bf16"),
    "move": example("x [T, C]"),
    "wait": example("value [T, C] ...", "nothing"),
    "commit": example("clip_coef [] fp32, pending [T, C], state [T, C]"),
    "reference_vjp": example(
        "inputs of the op [T, C], gradients of its outputs [T, C]", "a gradient for each input in `wrt`",
        reference="", of="", of_attrs={}, n_ins=1, given=(0,), wrt=(0,),
    ),
    "all_reduce": example("value [T, C] ...", "the sum, or the maximum, of each value over the ranks", world_size=2),
    "reduce_scatter": example("value [T, C] ...", "this rank's part of the sum of each value, flat", world_size=2),
    "reduce": example("value [T, C] ...", "the sum of each value, on the rank that owns the output", world_size=2),
    "take_part": example("x [T, C]", "this rank's part of x, flat", world_size=2),
    "all_gather": example("part [T] ...", "the values of which the ranks have parts", world_size=2, shapes=((34,),)),
    "broadcast": example("own [T] ...", "the values of their owners, in order", world_size=2, shapes=((17,),)),
    "global_norm": example("grad [T, C] ...", max_norm=1.0),
    "square_sums": example("value [T, C] ...", "a sum for each chunk of each value, fp64", chunks=(4,)),
    "norm_of_sums": example("sums [T] fp64", ranges=((0, 17),), max_norm=1.0),
}  # fmt: skip

HEAD = """# Standard ops

<!-- Generated by `python docs/reference/ops.py > docs/reference/ops.md`; do not edit. -->

The ops that core provides. A model emits them with `b.apply("linear", x, w)`, which returns the first output, or with
`b.emit`, which returns all. Their definitions are in `standard_ops/`; the torch function of the same name in
`reference/` defines what an op computes. [Write a plugin](../write-a-plugin.md#an-op) shows how to add another.

## Layouts

- Values are contiguous, the last dimension fastest. A micro-step has T tokens, one document after another, without a
  batch dimension.
- C is the width of the model, F of the feed-forward part, V the size of the vocabulary. H query heads and G key/value
  heads have D channels each. N and K are rows and columns of a weight, R the columns of a second one.
- A weight is [N, K], as in `torch.nn.Linear`. The columns of `qkv` are those of the query heads, then of k, then of v,
  so the rows of a fused weight are `[q; k; v]`. Those of `gate_up` are F of the gate, then F of the value.
- `cu_seqlens` has the offsets of the documents, ascending from 0; unused entries are T. `targets` are the labels of the
  positions, already shifted; -100: none.
- A dtype is given where it is fixed. `fp32` of an output is the dtype in which sums are accumulated: fp64 if the inputs
  are fp64. Everything else has the dtype of the first input, fp32, bf16 or fp64; the weight may have another one.

## Labels

An output has the label by which it is called below, unless the model gives `label=`, which replaces that of the first
output, or of several. Recomputation selects the values of a block by their labels. A model of your own uses the same,
and adds labels of its own by `ModelDef.recompute`:

| key | drops the values labelled |
|---|---|
"""

GROUPS = (
    ("Layers of a model", LAYERS),
    ("Products with a weight", PRODUCTS),
    ("Whole values", ELEMENTWISE),
    ("Between ranks", COLLECTIVES),
)


def page() -> str:
    """Return the text of ops.md."""
    lines = [HEAD + "\n".join(_labels())]
    for title, definitions in GROUPS:
        lines += ["", f"## {title}"]
        for definition in definitions:
            lines += ["", *section(definition)]
    return "\n".join(lines) + "\n"


def _labels() -> Iterator[str]:
    for part, key in RECOMPUTE_KEYS.items():
        if part in LABELS:
            yield f"| `{key}` | {', '.join(f'`{label}`' for label in sorted(LABELS[part]))} |"
    yield f"| `{RECOMPUTE_KEYS['block']}` | all but `residual`, the value that enters a block, and those of adapters |"
    yield f"| `{RECOMPUTE_KEYS['adapter']}` | those of adapters too |"
    yield f"| `{RECOMPUTE_KEYS['pairs']}` | what `{RECOMPUTE_KEYS['block']}` drops, and every second `residual` |"


def section(definition: OpDef) -> Iterator[str]:
    """Yield the lines of an op."""
    shown = EXAMPLES[definition.kind]
    op = made(definition, shown)
    outs = shown.outs or ", ".join(f"{out.label} {_form(out)}" for out in op.outs)
    yield f"### `{definition.kind}`"
    yield ""
    yield f"`({shown.ins}) -> {outs}`" if not shown.outs else f"`({shown.ins})` -> {outs}"
    yield ""
    yield summary(definition)
    facts = [*_attributes(definition), *rules(definition, shown)]
    if facts:
        yield ""
    yield from (f"- {fact}" for fact in facts)


def summary(definition: OpDef) -> str:
    """Return the first paragraph of the docstring of the reference."""
    text = inspect.getdoc(load(definition.reference))
    assert text, f"{definition.reference} has no docstring"
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    first = " ".join(paragraphs[:2]) if paragraphs[0].endswith(":") else paragraphs[0]
    return first.replace("*", "\\*").replace("[", "\\[") if "`" not in first else first


def _attributes(definition: OpDef) -> Iterator[str]:
    if definition.attrs:
        yield f"attributes: {', '.join(f'`{attribute(*item)}`' for item in definition.attrs.items())}"


def attribute(name: str, declared: Any) -> str:
    """Return an attribute as it is declared: "k: int" or "scale: float = 1.0"."""
    expected, *default = declared if isinstance(declared, tuple) else (declared,)
    kind = expected.__name__ if isinstance(expected, type) else str(expected)
    return f"{name}: {kind}" + (f" = {None if default[0] is IN_OUTPUTS else default[0]!r}" if default else "")


# ------------------------------------------------------------------------------------------------------------- examples


@cache
def _definitions() -> Mapping[str, OpDef]:
    return {definition.kind: definition for definition in OPS}


def made(definition: OpDef, shown: Example, optional: bool = True) -> Op:
    """Return the op of an example."""
    ins = tuple(inputs(shown.ins, optional))
    specs = definition.infer(ins, shown.attrs)
    outs = tuple(_value(spec) for spec in specs)
    return Op(definition.kind, ins, outs, dict(shown.attrs))


def inputs(text: str, optional: bool) -> Iterator[Value]:
    for name, shape, dtype, mark in re.findall(r"([\w ]+) \[(.*?)\] ?(\w*)( ?\.\.\.|\?)?", text):
        if optional or mark != "?":
            sizes = tuple(_size(letters) for letters in shape.split(", ") if letters)
            yield Value(name.strip(), sizes, dtype or "bf16", "act", name.strip())


def _size(letters: str) -> int:
    return FORMS[letters] if letters in FORMS else SIZES[letters]


def _value(spec: OutSpec) -> Value:
    return Value(spec.label, tuple(spec.shape), spec.dtype, "act", spec.label)


def _form(value: Value) -> str:
    names = {number: letters for letters, number in (*SIZES.items(), *FORMS.items())}
    shape = f"[{', '.join(names[size] for size in value.shape)}]"
    return shape if value.dtype == "bf16" else f"{shape} {value.dtype}"


# ---------------------------------------------------------------------------------------------------------------- rules


def rules(definition: OpDef, shown: Example) -> Iterator[str]:
    """Yield what passes make of an op, as the rules of its definition answer for the example."""
    op = made(definition, shown)
    if emitted := _gradient(definition, op):
        yield f"gradient: {emitted}"
    yield from dict.fromkeys(
        text for each in (True, False) for text in _fused(definition, made(definition, shown, each))
    )
    for again in _definitions().values():
        if kind := _recomputed(definition, op, again):
            yield f"fused with the recomputation of `{again.kind}`, which reads the same values: `{kind}`"
    if definition.rewrites.rematerialize is not None:
        yield from _rematerialized(definition.rewrites.rematerialize, op)
    for out, source in definition.may_overwrite(op).items():
        yield f"`{op.outs[out].label}` may take the place of `{op.ins[source].name}` in memory"
    if product := definition.product:
        adds = f", adds a {product.adds}" if product.adds else ""
        adds += f", and that of a second `{product.second}`" if product.second else ""
        yield f"a {product.of} product{adds}: recipes may compute it of other operands (`lower_products`)"
    if definition.takes_chunks:
        yield "kernels may process the rows in `chunks` parts, to need less workspace; the outputs stay the same"
    if definition.positioned:
        yield "what it writes depends on where an element is in the whole value (`positioned`)"
    if definition.uses_host:
        yield "its values may be in host memory"


def _gradient(definition: OpDef, op: Op) -> str:
    if definition.loss_with_grads:
        return f"`{definition.loss_with_grads}` takes its place, which yields the loss and the gradients"
    if definition.vjp is None:
        return ""
    builder = Builder(_definitions(), "bf16")
    own = [out if out.label not in ("rstd", "lse") else None for out in op.outs]
    with builder.record("backward") as ops:
        definition.vjp(
            builder, op, tuple(out and _value(OutSpec(f"d_{out.label}", out.shape, out.dtype)) for out in own)
        )
    return ", ".join(f"`{kind}`" for kind in dict.fromkeys(op.kind for op in ops)) or "passed on as it is"


def _fused(definition: OpDef, op: Op) -> Iterator[str]:
    if kind := definition.rewrites.add_kind(op):
        yield f"fused with an addition of its output: `{kind}`"
    if definition.rewrites.pair_kind:
        yield f"fused with an addition of the output of another one: `{definition.rewrites.pair_kind}`"
    smaller = definition.rewrites.narrowed(op, [True, *[False] * (len(op.outs) - 1)])
    if smaller.kind != op.kind:
        yield f"becomes `{smaller.kind}` if nothing reads {_named(op.outs[1:])}"


def _recomputed(definition: OpDef, op: Op, again: OpDef) -> str:
    if definition.rewrites.recompute_kind is None:
        return ""
    parts = (op.ins[i:j] for i in range(len(op.ins)) for j in range(i + 1, len(op.ins) + 1))
    return next(filter(None, (definition.rewrites.recompute_kind(op, Op(again.kind, ins, ())) for ins in parts)), "")


def _rematerialized(rule: Callable[..., Any], op: Op) -> Iterator[str]:
    for kept in op.outs:
        builder = Builder(_definitions(), "bf16")
        with builder.record("recompute") as ops:
            rule(builder, op, frozenset({kept}))
        if any(emitted.kind != op.kind for emitted in ops):
            kinds = ", ".join(f"`{emitted.kind}`" for emitted in ops)
            yield f"recomputed as {kinds} if `{kept.label}` is kept"


def _named(values: Sequence[Value]) -> str:
    return " and ".join(f"`{value.label}`" for value in values)


if __name__ == "__main__":
    sys.stdout.write(page())
