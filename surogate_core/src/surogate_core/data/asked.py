"""What a run's loss asks of its data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..api import Column, DatasetFormatDef
from ..errors import ConfigError


@dataclass(frozen=True)
class Asked:
    """What the loss `loss` reads of a batch: columns, and groups of documents (`LossDef.group`)."""

    loss: str = "next_token"
    columns: Sequence[Column] = ()
    group: int = 0

    def check(self, chosen: DatasetFormatDef, formats: Iterable[DatasetFormatDef], where: str, strategy: str) -> None:
        """Raise ConfigError if documents of a dataset type cannot be trained with the loss."""
        wrong = self._lacks(chosen)
        if wrong:
            fitting = ", ".join(one.name for one in formats if not self._lacks(one)) or "none that is installed"
            raise ConfigError(
                f"{where}: type: {chosen.name} {wrong}. Types that fit loss: {self.loss}: {fitting}. Set one of them, "
                "or another loss."
            )
        if self.group > 1 and strategy != "delete":
            raise ConfigError(
                f"{where}: truncation_strategy: {strategy} would cut groups of {self.group} documents, which loss: "
                f"{self.loss} takes whole. Remove the key; options of type {chosen.name} may shorten its documents."
            )

    def _lacks(self, chosen: DatasetFormatDef) -> str:
        if chosen.group != max(1, self.group):
            return f"makes {chosen.group} documents of a row, but loss: {self.loss} takes {max(1, self.group)}"
        missing = [column for column in self.columns if column not in chosen.columns]
        named = ", ".join(f"{column.name} (one number per {column.per})" for column in missing)
        return f"has no {named}, which loss: {self.loss} reads" if missing else ""


ASKS_NOTHING = Asked()
