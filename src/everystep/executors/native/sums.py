"""What a row of scores comes to, in two readings of it, by the library."""

from __future__ import annotations

from ctypes import c_double

import numpy as np

from everystep.executors.native.library import load, status


def sum_up(scores: np.ndarray) -> tuple[float, float, float, float] | None:
    """Return the lowest and the highest of scores (n,), and the sums over all of them of e^d and of
    d e^d, where d is how far a score lies above the highest.

    None where there is no library, or the scores do not lie one after another as float32. Sums are
    no numbers where a score is none or infinite.
    """
    fits = scores.dtype == np.float32 and scores.flags.c_contiguous and scores.size
    if not fits or status().instructions is None:
        return None
    found = (c_double * 4)()
    load().es_sum_up(scores.ctypes.data, scores.size, found)
    least, most, mass, weighed = found
    return least, most, mass, weighed
