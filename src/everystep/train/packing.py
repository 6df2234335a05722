"""Packing: which rows go together into one long row of a batch, so that nothing is padded.

Rows of a pack stay apart: `DataCollatorWithFlattening` restarts their positions, and the forward
lets no row see another.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush

from everystep.config.kinds import is_integer, require
from everystep.errors import RequestError, UnsupportedError, shown

_REFUSED = {
    "wrapped": "it cuts documents where a row is full, and lets what follows see the one before",
    "bfd_split": "it trains the rest of a cut document without its beginning",
    "bfd-requeue": "it trains the rest of a cut document without its beginning",
}
"""Strategies of others -> why they are not here."""


def pack_rows(lengths: Sequence[int], max_length: int, strategy: str = "bfd") -> list[list[int]]:
    """Return packs of rows, as lists of their indices, each at most `max_length` long together.

    `lengths`: the length of each row. The strategy "bfd" is best fit, decreasing: from the longest
    row on, each goes where it leaves the least room. Each row is in one pack; the packs and the
    rows in them are in the order of the data. Nothing is drawn, so equal lengths give equal packs.
    RequestError for a row longer than a pack, UnsupportedError for strategies that cut documents.

    Example:

        >>> es.pack_rows([5, 3, 2, 6], max_length=8)
        [[0, 1], [2, 3]]
    """
    _require_strategy(strategy)
    is_length = is_integer(max_length) and max_length > 0
    require(is_length, "max_length", "a positive integer", max_length)
    for row, length in enumerate(lengths):
        if not is_integer(length) or length < 1:
            wanted = "a positive integer"
            raise RequestError(f"row {row} has no length", wanted=wanted, got=shown(length))
        if length > max_length:
            do = "Shorten it (DataForm(max_length=...)), or make the packs longer"
            raise RequestError(
                f"row {row} is longer than a pack",
                wanted=f"at most {max_length}",
                got=length,
                do=do,
            )
    return sorted(sorted(pack) for pack in _best_fit(lengths, max_length))


def _require_strategy(strategy: object) -> None:
    if isinstance(strategy, str) and strategy in _REFUSED:
        raise UnsupportedError(
            f"packing_strategy {strategy!r} is not here: {_REFUSED[strategy]}",
            wanted="'bfd'",
            do="Use 'bfd', which keeps each row whole",
        )
    if strategy != "bfd":
        raise RequestError("packing_strategy is unknown", wanted="'bfd'", got=shown(strategy))


def _best_fit(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Return the packs in the order in which they were begun.

    `rooms` lists the sizes of room that packs leave, `left` has the packs of each size: among those
    with equal room the oldest is filled first.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []
    left: defaultdict[int, list[int]] = defaultdict(list)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = int(lengths[row])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            pack, room = len(packs), most
            packs.append([])
        else:
            room = rooms[place]
            pack = heappop(left[room])
            if not left[room]:
                del rooms[place]
        packs[pack].append(row)
        if room > length:
            if not left[room - length]:
                insort(rooms, room - length)
            heappush(left[room - length], pack)
    return packs
