"""The plugin. All else is imported when a model is exported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pluggy

from surogate_core.api import ExportContext, ExportFormatDef

hookimpl = pluggy.HookimplMarker("surogate")
SUROGATE_API = {"export_formats": 1}


def check(context: ExportContext) -> None:
    """Raise ConfigError for a model that llama.cpp does not load, or computes otherwise."""
    from .writer import prepare

    prepare(silent(context))


def silent(context: ExportContext) -> ExportContext:
    """Return an argument whose notices nobody hears: `write` tells them."""
    return replace(context, notice=lambda line: None)


def write(context: ExportContext, folder: Path) -> None:
    """Write the model and a Modelfile for Ollama."""
    from . import modelfile, writer

    path = folder / f"{context.name}-{context.type}.gguf"
    writer.write_model(context, path)
    (folder / "Modelfile").write_text(modelfile.write_modelfile(context, path.name), encoding="utf-8")


GGUF = ExportFormatDef(
    name="gguf",
    summary="one file for llama.cpp, Ollama and LM Studio",
    types=("bf16", "f16", "f32", "q8_0", "q5_0", "q5_1", "q4_0", "q4_1", "mxfp4"),
    check=check,
    write=write,
    identified_by="*.gguf",
)


def check_adapter(context: ExportContext) -> None:
    """Raise ConfigError for an adapter that llama.cpp does not load."""
    from .lora import prepare

    prepare(silent(context))


def write_adapter(context: ExportContext, folder: Path) -> None:
    """Write an adapter."""
    from . import lora, writer

    writer.write(context, lora.prepare(context, folder / f"{context.name}-{context.type}.gguf"))


LORA = ExportFormatDef(
    name="gguf-lora",
    summary="a LoRA adapter for llama.cpp, beside a GGUF file of its base",
    types=("f16", "bf16", "f32"),
    check=check_adapter,
    write=write_adapter,
    identified_by="*.gguf",
    of_adapters=True,
)


@hookimpl
def surogate_export_formats() -> Sequence[ExportFormatDef]:
    return [GGUF, LORA]
