"""Commands that load the outputs of a run in other programs: printed at its end and written into the model card."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from surogate_core.api import CAUSAL_LM, WRITES_TEXT

from ..checkpoints.adapter import ADAPTER_FOLDER, MERGED_FOLDER
from ..hub.config_json import QUANTIZATION
from ..runs.chosen_format import FILES
from ..runs.run import Run


def load_commands(run: Run) -> tuple[tuple[str, str], ...]:
    """Return (program, line) for the model, or for the adapter and the merged model, after one that tries them here.

    Empty if transformers does not have the model.
    """
    if not run.model.in_transformers:
        return ()
    found = _loading(run)
    if run.model.loaded_by not in WRITES_TEXT or (run.adapter is not None and "PEFT" not in dict(found)):
        return found
    words = ["surogate", "chat", run.config.output_dir]
    if all(entry.type == "text" for entry in run.config.datasets):
        words = ["surogate", "generate", run.config.output_dir, "--raw", "--prompt", "Once upon a time"]
    return (("surogate", shlex.join(words)), *found)


def _loading(run: Run) -> tuple[tuple[str, str], ...]:
    config = run.config
    output = Path(config.output_dir)
    if run.adapter is None:
        return model_commands(str(output), run.model.loaded_by)
    found = adapter_commands(run, output / ADAPTER_FOLDER, config.model)
    # an adapter may be merged into the original checkpoint alone, and no head of a loss is
    if (QUANTIZATION in run.model_config and not config.merge_adapter) or run.model.loaded_by not in WRITES_TEXT:
        return found
    served = {program for program, _ in found}
    if config.merge_format != FILES:
        return found
    return (*found, *_merged_commands(output, run.model.loaded_by, served, is_merged=config.merge_adapter))


def adapter_commands(run: Run, folder: Path, base: str) -> tuple[tuple[str, str], ...]:
    """Return (program, line) of the run's adapter in `folder`, for the programs that load its base too."""
    if run.adapter is None:
        return ()
    adapter, options = run.adapter
    form = run.weight_format[0].checkpoints if run.weight_format and QUANTIZATION in run.model_config else None
    loads = None if form is None else form.loaded_by
    return tuple(
        (program, line)
        for program, line in adapter.commands(folder, base, options)
        if loads is None or program in loads
    )


def _merged_commands(
    output: Path, loaded_by: str, served: Collection[str], *, is_merged: bool
) -> Iterator[tuple[str, str]]:
    """Yield the lines for the merged model: of transformers, and of programs that are not in `served`.

    Those programs cannot load the adapter. If the run does not merge it, their lines do so first.
    """
    merged = str(output / MERGED_FOLDER)
    merge = shlex.join(["surogate", "merge", str(output / ADAPTER_FOLDER), merged])
    transformers, *others = model_commands(merged, loaded_by)
    if is_merged:
        yield transformers
    for program, line in others:
        if program not in served:
            yield program, line if is_merged else f"{merge} && {line}"


def model_commands(model: str, loaded_by: str = CAUSAL_LM) -> tuple[tuple[str, str], ...]:
    """Return (program, line) for a model: a folder, or a name on the hub. Only transformers if it writes no text."""
    transformers = ("transformers", f"transformers.{loaded_by}.from_pretrained({model!r})")
    if loaded_by not in WRITES_TEXT:
        return (transformers,)
    vllm, given = ("vLLM", f"vllm serve {shlex.quote(model)}"), shlex.quote(f"pretrained={model}")
    if loaded_by != CAUSAL_LM:  # lm-eval's `hf` loads AutoModelForCausalLM
        return (transformers, vllm)
    return (transformers, vllm, ("lm-eval", f"lm_eval --model hf --model_args {given} --tasks hellaswag"))
