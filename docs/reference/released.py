"""Compares what plugins may import with the last release: python docs/reference/released.py prints what differs.

`released.txt` is api.txt of that release, below a line that says which one. Every line of it stays, in its order.
Fields with a default and methods may be added. A name that has gone stays importable for one minor version, and warns.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

HERE = Path(__file__).parent
LISTING, RELEASED = HERE / "api.txt", HERE / "released.txt"

_PARAM = "param(self, name: str, shape: Sequence[int], init: Init, dtype: str | None=None) -> Value"
_FURTHER = "a further parameter with a default"
_INIT = "kind: Literal['zeros', 'ones', 'normal', 'uniform', 'constant'] = 'zeros'"
_REFERENCE = "surogate_core.reference.ops"
_ATTENTION_BWD = (
    "attention_bwd(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, *, n_heads: int, "
    "n_kv_heads: int, head_dim: int, seq_len: int, window: int=0, scale: float | None=None, softcap: float=0.0, "
    "chunks: int=1) -> Tensor"
)
_WEIGHT_MAP = "weight_map(param: str, *tensors: tuple[str, *tuple[int, ...]], kind: ParamKind | None=None) -> WeightMap"
_LINEAR = "linear(b: Builder, d: DecoderDims, x: Value, name: str, rows: int, *, label: str, bias: bool=False) -> Value"
_LAYER_TYPES = "read_layer_types(config: Mapping[str, Any], n_layers: int, *, default: Sequence[str]) -> Sequence[str]"
_EMBEDDING_BWD = "embedding_bwd(dy: Tensor, tokens: Tensor, *, vocab_size: int) -> Tensor"
_BUFFERS = "def __init__(self, plan: MemoryPlan, device: str='cpu', *, poison: bool=False, rank: int=0) -> None"
ACCEPTED: Mapping[str, str] = {
    f"surogate_core.api.Builder: def {_PARAM}": _FURTHER,
    f"surogate_core.reference.attention.attention_bwd: def {_ATTENTION_BWD}": _FURTHER,
    f"surogate_core.api.Init: {_INIT}": "further kinds",
    "surogate_core.api.Metric: of: Callable[[Any], float] = float": "may return None",
    f"{_REFERENCE}.embedding_bwd: def {_EMBEDDING_BWD}": _FURTHER,
    f"{_REFERENCE}.linear_wgrad: def linear_wgrad(dy: Tensor, x: Tensor) -> Tensor": _FURTHER,
    f"surogate_models.api.linear: def {_LINEAR}": "further keyword arguments",
    f"surogate_models.api.read_layer_types: def {_LAYER_TYPES}": _FURTHER,
    f"surogate_models.api.weight_map: def {_WEIGHT_MAP}": _FURTHER,
    "surogate_core.api.Report: Report = StepReport | EvalReport | GpuReport | NumericsReport": (
        "a further kind, which a logger may leave out"
    ),
    "surogate_core.api.matrix_storage.MAX_MATRICES has gone": "a limit that kernels do not have any more",
    f"surogate_core.testing.programs.Buffers: {_BUFFERS}": _FURTHER,
    "surogate_core.testing.programs.ReferenceExecutor: class ReferenceExecutor(Executor)": "has all that its base had",
}
"""What `differences` finds, and why it may be: the version of a hook that says what plugins change ("losses 2"), or
that no plugin can notice, as of a further parameter with a default. A release empties it."""

Entries = dict[tuple[str, str], list[str]]
"""The lines of each name of a module. Those of decorators are one with the line below."""


def differences(released: str, current: str) -> Iterator[str]:
    """Yield the lines of a listing that another one lacks, and the fields that it needs in addition."""
    old, new = entries(released), entries(current)
    for (module, name), lines in old.items():
        place = f"{module}.{name}"
        elsewhere = [found for (_, other), found in new.items() if other == name]
        if (module, name) in new:
            yield from _changes(place, lines, new[module, name])
        elif (warns := _warns(module, name)) is None or not (warns or elsewhere):
            yield f"{place} has gone"
        elif not warns:
            yield from _changes(place, lines, elsewhere[0])


def entries(listing: str) -> Entries:
    """Parse a listing."""
    found: Entries = {}
    for part in listing.rstrip().split("\n\n\n")[1:]:
        module, *texts = part.split("\n\n")
        for text in texts:
            lines = re.sub(r"^( *@.*)\n *", r"\1 ", text, flags=re.M).splitlines()
            named = re.search(r"(?:^| )(?:def|class) (\w+)|^(\w+)", lines[0])
            assert named is not None, lines[0]
            found[module, named[1] or named[2]] = lines
    return found


def _changes(place: str, lines: list[str], now: list[str]) -> Iterator[str]:
    missing = [line for line in lines if line not in now]
    yield from (f"{place}: {line.strip()}" for line in missing)
    if not missing and [line for line in now if line in lines] != lines:
        yield f"{place}: its lines have another order"
    added = (line for line in now[1:] if line not in lines)
    yield from (f"{place} needs {line.strip()}" for line in added if "def " not in line and " = " not in line)


def _warns(module: str, name: str) -> bool | None:
    """Return whether the import of a name warns; None if there is no such name."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            return None
    return any(issubclass(warning.category, DeprecationWarning) for warning in caught)


if __name__ == "__main__":
    print("\n".join(differences(RELEASED.read_text(), LISTING.read_text())))
