"""A running request as bytes, and back: in another engine, on another day, in another process.

What is written is what the group knows: tokens, scores, what has ended, what was reported. Cache
rows and memories of prefixes are made again from the ids. The request itself is not written: the
caller makes it again from the same prompt and options, and its fingerprint must agree.
"""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import numpy as np
from torch import Tensor

from everystep.errors import FormatError, RequestError
from everystep.types import Companion, Group, Request, Sequence, TokenTable, values_of
from everystep.types.stored import from_bytes, to_bytes

_VERSION = 2
_OF_GROUP = ("done", "state", "prompt_known", "opened", "settled", "reported")
_OF_SEQUENCE = ("score", "lineage", "index", "provisional", "finish")


def written(group: Group, table: np.ndarray) -> bytes:
    """The group as bytes; (lines, n) visible ids of all sequences. RequestError where it holds what
    cannot be written, for instance what a caller's own strategy keeps."""
    first = group.request.prompt_visible
    saved: dict[str, Any] = {name: getattr(group, name) for name in _OF_GROUP}
    saved["version"], saved["fingerprint"] = _VERSION, fingerprint(group.request)
    saved["rank"] = group.rank
    saved["tokens"] = [table[s.line, first : s.visible] for s in group.live]
    saved["live"] = [
        {"memo": values_of(s.memo), **{name: getattr(s, name) for name in _OF_SEQUENCE}}
        for s in group.live
    ]
    return to_bytes(saved)


def read(data: bytes, request: Request) -> dict[str, Any]:
    """Read what was written of a group with this request; RequestError if it was another
    request."""
    saved = from_bytes(data)
    same = isinstance(saved, dict) and saved.get("version") == _VERSION
    if not same or saved.get("fingerprint") != fingerprint(request):
        raise RequestError(
            "what was saved is of another request, or of another version",
            wanted="the same prompt, strategy, draws, lengths and kinds of processors",
            do="Make the request again as it was made when it was saved",
        )
    if not saved.keys() >= {"rank", "tokens", "live", *_OF_GROUP}:
        raise FormatError("a saved generation is damaged", got=sorted(saved))
    return saved


def resume(group: Group, saved: dict[str, Any], table: TokenTable) -> None:
    """The group knows what was saved; its sequences have lines, and no rows yet."""
    request, prompt = group.request, group.request.prompt
    tokens: list[np.ndarray] = saved["tokens"]
    visible = request.visible_prompt()
    try:
        for name in _OF_GROUP:
            setattr(group, name, saved[name])
        group.live = [
            Sequence(
                request,
                line=table.open(np.concatenate([visible, own])),
                length=prompt.length + len(own),
                cached=prompt.start,
                companions=tuple(Companion(one) for one in request.companions),
                **known,
            )
            for own, known in zip(tokens, saved["live"], strict=True)
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("a saved generation is damaged", got=error) from error


def fingerprint(request: Request) -> str:
    """Equal for requests of which one can go on where the other was saved."""
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
    """The class of a processor or hook, and those of its values that are numbers or text."""
    named = dataclasses.fields(processor) if dataclasses.is_dataclass(processor) else ()
    values = [getattr(processor, field.name) for field in named]
    plain = [value for value in values if isinstance(value, (bool, int, float, str, tuple))]
    return f"{type(processor).__qualname__} {_text(plain)}"
