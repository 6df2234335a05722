"""Quotas of keys: requests at once, tokens per minute, rows at once, and a share of the engine."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from everystep.errors import CapacityError, OversizeError, RequestError
from everystep.server.access import key_lines


class Quota(msgspec.Struct, frozen=True):
    """The most that a key may use; None is any number. `weight`: its share beside other keys."""

    requests: int | None = None
    tokens_per_minute: int | None = None
    rows: int | None = None
    weight: float = 1.0


class QuotaError(CapacityError):
    """A key has used what it may use. `seconds`: after which it may ask again."""

    def __init__(self, what: str, *, wanted: str, seconds: float) -> None:
        super().__init__(what, wanted=wanted, do="Come again later")
        self.seconds = max(1, math.ceil(seconds))


class QuotaBook:
    """The use that keys make of their quotas. `own`: by digest; `usual`: that of all others."""

    def __init__(
        self,
        usual: Quota | None = None,
        own: Mapping[str, Quota] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usual, self._own, self._clock = usual or Quota(), own or {}, clock
        self._requests: Counter[str | None] = Counter()
        self._rows: Counter[str | None] = Counter()
        self._levels: dict[str | None, tuple[float, float]] = {}

    def of(self, owner: str | None) -> Quota:
        """Return the quota of a key."""
        return self._usual if owner is None else self._own.get(owner, self._usual)

    @contextmanager
    def request(self, owner: str | None) -> Iterator[None]:
        """Count a request while the block lasts; QuotaError if there are as many as may be."""
        most = self.of(owner).requests
        if most is not None and self._requests[owner] >= most:
            wanted = f"at most {most} at once"
            raise QuotaError("too many requests of this key", wanted=wanted, seconds=1)
        self._requests[owner] += 1
        try:
            yield
        finally:
            self._requests[owner] -= 1

    # --- tokens -----------------------------------------------------------------------------------

    def require_tokens(self, owner: str | None, positions: int) -> None:
        """Raise QuotaError if the minute has no room for so many ids of a prompt, OversizeError if
        no minute has."""
        rate = self.of(owner).tokens_per_minute
        if rate is None:
            return
        wanted = f"{rate} tokens per minute"
        if positions > rate:
            do = "Send a shorter prompt"
            what = "the prompt is longer than what this key may use in a minute"
            raise OversizeError(what, wanted=wanted, got=positions, do=do)
        missing = positions - self._level(owner, rate)
        if missing > 0:
            seconds = missing * 60 / rate
            raise QuotaError("this key has used its tokens", wanted=wanted, seconds=seconds)

    def use_tokens(self, owner: str | None, count: int) -> None:
        """Take so many tokens from what the key may use; what is too much is missing later."""
        if (rate := self.of(owner).tokens_per_minute) is not None:
            self._levels[owner] = self._level(owner, rate) - count, self._clock()

    def _level(self, owner: str | None, rate: int) -> float:
        """Return how many tokens the key may use now."""
        level, since = self._levels.get(owner, (float(rate), self._clock()))
        return min(float(rate), level + (self._clock() - since) * rate / 60)

    # --- rows -------------------------------------------------------------------------------------

    def require_rows(self, owner: str | None, rows: int) -> None:
        """Raise OversizeError for a request that needs more rows than its key may ever use."""
        most = self.of(owner).rows
        if most is not None and rows > most:
            raise OversizeError(
                "the request needs more rows than this key may use",
                wanted=f"at most {most}",
                got=rows,
                do="Lower n, best_of or num_beams",
            )

    def has_rows(self, owner: str | None, rows: int) -> bool:
        """Return whether the key may use so many rows more now."""
        most = self.of(owner).rows
        return most is None or self._rows[owner] + rows <= most

    def use_rows(self, owner: str | None, rows: int) -> None:
        """Count rows that the key uses, or with a negative number no longer uses."""
        self._rows[owner] += rows


def read_key_quotas(path: Path) -> dict[str, tuple[str | None, Quota | None]]:
    """Return the names and quotas that lines of a file of keys have after their digests, by digest.

    A line is `DIGEST name=alice requests=4 tokens_per_minute=1000 rows=2 weight=0.5`; each word may
    be left out.
    """
    found: dict[str, tuple[str | None, Quota | None]] = {}
    for number, digest, words in key_lines(path):
        said = dict(word.partition("=")[::2] for word in words)
        name = said.pop("name", None)
        try:
            if unknown := said.keys() - {*Quota.__struct_fields__}:
                raise ValueError(f"no word {min(unknown)!r}")
            quota = msgspec.convert(said, Quota, strict=False) if said else None
        except ValueError as error:
            raise RequestError(
                f"line {number} of a file of keys cannot be read",
                wanted=f"words such as name=alice, and {', '.join(Quota.__struct_fields__)}",
                got=str(error)[:100],
            ) from error
        found[digest] = name, quota
    return found
