"""Requirements of a run's loss on its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from surogate_core.api import Column, DatasetFormatDef, PrepareContext, Prepared, Prepass
from surogate_core.errors import ConfigError, PluginError

from ..hub.files import TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir

if TYPE_CHECKING:
    from .cache import TokenDataset


@dataclass(frozen=True)
class Asked:
    """The parts of a batch that the loss `loss` reads: columns, which `prepare` may make, groups, means (`LossDef`)."""

    loss: str = "next_token"
    columns: Sequence[Column] = ()
    group: int = 0
    prepass: Prepass | None = None
    prepare: Callable[[PrepareContext[Any]], Prepared] | None = None
    options: Any = None

    def complete(self, dataset: TokenDataset, **of_run: Any) -> TokenDataset:
        """Return the dataset with the columns that the loss makes of it, from the rest of its `PrepareContext`."""
        if self.prepare is None or dataset.path is None:
            return dataset
        import numpy as np  # which a plan does not need

        dataset.verify()  # `prepare` reads the arrays itself

        context = PrepareContext(
            options=self.options,
            tokens=dataset.tokens,
            offsets=dataset.offsets,
            trained=dataset.trained,
            folder=dataset.path.with_name(f"{dataset.path.name}.{self.loss}"),
            find_model=partial(resolve_model_dir, patterns=(*TOKENIZER_FILES, *WEIGHT_FILES)),
            **of_run,
        )
        made = self.prepare(context)
        if not isinstance(made, Prepared):
            raise PluginError(f"loss {self.loss}: prepare gave {type(made).__name__}, not Prepared")
        found = {**dataset.columns, **made.columns}
        for c in self.columns:
            wanted = dataset.n_tokens if c.per == "token" else dataset.n_docs, *c.shape
            of, kinds = found.get(c.name), {"int32": "iu", "fp32": "f"}[c.dtype]
            if not isinstance(of, np.ndarray) or of.dtype.kind not in kinds or of.shape != wanted:
                raise PluginError(f"loss {self.loss}: prepare gave no array {c.name} of {c.dtype} {list(wanted)}")
        return replace(dataset, columns=found, facts=made.facts, checks=made.check)

    def check(self, chosen: DatasetFormatDef, formats: Iterable[DatasetFormatDef], where: str, strategy: str) -> None:
        """Raise ConfigError if documents of a dataset type cannot be trained with the loss."""
        wrong = self._lacks(chosen)
        if wrong:
            fitting = ", ".join(one.name for one in formats if not self._lacks(one)) or "none that is installed"
            raise ConfigError(
                f"{where}: type: {chosen.name} {wrong}. Types that fit loss: {self.loss}: {fitting}. Set one of them, "
                "or another loss."
            )
        if self.group and strategy != "delete":
            cut = f"groups of {self.group} documents" if self.group > 1 else "documents"
            raise ConfigError(
                f"{where}: truncation_strategy: {strategy} would cut {cut}, which loss: {self.loss} takes whole. "
                f"Remove the key; options of type {chosen.name} may shorten its documents."
            )
        if self.prepare is not None and strategy == "left":
            raise ConfigError(
                f"{where}: truncation_strategy: left cuts off the first tokens of documents, from which loss: "
                f"{self.loss} reads them. Use right, delete or split."
            )

    def _lacks(self, chosen: DatasetFormatDef) -> str:
        if chosen.group_size != max(1, self.group):
            return f"makes {chosen.group_size} documents of a row, but loss: {self.loss} takes {max(1, self.group)}"
        missing = [column for column in self.columns if column not in chosen.columns and self.prepare is None]
        named = ", ".join(f"{column.name} (one number per {column.per})" for column in missing)
        return f"has no {named}, which loss: {self.loss} reads" if missing else ""


ASKS_NOTHING = Asked()
