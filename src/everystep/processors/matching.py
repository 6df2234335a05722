"""Where prefixes end in given words; rows of any length, compared all at once."""

from __future__ import annotations

import numpy as np

from everystep.types import Rows


def matching_tails(rows: Rows, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(row, word) of every row whose prefix ends in that word; `words` (W, n)."""
    ids, lengths = rows.ids().numpy(), rows.lengths
    size = words.shape[1]
    match = np.repeat((lengths >= size)[:, None], len(words), axis=1)
    for k in range(size):
        place = np.maximum(lengths - size + k, 0)[:, None]
        if ids.shape[1]:
            match &= np.take_along_axis(ids, place, axis=1) == words[None, :, k]
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
