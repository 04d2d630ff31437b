"""Token caches of 0.1.0 and 0.2.0, whose names depend on the source files of a dataset type, not on its version."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from .cache import MANIFEST, UNPROVEN, DamagedCache, TokenDataset, cache_name, open_cache, read_cache_manifest
from .pack import PackedRows
from .row_hashes import caches_hash

_CODE = {("text", 1): "262d3db3fdecf98c0ec96e532e5d01a15d5ebc60874f522e8362fbab3cdda951"}
"""(type, version) -> sha256 of the source files that made the same tokens in 0.1.0 and 0.2.0."""

_OF_CODE = frozenset(("cache_format", "version", "conversation", "type_code", "chat_code", "tokenizers"))
"""Settings that say which code made the tokens; the others say of what."""


def name_before(settings: Mapping[str, Any]) -> str | None:
    """Return the name of the old cache with these settings; None if it is not known which code made it."""
    code = _CODE.get((settings["type"], settings["version"]))
    if code is None:
        return None
    same = {key: value for key, value in settings.items() if key != "version"}
    return cache_name({**same, "cache_format": UNPROVEN, "type_code": code})


def of_the_same(saved: Mapping[str, Any], settings: Mapping[str, Any], chosen: Collection[str] = ()) -> bool:
    """Return whether a saved cache is of the data, type, options and tokenizer of `settings`, whatever code made it.

    chosen: options that the user sets. Of the others it may lack some, which its version did not have.
    """
    one, other = ({key: value for key, value in each.items() if key not in _OF_CODE} for each in (saved, settings))
    options = one.pop("options", {}), other.pop("options", {})
    shared = options[0].keys() | {*chosen} & options[1].keys()
    return one == other and all(key in options[0] and options[0][key] == options[1].get(key) for key in shared)


def old_caches(root: Path, settings: Mapping[str, Any], chosen: Collection[str] = ()) -> list[Path]:
    """Return the caches in `root` that 0.1.0 or 0.2.0 made of the same, the newest first."""
    found = []
    for path in root.glob(f"*/{MANIFEST}"):
        with suppress(DamagedCache, LookupError):
            manifest = read_cache_manifest(path.parent)
            if manifest.format == UNPROVEN and of_the_same(manifest.settings, settings, chosen):
                found.append(path.parent)
    return sorted(found, key=lambda path: (path / MANIFEST).stat().st_mtime_ns, reverse=True)


def caches_before(rows: PackedRows) -> set[str]:
    """Return `caches_hash` with the names that caches with these tokens may have had in 0.1.0 or 0.2.0."""
    return {caches_hash(rows, names) for names in product(*map(_names_before, rows.corpus.datasets))}


def _names_before(dataset: TokenDataset) -> list[str]:
    if dataset.path is None or dataset.settings["cache_format"] == UNPROVEN:
        return [dataset.path.name if dataset.path else ""]
    known = name_before(dataset.settings)
    return (
        [known]
        if known
        else [old.name for old in old_caches(dataset.path.parent, dataset.settings) if _equal(old, dataset)]
    )


def _equal(path: Path, dataset: TokenDataset) -> bool:
    with suppress(DamagedCache):
        old = open_cache(path)
        of_both = (
            (each.hashes, each.offsets, each.mask, *(each.columns[name] for name in old.columns))
            for each in (old, dataset)
        )
        return all(map(np.array_equal, *of_both))
    return False
