"""A running request as bytes, and back: in another engine, on another day, in another process.

What is written is what the group knows: tokens, scores, what has ended, what was reported. Cache
rows and memories of prefixes are made again from the ids. The request itself is not written: the
caller makes it again from the same prompt and options, and its fingerprint must agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence as Items
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
from torch import Tensor

from everystep import errors
from everystep.engine.logprobs import Likelihood, last_choices
from everystep.errors import NOBODYS, EverystepError, FormatError, RequestError
from everystep.stops.ends import UserStop
from everystep.strategies.base import may_know
from everystep.types import (
    Companion,
    Finished,
    FinishReason,
    Group,
    Request,
    Sequence,
    TokenTable,
    values_of,
)
from everystep.types.stored import fits, fits_memo, from_bytes, stored, to_bytes

_VERSION = 2
_OF_GROUP = ("done", "state", "prompt_known", "opened", "settled", "reported")
_MOST = 2**31
_OF_SEQUENCE = ("score", "lineage", "index", "provisional", "finish")


@stored("failure")
class SavedFailure(NamedTuple):
    """An error behind an end: its class in our tree, and its text."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: Exception) -> SavedFailure:
        """Return an error as it is written; one that is not ours begins with its class."""
        text = (
            str(error) if isinstance(error, EverystepError) else f"{type(error).__name__}: {error}"
        )
        known = (
            one.__name__ for one in type(error).__mro__ if vars(errors).get(one.__name__) is one
        )
        return cls(next(known, EverystepError.__name__), text)

    def error(self) -> EverystepError:
        """Return the error again, without what had caused it."""
        kind = vars(errors)[self.kind]
        ours = isinstance(kind, type) and issubclass(kind, EverystepError)
        if not ours or issubclass(kind, NOBODYS):
            raise LookupError(self.kind)
        return kind(self.text)


@stored("criterion")
class SavedCriterion(NamedTuple):
    """A criterion of the caller's behind an end, by its place among the stops of the request."""

    place: int


@dataclasses.dataclass
class _Causes:
    """The errors and criteria behind the ends of a request, and what stands in bytes for them.

    `strays`: places of criteria that were read and that the request does not have.
    """

    request: Request
    strays: list[int] = dataclasses.field(default_factory=list)

    def written(self, value: object) -> object:
        """Return what is written in place of a value; None where nothing is."""
        if isinstance(value, Exception):
            return SavedFailure.of(value)
        stops = enumerate(self.request.stops)
        places = (i for i, one in stops if isinstance(one, UserStop) and one.call is value)
        return next(map(SavedCriterion, places), None)

    def read(self, value: object) -> object:
        """Return a value as it was before it was written."""
        if isinstance(value, SavedFailure):
            return value.error()
        if isinstance(value, SavedCriterion):
            own = dict(enumerate(self.request.stops)).get(value.place)
            if isinstance(own, UserStop):
                return own.call
            self.strays.append(value.place)
        return value


class SavedSequence(TypedDict):
    """A live sequence as it is written, beside its tokens."""

    memo: dict[str, Any]
    score: float
    lineage: int
    index: int
    provisional: int
    finish: FinishReason | None


class SavedGroup(TypedDict):
    """A group as it is written; `tokens` are the ids after the prompt of each of `live`."""

    version: int
    fingerprint: str
    rank: int
    tokens: list[np.ndarray]
    live: list[SavedSequence]
    done: list[Finished]
    state: Any
    prompt_known: tuple[Likelihood, ...] | None
    opened: bool
    settled: bool
    reported: int


def written(group: Group, table: np.ndarray) -> bytes:
    """Return the group as bytes; (lines, n) visible ids of all sequences. RequestError where it
    holds what cannot be written, for instance what a caller's own strategy keeps."""
    first = group.request.prompt_visible
    saved: dict[str, Any] = {name: getattr(group, name) for name in _OF_GROUP}
    saved["version"], saved["fingerprint"] = _VERSION, fingerprint(group.request)
    saved["rank"] = group.rank
    saved["tokens"] = [table[s.line, first : s.visible] for s in group.live]
    saved["live"] = [
        {"memo": values_of(s.memo), **{name: getattr(s, name) for name in _OF_SEQUENCE}}
        for s in group.live
    ]
    return to_bytes(saved, _Causes(group.request).written)


def read(data: bytes, request: Request, vocabulary: int) -> SavedGroup:
    """Read what was written of a group with this request; RequestError if it was another request,
    FormatError for anything that no group can have known."""
    causes = _Causes(request)
    saved = from_bytes(data, causes.read)
    same = isinstance(saved, dict) and saved.get("version") == _VERSION
    if not same or saved.get("fingerprint") != fingerprint(request):
        raise RequestError(
            "what was saved is of another request, or of another version",
            wanted="the same prompt, strategy, draws, lengths and kinds of processors",
            do="Make the request again as it was made when it was saved",
        )
    fitting = fits(saved, SavedGroup) and _possible(saved, request, vocabulary)
    if not fitting or causes.strays:
        raise FormatError("a saved generation is damaged", got="what no generation can know")
    return cast(SavedGroup, saved)


def _possible(saved: SavedGroup, request: Request, vocabulary: int) -> bool:
    """Return whether a group with this request may have known all that."""
    live, tokens, done = saved["live"], saved["tokens"], saved["done"]
    width = request.strategy.width
    most = request.max_length - request.prompt.length

    def are_ids(ids: np.ndarray) -> bool:
        if ids.dtype != np.int64 or ids.ndim != 1 or len(ids) > most:
            return False
        return not len(ids) or 0 <= ids.min() <= ids.max() < vocabulary

    def alike(known: Items[Likelihood]) -> bool:
        kinds = {(one.top_tokens.shape, one.top_logprobs.shape) for one in known}
        ids = all(0 <= one.token < _MOST and one.top_tokens.dtype == np.int64 for one in known)
        return ids and len(kinds) < 2 and all(a == b and len(a) == 1 for a, b in kinds)

    memos = [*(one["memo"] for one in live), *(one.memo for one in done)]
    shortest = min(map(len, tokens), default=saved["reported"])
    return (
        len(live) == len(tokens) <= (width if saved["opened"] else 1)
        and bool(live or done)
        and may_know(request.strategy, saved["state"])
        and all(are_ids(ids) for ids in (*tokens, *(one.tokens for one in done)))
        and all(fits_memo(memo) and alike(last_choices(memo, most)) for memo in memos)
        and alike(saved["prompt_known"] or ())
        and all(0 <= one["provisional"] <= len(ids) for one, ids in zip(live, tokens, strict=True))
        and all(0 <= one < width for one in (*(s["index"] for s in live), *(d.index for d in done)))
        and all(one.serial >= -1 and one.lineage >= 0 for one in done)
        and all(one["lineage"] >= 0 for one in live)
        and len(saved["prompt_known"] or ()) <= request.prompt.length
        and 0 <= saved["reported"] <= shortest
        and 0 <= saved["rank"] < _MOST
    )


def resume(group: Group, saved: SavedGroup, table: TokenTable) -> None:
    """Give the group what was saved; its sequences have lines, and no rows yet."""
    request, prompt = group.request, group.request.prompt
    visible = request.visible_prompt()
    for name in _OF_GROUP:
        setattr(group, name, saved[name])  # type: ignore[literal-required]
    group.live = [
        Sequence(
            request,
            line=table.open(np.concatenate([visible, own])),
            length=prompt.length + len(own),
            cached=prompt.start,
            companions=tuple(Companion(one) for one in request.companions),
            **known,
        )
        for own, known in zip(saved["tokens"], saved["live"], strict=True)
    ]


def fingerprint(request: Request) -> str:
    """Return a text that is equal for requests of which one can go on where the other was saved."""
    digest = hashlib.sha256()
    for prompt in (request.prompt, *request.companions):
        parts = (prompt.ids, prompt.embeds, prompt.positions, prompt.encoder, prompt.mask)
        inside = prompt.injected
        injected = () if inside is None else (inside.positions, inside.embeds, inside.deepstack)
        for part in (*parts, *injected, *prompt.inputs.values(), *prompt.whole.values()):
            plain = part.detach().float().cpu().numpy() if isinstance(part, Tensor) else part
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
        [_described(hook) for hook in request.hooks],
    )
    digest.update(_text(choices).encode())
    return digest.hexdigest()


def _text(value: Any) -> str:
    """Write a value as `repr` does, from its fields.

    The `repr` of a dataclass notes that it runs: an interrupt within may leave the note, and the
    value is `...` for ever.
    """
    if type(value) is tuple:
        inner = [*map(_text, value)]
        return f"({inner[0]},)" if len(inner) == 1 else f"({', '.join(inner)})"
    if type(value) is list:
        return f"[{', '.join(map(_text, value))}]"
    if not hasattr(type(value).__repr__, "__wrapped__") or not dataclasses.is_dataclass(value):
        return repr(value)
    named = [one.name for one in dataclasses.fields(value) if one.repr]
    shown = [f"{name}={_text(getattr(value, name))}" for name in named]
    return f"{type(value).__qualname__}({', '.join(shown)})"


def _described(processor: Any) -> str:
    """Return the class of a processor or hook, and its values that are numbers or text."""
    named = dataclasses.fields(processor) if dataclasses.is_dataclass(processor) else ()
    values = [getattr(processor, field.name) for field in named]
    plain = [value for value in values if isinstance(value, (bool, int, float, str, tuple))]
    return f"{type(processor).__qualname__} {_text(plain)}"
