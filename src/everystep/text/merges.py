"""Merges of a vocabulary: read as pairs of tokens, or found from the order in which tokens come.

A merge joins two neighbouring tokens into a third; the first of the list is made first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TypeVar

from everystep.errors import FormatError

MAX_TOKEN = 4096  # characters; those of models have up to some hundreds
MAX_CUTS = 1 << 23  # places at which tokens can be cut; the largest vocabularies have two million
MAX_MERGED = 1 << 26  # characters of all merges; those of the largest vocabularies have 10 million

T = TypeVar("T", str, bytes)


def merge_pairs(merges: Iterable[str], tokens: Collection[str], name: str) -> list[tuple[str, str]]:
    """Return the merges of the file or field `name` as pairs; each half and the whole must be
    tokens."""
    pairs = []
    for rank, merge in enumerate(merges):
        # A half may begin with a space in other alphabets; the separator is never the first.
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 1 or left not in tokens or right not in tokens or left + right not in tokens:
            missing = [text for text in (left, right, left + right) if text not in tokens]
            raise FormatError(
                f"Merge {rank} of {name} is wrong",
                wanted="two tokens separated by a space, whose union is a token",
                got=f"{merge!r}" + (f", where {missing[0]!r} is no token" if missing else ""),
            )
        pairs.append((left, right))
    return pairs


def merges_by_id(ids: Mapping[T, int], name: str, *, by_halves: bool = False) -> list[tuple[T, T]]:
    """Return every way to cut a token into two tokens, in the order of the ids of the wholes.

    Cuts of one token are ordered by where they lie, or by the ids of the halves: transformers
    (5.23) does the one for SentencePiece and the other for tiktoken.
    """

    def order(pair: tuple[T, T]) -> tuple[int, int, int]:
        left: T = pair[0]
        right: T = pair[1]
        first, second = (ids[left], ids[right]) if by_halves else (len(left), 0)
        return ids[left + right], first, second

    return sorted(cuts(ids, name), key=order)


def cuts(ids: Mapping[T, int], name: str) -> list[tuple[T, T]]:
    """Return every way to cut a token into two tokens; FormatError where they are too many."""
    check_lengths(ids, name)
    own = {token: token for token in ids}  # so that each half is the token itself, and no copy
    found: list[tuple[T, T]] = []
    room = MAX_MERGED
    for token in ids:
        for place in range(1, len(token)):
            left, right = own.get(token[:place]), own.get(token[place:])
            if left is not None and right is not None:
                found.append((left, right))
                room -= len(token)
        if room < 0:
            what, wanted = f"The tokens of {name} can be cut in too many ways", f"{MAX_MERGED}"
            raise FormatError(what, wanted=f"at most {wanted} characters of all merges")
    return found


def check_lengths(tokens: Iterable[Sequence[object]], name: str) -> None:
    """FormatError where a token is endless, or there are more places to cut than time allows."""
    lengths = [len(token) for token in tokens]
    if (longest := max(lengths, default=0)) > MAX_TOKEN:
        what, wanted = f"{name} has an endless token", f"at most {MAX_TOKEN} characters"
        raise FormatError(what, wanted=wanted, got=longest)
    if sum(lengths) > MAX_CUTS:
        what, wanted = f"The tokens of {name} are too long", f"at most {MAX_CUTS} characters"
        raise FormatError(what, wanted=wanted, got=sum(lengths))
