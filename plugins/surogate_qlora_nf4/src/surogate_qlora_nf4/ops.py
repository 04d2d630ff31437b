"""The ops of NF4: `nf4_quantize`, `nf4_dequantize`, `nf4_amax` and `nf4_to_e4m3`.

Attrs, besides those of `surogate_core.api.matrix_storage`:

block   elements that share an absmax
double  (`nf4_quantize`) also quantize the absmax, to 8 bits
shape   (all but `nf4_quantize`) of the weight
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import ConfigError, OutSpec, ParamInfo, Value, need
from surogate_core.api.matrix_storage import MatrixStorage

from .tables import BLOCKS, GROUP

if TYPE_CHECKING:
    from .options import Nf4Options


def groups(rows: Sequence[int], columns: int, block: int) -> int:
    """Return the number of nested absmax of fused matrices."""
    return sum(-(-count * columns // block // GROUP) for count in rows)


def _states(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> list[OutSpec]:
    (height, columns), rows, block = shape, attrs["rows"], attrs["block"]
    need(block in BLOCKS, f"block is {block}: it must be one of {BLOCKS}")
    need(
        columns % block == 0,
        f"{columns} columns are no multiple of the NF4 block of {block}. "
        f"Choose a block that divides {columns}, or do not quantize this weight",
    )
    size = height * columns
    codes = OutSpec("codes", (size // 2,), "uint8")
    if not attrs["double"]:
        return [codes, OutSpec("absmax", (size // block,), "fp32")]
    return [
        codes,
        OutSpec("absmax", (size // block,), "uint8"),
        OutSpec("nested", (groups(rows, columns, block),), "fp32"),
        OutSpec("offset", (len(rows),), "fp32"),
    ]


def _read(stored: Sequence[Value], attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], Mapping[str, Any]]:
    return tuple(attrs["shape"]), {**attrs, "double": len(stored) > 2}


def _attrs(info: ParamInfo, options: Nf4Options) -> Mapping[str, Any]:
    param, block = info.param, options.qlora_bnb_block_size
    if param.shape[1] % block:
        instead = "No block size divides it. Use qlora_fp8: true, which takes any shape."
        if any(param.shape[1] % other == 0 for other in BLOCKS):
            instead = "Use a block size that divides it, or another format."
        raise ConfigError(
            f"qlora_bnb: {param.name} has {param.shape[1]} columns, which is no multiple of qlora_bnb_block_size: "
            f"{block}. {instead}"
        )
    return {"block": block}


def _writing(options: Nf4Options) -> Mapping[str, Any]:
    return {"double": options.qlora_bnb_double_quant}


def _reading(info: ParamInfo) -> Mapping[str, Any]:
    return {"shape": info.param.shape}


STORAGE = MatrixStorage(
    kind="nf4",
    title="NF4",
    reference="surogate_qlora_nf4.reference",
    states=_states,
    read=_read,
    attrs=_attrs,
    writing=_writing,
    reading=_reading,
    declares=({"block": int}, {"double": bool}, {"shape": tuple}),
)
OPS = STORAGE.ops
