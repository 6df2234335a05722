"""Where prefixes end in given words; rows of any length, compared all at once."""

from __future__ import annotations

import numpy as np

from everystep.types import Rows


def matching_tails(rows: Rows, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, word) of every row whose prefix ends in that word; `words` (W, n)."""
    ids, lengths = rows.ids().numpy(), rows.lengths
    size = words.shape[1]
    if ids.shape[1] < size:
        none = np.empty(0, dtype=np.int64)
        return none, none
    # A row that is too short reads other ids than its last, and is left out.
    place = np.maximum(lengths[:, None] - size + np.arange(size), 0)
    tails = ids[np.arange(len(ids))[:, None], place]
    match = (tails[:, None] == words).all(axis=-1) & (lengths >= size)[:, None]
    row, word = np.nonzero(match)
    return row, word


def repeated_ngrams(rows: Rows, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, token) of every id that would complete an n-gram of its row."""
    ids, lengths = rows.ids().numpy(), rows.lengths
    windows = ids.shape[1] - size + 1
    if windows <= 0:
        none = np.empty(0, dtype=np.int64)
        return none, none
    match = np.arange(windows) + size <= lengths[:, None]
    for k in range(size - 1):
        # The last size - 1 ids of a row, which the next one would follow.
        tail = np.maximum(lengths - size + 1 + k, 0)[:, None]
        match &= ids[:, k : windows + k] == np.take_along_axis(ids, tail, axis=1)
    row, start = np.nonzero(match)
    return row, ids[row, start + size - 1]
