"""Finds the first op that writes a number that is not finite, and reports what is known about it.

    worker.watch(lambda buffers: FiniteCheck(assembly, buffers, served_by))

runs every program op by op. After each op all its floating-point outputs are checked, including gradients that it adds
to, so every input of an op was finite when it was written. No op of a healthy step writes infinity: masks, for example,
stay inside an op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..api import WeightMap
from ..assembly.assembly import Assembly
from ..errors import ConfigError, NonFiniteError
from ..program.op import Op, Program, Stage
from ..program.value import UNFINISHED_LABEL, Value
from ..reference.rounding import TORCH_DTYPES
from .arena import Buffers

_CHUNK = 1 << 22  # elements per check, which limits the memory besides the planned buffers to 32 MiB
_MOST_INPUTS = 6


@dataclass(frozen=True)
class Contents:
    """Statistics of a buffer.

    first    index of the first element that is not finite; None if all are
    largest  largest magnitude, if all elements are finite
    """

    n_nan: int
    n_inf: int
    size: int
    first: tuple[int, ...] | None
    largest: float

    @property
    def finite(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        if self.first is None:
            return f"finite, largest {self.largest:.3g}"
        counts = [f"{n:,} {what}" for n, what in ((self.n_nan, "NaN"), (self.n_inf, "inf")) if n]
        return f"{' and '.join(counts)} of {self.size:,}, first at {list(self.first)}"


def contents(tensor: Tensor) -> Contents:
    n_nan, n_inf, first, largest = 0, 0, None, 0.0
    for start, part in _parts(tensor):
        if _bounds(part).isfinite().all():
            largest = max(largest, float(_bounds(part).abs().max()))
            continue
        n_nan += int(part.isnan().sum())
        n_inf += int(part.isinf().sum())
        if first is None:
            at = start + part.isfinite().logical_not().byte().argmax().cpu()
            first = tuple(map(int, torch.unravel_index(at, tensor.shape)))
    return Contents(n_nan, n_inf, tensor.numel(), first, largest)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements of all tensors are finite. Waits for each device once."""
    bounds: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        for _, part in _parts(tensor):
            bounds.setdefault(part.device, []).append(_bounds(part))
    return all(bool(torch.stack(found).isfinite().all()) for found in bounds.values())


def _parts(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first element, elements) for the chunks of a tensor. FP8, with few ops in torch, as fp32.

    Chunks of pinned memory are copied to the GPU, which checks them faster, and which reads write-combined memory.
    """
    if not tensor.is_floating_point() or not tensor.numel():
        return
    flat, start = tensor.view(-1), 0
    is_pinned = tensor.device.type == "cpu" and torch.cuda.is_initialized() and tensor.is_pinned()
    for part in flat.split(_CHUNK):
        part = part.cuda() if is_pinned else part
        yield start, part.float() if part.element_size() == 1 else part
        start += part.numel()


def _bounds(part: Tensor) -> Tensor:
    """Return the smallest and the largest element, fp64 [2]; NaN if any element is NaN."""
    return torch.stack(part.aminmax()).double()


# ------------------------------------------------------------------------------------------------------- after every op


class FiniteCheck:
    """A `Watcher`. Raises NonFiniteError at the first op that writes NaN or infinity.

    `served_by` returns, for the report, what runs an op. `steps_done` is the number of optimizer steps before the first
    watched one.
    """

    def __init__(
        self, assembly: Assembly, buffers: Buffers, served_by: Callable[[Op], str], steps_done: int = 0
    ) -> None:
        self._buffers = buffers
        self._served_by = served_by
        self._step = steps_done
        self._micro = 0
        self._warm_up(assembly.all_programs.values())

    def __call__(self, program: Program, index: int) -> None:
        if index == 0 and program.stage == "micro":
            self._step, self._micro = (self._step + 1, 1) if program.first else (self._step, self._micro + 1)
        name, ops = program.name, program.ops
        op = ops[index]
        whole = [out for out in op.written if out.label != UNFINISHED_LABEL]
        if all_finite(self._buffers.view(out, name) for out in whole):
            return
        found = {out: contents(self._buffers.view(out, name)) for out in whole}
        written = {out: held for out, held in found.items() if not held.finite}
        gone = {*op.outs, *(op.ins[i] for i in op.in_place.values())}
        read = {v: self._buffers.view(v, name) for v in op.ins if v not in gone}
        inputs = {v: contents(view) for v, view in read.items() if view.is_floating_point()}
        raise NonFiniteError(
            f"{self._moment(program.stage)}: {op.kind} wrote NaN or inf.\n"
            + "\n".join(_report(name, index, op, self._served_by(op), written, inputs)),
            weights_whole=not any(out.role == "param" for op in ops[: index + 1] for out in op.outs),
        )

    def _warm_up(self, programs: Iterable[Program]) -> None:
        """Check a tensor of NaN in every dtype, so that modules are loaded and memory is allocated here.

        Later, a collective on another device may be waiting for this one.
        """
        written = {out.dtype for program in programs for op in program.ops for out in op.outs}
        for dtype in sorted(written):
            found = torch.full((_CHUNK,), torch.nan, device=self._buffers.device).to(TORCH_DTYPES[dtype])
            all_finite([found])
            contents(found)

    def _moment(self, stage: Stage) -> str:
        if stage in ("start", "derive"):
            return "before the first step"
        if stage == "evaluate":
            return f"evaluation after step {self._step}"
        return f"step {self._step}, {'update' if stage == 'update' else f'micro-step {self._micro}'}"


def _report(
    program: str, index: int, op: Op, server: str, written: Mapping[Value, Contents], inputs: Mapping[Value, Contents]
) -> Iterator[str]:
    block = f"block {op.block}" if op.block >= 0 else "outside blocks"
    yield f"  op       {index} of {program}: {op.kind}, {block}, {op.phase}"
    plain = [f"{key}={value}" for key, value in op.attrs.items() if isinstance(value, int | float | str)]
    if plain:
        yield f"  with     {', '.join(plain)}"
    yield f"  emitted  {op.where}"
    yield f"  run by   {server}"
    yield from _rows("wrote", written)
    broken = {value: held for value, held in inputs.items() if not held.finite}
    sound = dict(sorted(inputs.items(), key=lambda item: -item[1].largest))
    yield from _rows("read", broken or sound)
    if broken:
        yield "The op passed on inputs that are not finite: " + "; ".join(dict.fromkeys(map(_origin, broken))) + "."
    else:
        yield (
            "Its inputs are finite, so the error arose in this op. Large magnitudes indicate\n"
            "an overflow: lower learning_rate, inspect the data, or use a wider dtype."
        )


def _rows(title: str, values: Mapping[Value, Contents]) -> Iterator[str]:
    for n, (value, held) in enumerate(values.items()):
        if n == _MOST_INPUTS:
            yield f"           and {len(values) - n:,} more"
            return
        yield f"  {title if n == 0 else '':<8} {value!r}"
        yield f"           {held}"


def _origin(value: Value) -> str:
    """Return why an input is not finite, although all values that ops write are checked."""
    if value.role == "input":
        return f"{value.name} is written by the training loop before the program runs"
    if value.role == "param":
        return f"{value.name} is a weight that no op of this run has written"
    if value.role == "act":
        return f"{value.name} was finite when it was written, and was overwritten since"
    return f"{value.name} is a {value.role} that was not finite before this run wrote it"


# ------------------------------------------------------------------------------------------------ before the first step


def refuse_nonfinite_weights(
    params: Mapping[str, Tensor],
    weights: Iterable[WeightMap],
    model_dir: Path,
    file_of: Callable[[Path, str], Path],
    row: int = 0,
) -> None:
    """Raise ConfigError with the tensors of the checkpoint, and their files, that contain NaN or infinity.

    `params` hold the rows of the weights from `row` on, as far as they go. Waits for the device once if all are finite.
    """
    weights = list(weights)
    if all_finite(params[weight.param] for weight in weights):
        return
    broken = []
    for weight in weights:
        if all_finite([params[weight.param]]):
            continue
        begin = -row
        for tensor in weight.tensors:
            end = begin + tensor.rows[0]
            held = contents(params[weight.param][max(begin, 0) : max(end, 0)])
            if not held.finite:
                broken.append(f"{file_of(model_dir, tensor.name).name}: {tensor.name} {list(tensor.shape)}: {held}")
            begin = end
    if broken:
        raise nonfinite_weights(model_dir, broken)


def nonfinite_weights(model_dir: Path, broken: Sequence[str]) -> ConfigError:
    """Return the error for a checkpoint with NaN or infinity. broken: a line for each tensor, with its file."""
    more = len(broken) - _MOST_INPUTS
    return ConfigError(
        f"{model_dir}: weights hold NaN or inf. Train from another checkpoint.\n"
        + "\n".join(f"  {line}" for line in broken[:_MOST_INPUTS])
        + (f"\n  and {more:,} more" if more > 0 else "")
    )
