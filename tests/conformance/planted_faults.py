"""Faults to plant in the sound plugin, and the check that each fails, with the line that says so.

`planted_faults.txt` has them: [what fails] the sentence of its check, then each fault, the pattern of its line, and,
indented, what is appended to the plugin. A line with one of the names of SNIPPETS stands for that source.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

FALLS = "it trains and the loss falls"
DERIVATIVE = "its backward rule is the derivative of its reference"
ROWS = "a row becomes the same document every time"


class Fault(NamedTuple):
    """source: what is appended to the plugin. what, sentence: the check that fails. reason: a pattern of its line."""

    name: str
    source: str
    what: str
    sentence: str
    reason: str


LOWER = """
def added(program, *ops):
    return dataclasses.replace(program, ops=(*program.ops, *ops))

def lowering(make):
    def lower(family, context):
        with context.builder.record("backward") as ops:
            make(family, context, context.builder)
        return dataclasses.replace(family, micro=added(family.micro, *ops))
    change("RECIPE", lower=lower)

"""

EPS = """
def lowered(p):
    ops = (o.changed(attrs={**o.attrs, "eps": 0.5}) if "eps" in o.attrs else o for o in p.ops)
    return dataclasses.replace(p, ops=tuple(ops))

"""

UPDATE = """
def updating(make):
    def update(context):
        b, s = context.builder, context.scalars
        for p in context.params:
            make(context, b, s, p, state(b, p))
    change("OPTIMIZER", update=update)

from surogate_core.api import Init

def also(kind, reference):
    # an op that has the shape of its first input
    globals()["ALSO"] = OpDef(kind=kind, reference=reference, infer=lambda ins, attrs: [
        OutSpec("out", ins[0].shape, ins[0].dtype)])
    globals()["surogate_ops"] = hook("OP", "UPDATE", "INT8", "FROM_INT8", "ALSO")

def state(b, p, **more):
    return b.state(f"v.{p.param.name}", p.param.shape, "fp32", Init(kind="zeros"), **more)

def sgd(context, b, s, p, velocity, clip_coef, grad=None, momentum=0.9, stream=1):
    work = () if p.param is p.master else (p.param,)
    b.emit("acme_sgd", clip_coef, s.lr, s.step, s.seed, p.grad if grad is None else grad, p.master, velocity,
           outs=[p.master, velocity, *work], momentum=momentum, weight_decay=0.0, stream=stream,
           work_dtype=p.param.dtype if work else None)

"""

MEASURING = """
def measuring(scale, reference="labelled_total"):
    # a metric of the model: the sum of the last hidden states of tokens with a label
    def build(b, d, batch, build=MODEL.build):
        head = build(b, d, batch)
        given = (head.x, batch.targets, scale(b, batch))
        return dataclasses.replace(head, metrics=[Metric("total", b.apply("acme_total", *given))])
    change("MODEL", build=build)
    globals()["TOTAL"] = OpDef(kind="acme_total", reference=f"sound_references:{reference}",
        infer=lambda ins, attrs: [OutSpec("total", (), "fp32")])
    globals()["surogate_ops"] = hook("OP", "UPDATE", "INT8", "FROM_INT8", "TOTAL")

"""

STACKS = """
# the model is gpt-oss, with other weight maps
import stacked_family
from surogate_models.api import Stacked, Transposed

SUROGATE_EXAMPLES = stacked_family.SUROGATE_EXAMPLES
globals().update({op.kind: op for op in stacked_family.OPS})
surogate_ops = hook("OP", "UPDATE", "INT8", "FROM_INT8", *(op.kind for op in stacked_family.OPS))

def stacks(change):
    globals()["MODEL"] = dataclasses.replace(stacked_family.MODEL,
        weights=lambda d: [change(m) if m.parameter else m for m in stacked_family.MODEL.weights(d)])

def laid_out(layout):
    def change(m):
        tensor = m.tensors[0]
        return dataclasses.replace(m, tensors=(dataclasses.replace(tensor, layout=layout(tensor.layout)),))
    stacks(change)

def sinks(change=lambda grads, gradients: gradients, own=False):
    globals()["MODEL"] = stacked_family.MODEL
    def vjp(b, op, grads):
        qkv, cu_seqlens, _, _, sinks = op.ins
        d_qkv = b.apply("attention_bwd", grads[0], qkv, *op.outs, cu_seqlens, own=own, **op.attrs)
        d_sinks = b.apply("acme_sinks_bwd", grads[0], *op.outs, sinks)
        return change(grads, (d_qkv, None, None, None, d_sinks))
    globals()["acme_sinks"] = dataclasses.replace(globals()["acme_sinks"], vjp=vjp)

"""

SNIPPETS = {"LOWER": LOWER, "EPS": EPS, "UPDATE": UPDATE, "MEASURING": MEASURING, "STACKS": STACKS}


def read(path: Path) -> Iterator[Fault]:
    for group in path.read_text().split("\n\n"):
        head, *lines = group.splitlines()
        what, sentence = head.removeprefix("[").split("] ")
        for at, line in enumerate(lines):
            if not line.startswith(" "):
                name, reason = line.split(": ", 1)
                source = [text[4:] for text in takewhile(lambda text: text.startswith(" "), lines[at + 1 :])]
                yield Fault(name, "\n".join(SNIPPETS.get(text, text) for text in source), what, sentence, reason)


FAULTS = [*read(Path(__file__).with_suffix(".txt"))]
