"""Weight formats of E2M1 codes with a scale for each block of a row, such as NVFP4 and MXFP4.

A weight is codes uint8 [R, K / 2], two numbers a byte of which the first is in the lower half, and scales [R, K /
block]; and if the format has them, a global scale fp32 for each matrix. Kernels are in <surogate/e2m1_weight.cuh>.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError, need
from ..program.opdef import OutSpec
from ..program.value import Value
from .matrix_storage import MatrixStorage
from .recipes import ParamInfo


def e2m1_storage(
    *,
    kind: str,
    title: str,
    key: str,
    block: int,
    scales: str,
    reference: str,
    global_scales: bool = False,
    **more: Any,
) -> MatrixStorage[Any]:
    """Return the `MatrixStorage` of a format.

    key            the config key of the format, for errors
    block          elements of a row that share a scale
    scales         the dtype of scales
    global_scales  whether there is a further scale for each matrix
    more           other fields of `MatrixStorage`
    """

    def states(shape: tuple[int, ...], attrs: Mapping[str, Any]) -> list[OutSpec]:
        rows, columns = shape
        need(
            columns % block == 0,
            f"{columns} columns are no multiple of the {title} block of {block}. Do not quantize this weight",
        )
        found = [OutSpec("codes", (rows, columns // 2), "uint8"), OutSpec("scales", (rows, columns // block), scales)]
        return [*found, OutSpec("global_scales", (len(attrs["rows"]),), "fp32")] if global_scales else found

    def read(stored: Sequence[Value], attrs: Mapping[str, Any]) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        codes = stored[0]
        need(len(codes.shape) == 2, f"codes must have two dimensions, got {codes!r}")
        return (codes.shape[0], 2 * codes.shape[1]), attrs

    def attrs(info: ParamInfo, options: Any) -> Mapping[str, Any]:
        param = info.param
        if param.shape[1] % block:
            raise ConfigError(
                f"{key}: {param.name} has {param.shape[1]} columns, which is no multiple of {block}, the block of "
                f"{title}. Use another format."
            )
        return {}

    return MatrixStorage(kind=kind, title=title, reference=reference, states=states, read=read, attrs=attrs, **more)
