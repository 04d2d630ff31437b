"""The tokens of a checkpoint, for a run that goes on with them although the present code makes others of its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from surogate_core.errors import ConfigError

from .cache import DamagedCache, TokenDataset, open_cache, read_cache_manifest
from .old_caches import of_the_same, old_caches
from .saved_tokens import KEY, SavedTokens

Loaded = TypeVar("Loaded")


class SavedCaches:
    """Opens the caches of a checkpoint: the one that it names or, of those that fit, combination `number`.

    combinations: how many there are, when all datasets are open.
    """

    def __init__(self, saved: SavedTokens, number: int) -> None:
        self.combinations = 1
        self._saved, self._number = saved, number

    def open(self, index: int, where: str, root: Path, settings: Mapping[str, Any], options: BaseModel) -> TokenDataset:
        """Return dataset `index` of the run, whose cache would have `settings`.

        Raises ConfigError if the saved one is gone, damaged or of other data.
        """
        chosen = options.model_dump(exclude_defaults=True).keys()
        if self._saved.caches:
            path = root / self._saved.caches[index] if index < len(self._saved.caches) else None
            fitting = [path] if path is not None and path.is_dir() else []
        else:
            path, fitting = root, old_caches(root, settings, chosen)
        if not fitting:
            of = f"the token cache {path}" if self._saved.caches else f"the token cache of these data in {root}"
            raise ConfigError(
                f"{where}: {KEY}: {of}, which {self._saved.checkpoint} trains, is gone. {self._saved.remedy}"
            )
        found = fitting[self._number // self.combinations % len(fitting)]
        self.combinations *= len(fitting)
        try:
            if not of_the_same(read_cache_manifest(found).settings, settings, chosen):
                raise ConfigError(
                    f"{where}: {KEY}: {found}, which {self._saved.checkpoint} trains, is of other data, options "
                    "or another tokenizer. Restore them to resume."
                )
            return open_cache(found, made_anew=False)
        except DamagedCache as damage:
            raise ConfigError(f"{where}: {KEY}: the token cache is damaged: {damage}. {self._saved.remedy}") from None


def with_saved(load: Callable[[SavedCaches], Loaded], saved: SavedTokens, hash_of: Callable[[Loaded], str]) -> Loaded:
    """Return what `load` makes of the caches of a checkpoint. hash_of: its `caches_hash`."""
    number = 0
    while True:
        caches = SavedCaches(saved, number)
        loaded = load(caches)
        if saved.caches or hash_of(loaded) == saved.hash:
            return loaded
        number += 1
        if number >= caches.combinations:
            raise ConfigError(
                f"{KEY}: none of the token caches of these data is the one that {saved.checkpoint} trains. "
                f"{saved.remedy}"
            )
