"""The values that a run saves: its outputs and checkpoints. No torch."""

from __future__ import annotations

from collections.abc import Collection

from surogate_core.assembly.assembly import Assembly
from surogate_core.program.value import Value


def adapter_params(assembly: Assembly) -> list[Value]:
    """Return the params that are saved as an adapter: the trained ones, and all that the adapter has made."""
    of_model = {m.param for m in assembly.weights}
    made = (param for name, param in assembly.params.items() if name not in of_model)
    return list(dict.fromkeys((*assembly.trainable, *made)))


def output_params(assembly: Assembly, *, adapter: bool) -> list[Value]:
    """Return the params that are saved as the model, or as the adapter of a run that trains one."""
    return adapter_params(assembly) if adapter else [assembly.params[weight.param] for weight in assembly.weights]


def further_values(assembly: Assembly, dtype: str, *, adapter: bool) -> list[Value]:
    """Return the values that a checkpoint holds besides its model in `dtype`, or its adapter.

    An adapter's files hold no param of the model that is trained.
    """
    stored = {m.param for m in assembly.weights}
    if adapter:
        stored -= {v.name for v in adapter_params(assembly)}
    return kept_values(assembly, stored, dtype)


def kept_values(assembly: Assembly, stored: Collection[str], stored_dtype: str) -> list[Value]:
    """Return the values that a checkpoint holds besides a model whose files have the params `stored` in `stored_dtype`.

    These are all states except derived ones and those that every step and evaluation overwrites, and the params that
    the model's files lack. Also those of another dtype than the model, which the files of 0.2.0 hold rounded.
    """
    unsaved = assembly.readings | {*assembly.pending}
    return [
        v
        for v in assembly.declared
        if (v.role == "state" and not v.derived and v not in unsaved)
        or (v.name in assembly.params and (v.name not in stored or v.dtype != stored_dtype))
    ]
