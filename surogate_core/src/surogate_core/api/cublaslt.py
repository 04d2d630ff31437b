"""For packages whose compiled module uses the shared matrix products: `surogate_add_kernels(my_package USES cublaslt)`:

    def bind(op, ctx):
        from . import _C

        with selecting(ctx, _C):
            gemm = _C.Gemm(...)
        return ctx.call(gemm.run, ...)

<surogate/gemm.h> describes the products. `Gemm` takes the addresses of the buffers of `run`: the algorithm is
selected by timing on them, or not timed if a, b, c and d are 0. With `factors` it is run by `run_with_factors`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ..errors import ConfigError
from ..program.op import Op
from ..program.value import Value
from .base import Target
from .kernels import BindContext


def library_bytes(target: Target) -> int:
    """Return the workspace of cuBLASLt in bytes: what its fastest algorithms need on this generation of GPUs."""
    return (64 if (target.device.sm or 0) >= 90 else 32) << 20


def is_timed(target: Target) -> bool:
    """Return whether algorithms are selected by timing. Two runs may then select different ones."""
    return target.deterministic != "true"


@contextmanager
def selecting(ctx: BindContext, module: ModuleType) -> Iterator[None]:
    """Surround the construction of products by the compiled module `module`.

    Only one module of the process times at a time. The algorithms that it selects are used for equal products of other
    modules too, and cached for later runs, which are then bit-identical.
    """
    if not is_timed(ctx.target):
        yield
        return
    ctx.autotune_cache("products", _selected.update, lambda: dict(_selected))
    with _timing:
        held = _algorithms(module)
        missing = {key: algorithm for key, algorithm in _selected.items() if held.get(key) != algorithm}
        if missing:
            module.gemm_import(list(missing.items()))
            held.update(missing)
        yield
        _selected.update({**_algorithms(module), **_selected})


@contextmanager
def explaining(ctx: BindContext, op: Op, a: Value, b: Value) -> Iterator[None]:
    """Raise ConfigError, with what to do, where cuBLASLt has no algorithm for the product of the factors a and b."""
    try:
        yield
    except RuntimeError as error:
        if "no algorithm" not in str(error):
            raise
        raise ConfigError(
            f"cuBLASLt refuses {op.kind} of {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)} to "
            f"{op.outs[0].dtype} on {ctx.target.device.title} ({error}). Train with recipe: bf16, or change the batch "
            "size or sequence length if the number of tokens is among these sizes."
        ) from error


_timing = threading.Lock()
_selected: dict[str, str] = {}
"""The algorithms of this process, {description of the product: algorithm}."""
_exported: dict[str, dict[str, str]] = {}
"""The last export of each module."""


def _algorithms(module: ModuleType) -> dict[str, str]:
    """Return the timed and imported algorithms of a module. They are exported again only if their number changed.

    An export takes 0.1 ms, and a run binds about a thousand products. Algorithms are not replaced by others, except by
    `selecting`, which changes the exported ones too.
    """
    exported = _exported.setdefault(module.__name__, {})
    if module.gemm_count() != len(exported):
        exported.clear()
        exported.update(module.gemm_export())
    return exported
