"""The memory that a comparison needs, estimated before it starts. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate.hub.config_json import text_part
from surogate.machine.system import memory_bytes
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import GIB

from .programs import Subject

if TYPE_CHECKING:
    from .rows import ComparedRows


@dataclass(frozen=True)
class Needs:
    """Bytes at the peak. device: of the GPU, 0 on a CPU. host: of the machine's own memory."""

    device: int
    host: int

    def __str__(self) -> str:
        parts = [f"{self.device / GIB:.1f} GiB of the GPU"] if self.device else []
        return " and ".join([*parts, f"{self.host / GIB:.1f} GiB of host memory"])


def estimate(subject: Subject, exact: Subject | None, rows: ComparedRows) -> Needs:
    """Return the larger of our side, which is planned exactly, and transformers in float64, which is estimated.

    The estimate: weights and gradients in float64; each activation of our forward pass twice in float64 (inputs and
    results of modules that we run as one op); logits four times; attention scores of the longest document three times
    per layer. In addition, compared tensors stay on the host in fp32. `exact` is the model in fp32, if it is compared.
    """
    assembly = subject.plan.assembly
    plan = max(p.plan.report.device_bytes["total"] for p in (subject, exact) if p is not None)
    of_model = {weight.param for weight in assembly.weights}
    weights = sum(v.size for v in assembly.declared if v.role == "param" and v.name in of_model)
    trained = subject.plan.assembly.n_trainable
    forward = {v for op in assembly.only("evaluate").ops for v in op.outs if v.role == "act"}
    longest = max(sum(b - a for a, b in group) for group in rows.groups)
    share = longest / len(rows.batch.tokens)
    heads = text_part(subject.run.model_config).get("num_attention_heads")
    n_layers = len({op.block for op in assembly.only("evaluate").ops if op.block >= 0})
    scores = 3 * (heads if isinstance(heads, int) else 0) * n_layers * longest**2
    logits = 4 * longest * subject.plan.inputs.dims.vocab_size
    transformers = 8 * (weights + trained + scores + logits) + int(16 * share * sum(v.size for v in forward))
    compared = 3 if exact is None else 4
    kept = 4 * compared * (trained + sum(v.size for v in forward if v.label == "residual"))
    if subject.plan.target.device.sm is None:
        return Needs(0, kept + max(plan, transformers))
    return Needs(max(plan, transformers + subject.plan.report.device.runtime_bytes), kept + 8 * weights)


def refuse_unless_it_fits(subject: Subject, needed: Needs) -> None:
    """Raise ConfigError, with what to do, if this machine has less memory than needed."""
    have = Needs(subject.plan.report.device.memory_bytes if needed.device else 0, memory_bytes())
    if needed.device > have.device or needed.host > have.host:
        raise ConfigError(
            f"{subject.run.loaded.source}: verifying needs about {needed}; this machine has {have}. "
            "Verify only the first layers (--layers 4) or fewer tokens (--rows 1 --length 128)."
        )
