"""Where prefixes end in given words; rows of any length, compared all at once."""

from __future__ import annotations

import numpy as np


def matching_tails(
    ids: np.ndarray, lengths: np.ndarray, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(row, word) of every row whose prefix ends in that word; `ids` (R, T), `words` (W, n)."""
    size = words.shape[1]
    match = np.repeat((lengths >= size)[:, None], len(words), axis=1)
    for k in range(size):
        place = np.maximum(lengths - size + k, 0)[:, None]
        if ids.shape[1]:
            match &= np.take_along_axis(ids, place, axis=1) == words[None, :, k]
    row, word = np.nonzero(match)
    return row, word
