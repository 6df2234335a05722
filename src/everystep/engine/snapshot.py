"""A running request as bytes, and back: in another engine, on another day, in another process.

What is written is what the group knows: tokens, scores, what has ended, what was reported. Cache
rows and memories of prefixes are made again from the ids. The request itself is not written: the
caller makes it again from the same prompt and options, and its fingerprint must agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, NamedTuple

import numpy as np

from everystep.errors import RequestError, message
from everystep.types import Companion, Finished, Group, Request, Sequence, values_of
from everystep.types.stored import from_bytes, stored, to_bytes

_VERSION = 1


@stored("live")
class Live(NamedTuple):
    """A live sequence: its generated ids and all that cannot be made again from them."""

    tokens: np.ndarray
    score: float
    lineage: int
    rank: int
    provisional: int
    finish: Any
    values: dict[str, Any]


@stored("saved")
class Saved(NamedTuple):
    """A group between two steps."""

    version: int
    fingerprint: str
    rank: int
    live: tuple[Live, ...]
    done: tuple[Finished, ...]
    state: Any
    prompt_known: Any
    opened: bool
    settled: bool
    reported: int


def written(group: Group, table: np.ndarray) -> bytes:
    """The group as bytes; (lines, n) visible ids of all sequences. RequestError where it holds what
    cannot be written, for instance what a caller's own strategy keeps."""
    request, first = group.request, group.request.prompt_visible
    live = tuple(
        Live(
            table[s.line, first : s.visible].copy() if s.line >= 0 else np.empty(0, np.int64),
            s.score,
            s.lineage,
            s.index,
            s.provisional,
            s.finish,
            values_of(s.memo),
        )
        for s in group.live
    )
    done = tuple(group.done)
    after = group.state, group.prompt_known, group.opened, group.settled, group.reported
    return to_bytes(Saved(_VERSION, fingerprint(request), group.rank, live, done, *after))


def read(data: bytes, request: Request) -> Saved:
    """What was written of a group with this request; RequestError if it was another request."""
    saved = from_bytes(data)
    wanted = fingerprint(request)
    if not isinstance(saved, Saved) or saved.version != _VERSION or saved.fingerprint != wanted:
        raise RequestError(
            message(
                "what was saved is of another request, or of another version",
                wanted="the same prompt, strategy, draws, lengths and kinds of processors",
                do="Make the request again as it was made when it was saved",
            )
        )
    return saved


def sequences(saved: Saved, request: Request) -> list[Sequence]:
    """The live sequences, without lines and rows."""
    return [
        Sequence(
            request,
            -1,
            request.prompt.length + len(one.tokens),
            request.prompt.start,
            None,
            one.score,
            one.lineage,
            one.rank,
            one.provisional,
            one.finish,
            dict(one.values),
            tuple(Companion(prompt) for prompt in request.companions),
        )
        for one in saved.live
    ]


def fingerprint(request: Request) -> str:
    """Equal for requests of which one can go on where the other was saved."""
    digest = hashlib.sha256()
    for prompt in (request.prompt, *request.companions):
        parts = (prompt.ids, prompt.embeds, prompt.positions, prompt.encoder, prompt.mask)
        for part in (*parts, *prompt.inputs.values()):
            plain = part if isinstance(part, np.ndarray) or part is None else _array(part)
            digest.update(b"-" if plain is None else np.ascontiguousarray(plain).tobytes())
    choices = (
        request.strategy,
        request.draws,
        request.readout,
        request.max_length,
        request.pad_prefix,
        request.adapters,
        request.wants,
        [_described(processor) for processor in request.processors],
        [type(stop).__qualname__ for stop in request.stops],
    )
    digest.update(repr(choices).encode())
    return digest.hexdigest()


def _described(processor: Any) -> str:
    """The class of a processor, and those of its values that are numbers or text."""
    named = dataclasses.fields(processor) if dataclasses.is_dataclass(processor) else ()
    values = [getattr(processor, field.name) for field in named]
    plain = [value for value in values if isinstance(value, (bool, int, float, str, tuple))]
    return f"{type(processor).__qualname__} {plain!r}"


def _array(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().cpu().numpy()
    return array
