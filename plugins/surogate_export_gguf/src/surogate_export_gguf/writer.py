"""A GGUF file: first its keys and the list of its tensors, then their numbers, rows at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import gguf
import numpy as np
import torch
from torch import Tensor

from surogate_core.api import ExportContext

from . import hyperparameters, tokenizer
from .families import family_of, read_config
from .tensors import Target, targets_of
from .values import FORMS, Bytes, Type, bytes_of, encoded, odd, paired, refuse_without_experts, type_of

CHUNK = 1 << 20
"""Numbers that a thread converts at a time: larger ones need more memory, smaller ones more time for each."""


@dataclass(frozen=True)
class Prepared:
    """A file whose keys and tensors are known.

    writer   holds them
    targets  the tensors in their order
    types    of them
    read     a source of a target by name
    """

    writer: gguf.GGUFWriter
    targets: list[Target]
    types: list[Type]
    read: Callable[[str], Tensor]


def prepare(context: ExportContext, path: Path | None = None) -> Prepared:
    """Return all of a file but its numbers. Raises ConfigError for what llama.cpp cannot load or computes otherwise."""
    form, config = FORMS[context.type], read_config(context.config)
    text = config.get_text_config()
    family = family_of(text)
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[family.arch])
    rope = hyperparameters.describe(writer, context.config, text, family, context.notice)
    strips = tokenizer.describe(writer, context, text.vocab_size)
    writer.add_name(name_of(context.name, strips))
    writer.add_file_type(form.file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    targets = targets_of(context, config, family, rope)
    refuse_without_experts(targets, form, context.type)
    types = [type_of(target, form) for target in targets]
    announce(writer, targets, types)
    if names := odd(targets, form):
        block = gguf.GGML_QUANT_SIZES[form.type][0]
        context.notice(
            f"{len(names)} matrices stay in F16 because {block} does not divide their rows, such as {names[0]}"
        )
    return Prepared(writer, targets, types, lambda name: context.tensors[name][...])


def announce(writer: gguf.GGUFWriter, targets: Sequence[Target], types: Sequence[Type]) -> None:
    """Add the list of tensors."""
    for target, kind in zip(targets, types, strict=True):
        writer.add_tensor_info(target.name, target.shape, np.dtype(np.float32), bytes_of(target, kind), raw_dtype=kind)


def name_of(name: str, strips: bool) -> str:
    """Return the name of the model in the file.

    llama.cpp drops spaces after special tokens if the name has phi-3 or phi3, and only then.
    """
    if strips:
        return name if "phi-3" in name or "phi3" in name else f"{name} (phi-3)"
    return name.replace("phi-3", "phi 3").replace("phi3", "phi 3")


def write_model(context: ExportContext, path: Path) -> None:
    """Write the file of a model."""
    write(context, prepare(context, path))


def write(context: ExportContext, prepared: Prepared) -> None:
    """Write a file that is prepared with its path."""
    writer = prepared.writer
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None
        write_numbers(writer.fout[0], context, prepared)
    finally:
        writer.close()


def write_numbers(file: IO[bytes], context: ExportContext, prepared: Prepared) -> None:
    """Write all tensors. Each is read once and converted by threads, a few rows in each.

    Threads convert rows of the next tensors while those of the last ones are written.
    """
    alignment = prepared.writer.data_alignment
    pad(file, alignment)
    waiting: deque[Future[Bytes] | None] = deque()  # None at the end of a tensor

    def write_next() -> None:
        rows = waiting.popleft()
        if rows is None:
            pad(file, alignment)
        else:
            file.write(rows.result().data)

    with converters(context.threads) as pool:
        for done, (target, kind) in enumerate(zip(prepared.targets, prepared.types, strict=True)):
            context.progress(done, len(prepared.targets))
            for rows in chunks(target, prepared.read):
                waiting.append(pool.submit(encoded, rows, kind, target.offset, target.name))
                if len(waiting) > 2 * context.threads:
                    write_next()
            waiting.append(None)
        while waiting:
            write_next()
    context.progress(len(prepared.targets), len(prepared.targets))


@contextmanager
def converters(threads: int) -> Iterator[ThreadPoolExecutor]:
    """Yield threads whose ops of torch do not start threads of their own."""
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "gguf", torch.set_num_threads, (1,)) as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def pad(file: IO[bytes], alignment: int) -> None:
    """Write zeros up to the next tensor's place."""
    file.write(bytes(-file.tell() % alignment))


def chunks(target: Target, read: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """Yield rows of a tensor in their order."""
    if target.values is not None:
        yield torch.from_numpy(target.values)
    for name in target.sources:
        x = read(name) if target.taken is None else target.taken(read(name))
        if target.heads:
            x = paired(x, target.heads)
        yield from x.split(max(1, CHUNK // max(1, x[0].numel())))
