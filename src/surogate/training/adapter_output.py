"""The outputs of a run that trains an adapter: the adapter, and the model that it makes with its base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..checkpoints import hf
from ..checkpoints.adapter import ADAPTER_FOLDER, MERGED_FOLDER, Merging, open_merge
from ..outputs.earlier_work import set_aside_merged
from ..runs.chosen_format import FILES, Chosen, chosen_format
from ..runs.run import Run


def write_adapter_output(run: Run, write: Callable[[Path], object], notice: Callable[[str], None]) -> None:
    """Have `write` fill the folder of the adapter, and merge the adapter if the config asks for it.

    A merged model of an earlier adapter is set aside unless it is replaced.
    """
    assert run.adapter is not None
    config, adapter = run.config, run.adapter[0]
    output, asked = Path(config.output_dir), config.merge_format
    chosen = None if asked == FILES or not config.merge_adapter else chosen_format(run.registry, asked, "merge_format:")
    file = hf.CONFIG if chosen is None else chosen.format.identified_by
    set_aside_merged(output, file if config.merge_adapter else None, notice)
    folder = output / ADAPTER_FOLDER
    hf.save_files(folder, write, adapter.config_file, safe_in=Path(config.resolved_checkpoint_dir))
    if config.merge_adapter:
        _write_merged(run, open_merge(adapter, folder, config.model, run.registry), chosen, notice)


def _write_merged(run: Run, merging: Merging, chosen: Chosen | None, notice: Callable[[str], None]) -> None:
    """Write the merged model in a format. None: as the base has it."""
    output = Path(run.config.output_dir) / MERGED_FOLDER
    if chosen is None:
        merging.write(output)
        return
    from ..checkpoints.export import Export
    from ..checkpoints.export_source import open_merged

    output.mkdir(parents=True, exist_ok=True)
    export = Export(named=output, source=open_merged(merging), chosen=chosen, registry=run.registry, notice=notice)
    export.write(output, lambda names: None)
