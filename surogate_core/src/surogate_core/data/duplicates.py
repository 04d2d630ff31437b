"""Documents that occur more than once, found by the hashes that the token cache keeps."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .pack import DocumentSpans


def duplicates(documents: DocumentSpans, train: DocumentSpans, validation: DocumentSpans) -> str | None:
    """Return a line that counts equal documents, and those of the validation set that are trained too; None if none.

    documents: all documents of `datasets`. A document counts if its start is in the spans: the second part of a
    document that is cut is no document of its own.
    """
    every, held_out = _hashes(documents), _hashes(validation)
    repeated = len(every) - len(np.unique(every))
    trained = int(np.count_nonzero(np.isin(held_out, _hashes(train))))
    parts = [f"{repeated:,} of {len(every):,} documents are duplicates"] if repeated else []
    parts += [f"{trained:,} of {len(held_out):,} in the validation set are trained too"] if trained else []
    return "; ".join(parts) or None


def _hashes(documents: DocumentSpans) -> npt.NDArray[np.uint64]:
    """Return the hashes, uint64, of the documents whose start is in `documents`."""
    found = [np.zeros(0, np.uint64)]
    bases = documents.corpus.bases
    for dataset, base, end in zip(documents.corpus.datasets, bases, bases[1:], strict=False):
        first, last = np.searchsorted(documents.start, [base, end])
        starts = documents.start[first:last] - base
        index = np.searchsorted(dataset.offsets, starts)
        found.append(dataset.hashes[index[dataset.offsets[index] == starts]])
    return np.concatenate(found)
